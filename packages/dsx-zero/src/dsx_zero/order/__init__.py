"""The order of collectives, on which all ranks agree.

`schedule` frozen data and the rule of agreement, `agreed` following and checking it, `channel` words between ranks.
"""
