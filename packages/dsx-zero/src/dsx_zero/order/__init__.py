"""The order of collectives, on which all ranks agree.

`schedule` frozen data and the rule of agreement, `agreed` following and checking it, `evaluation` that of forwards
without gradients, `replay` one rank's way through it, `channel` words between ranks, `executor` what it has executed,
`backward` which backward runs.
"""
