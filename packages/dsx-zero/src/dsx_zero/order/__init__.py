"""The order of collectives, on which all ranks agree.

`schedule` has frozen data and the rule of agreement, `agreed` follows and checks a schedule, `evaluation` has the
schedule of forwards without gradients, `replay` one rank's position in a schedule, `channel` sends words between ranks,
`executor` executes operations, `backward` knows which backward runs.
"""
