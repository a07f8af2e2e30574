"""Gathers of parameters.

`publishing` gathers after a step at stages 1-2. `stage3` has the parts of stage 3: `lifetime` decides when a unit is
needed, `executor` gathers it, `hooks` and `iterators` observe the modules, `external` and `registry` find the unit
and the model of a parameter.
"""
