"""Gradients: from their arrival in a backward to the reduced gradient of what this rank keeps.

`gradients` the state of one model, `buffers` that of one flat group, `reduction` moving them, `averaging` who averages,
`sharded` and `access` what `.grad` is when a gradient is divided, `unused` parameters that got none.
"""
