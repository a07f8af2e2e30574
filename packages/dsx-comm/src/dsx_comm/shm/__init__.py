"""The shared-memory transport: a torch.distributed backend named "dsx" for host tensors of ranks on one machine.

    import dsx_comm                                   # registers the backend
    torch.distributed.init_process_group("dsx")       # or "cpu:dsx"

`native.py` finds the compiled module, `segment.py` makes the memory and lets the ranks meet in it, `process_group.py`
is the process group, `work.py` its handles, `codes.py` the dtypes and operators it computes itself, `memory.py` tensors
that all ranks can address. Not here: several machines (then, or without the compiled module, the group is a gloo group
and a warning says why), device tensors.
"""
