"""Plans of the parameters that are gathered, reduced and freed together, and of each rank's slices: frozen data, no
communication.

`layout` has the slices of flat buffers, `units` the division of a model, `leaves` the modules that are marked as one
unit; `rank_sets` and `secondary` say which ranks share a buffer, and which second groups of ranks there are.
"""
