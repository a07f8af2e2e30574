"""Gradients: from their arrival in a backward to the reduced gradients that this rank keeps.

`gradients` knows when they arrive and when they must be reduced, `protocol` who is told of it, `local` has those of one
rank alone, `reductions` those of one model, `buffers` those of one flat group, `reduction` sends them, `averaging` says
whether dsx-zero averages them, `sharded` and `access` have `.grad` of a divided gradient, `unused` finds parameters
that got none.
"""
