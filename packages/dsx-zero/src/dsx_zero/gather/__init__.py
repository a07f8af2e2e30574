"""Parameters on their way to the ranks.

`publishing` stages 1-2, after a step; `stage3` the parts of stage 3: `lifetime` when a unit is needed, `executor` its
gathers, `hooks` and `side_outputs` how modules tell, `external` and `registry` which unit and model a parameter belongs
to.
"""
