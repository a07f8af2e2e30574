"""Gradients: from their arrival in a backward to the reduced gradient of what this rank keeps.

`gradients` when they arrive and when they are due, `reductions` those of one model, `buffers` those of one flat group,
`reduction` moving them, `averaging` who averages, `sharded` and `access` what `.grad` is when a gradient is divided,
`unused` parameters that got none.
"""
