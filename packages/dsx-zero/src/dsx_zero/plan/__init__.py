"""Which parameters are gathered, reduced and freed together, and who owns which slice: frozen data, no communication.

`layout` slices of flat buffers, `units` the division of a model, `leaves` modules that are marked as one unit,
`rank_sets` and `secondary` which ranks share a buffer, and second groups of ranks beside those.
"""
