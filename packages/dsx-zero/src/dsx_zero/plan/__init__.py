"""Which parameters are gathered, reduced and freed together, and who owns which slice: frozen data, no communication.

`layout` slices of flat buffers, `units` the division of a model, `leaves` modules that are marked as one unit.
"""
