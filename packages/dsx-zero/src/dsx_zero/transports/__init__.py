"""Ways to send a flat buffer between the ranks that share it (architecture, C17).

`protocol` defines a transport; `plain` has gathers of exact values, and sums and means of gradients, exact,
in another dtype, in pieces, or over copies; `quantized` has both with fewer bits; `levels` has gathers that use nodes,
which `nodes` finds; `differences` sends parameters in few bits, based on `levels`; `errors` saves quantisation errors
in checkpoints; `chosen` chooses the transports of a model.
"""
