"""How a flat buffer travels between the ranks that share it (architecture, C17).

`protocol` what a transport is; `gathers` the values as they are; `reductions` sums and means of gradients, as they are,
in another dtype, in pieces, or over copies; `quantized` both with fewer bits; `levels` gathers that know of nodes,
which `nodes` finds; `errors` what quantised messages left out, in checkpoints; `chosen` which of them a model has.
"""
