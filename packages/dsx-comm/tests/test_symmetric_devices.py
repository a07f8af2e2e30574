"""Symmetric memory on devices: where one rank cannot have it, all ranks get ordinary tensors; shapes of every rank
work.

There is no device here: "meta" stands for one, and torch's functions are replaced.
"""

import dsx_comm
import pytest
import torch
from dsx_testkit import run_ranks


def stand_in(patch, rank, *, empty_fails=(), meeting_fails=()):
    """Put functions in the place of torch's that fail on some ranks; what was asked for is collected."""
    from torch.distributed import _symmetric_memory as symmetric

    asked = []

    def empty(*size, dtype=None, device=None):
        if not size:
            raise TypeError("empty() needs a size")
        if rank in empty_fails:
            raise RuntimeError("this device cannot map memory")
        asked.append(size)
        return torch.empty(*size, dtype=dtype, device=device)

    def rendezvous(tensor, group):
        if rank in meeting_fails:
            raise RuntimeError("devices 0 and 1 do not reach each other\nand more lines")
        asked.append(group)

    patch.setattr(symmetric, "empty", empty)
    patch.setattr(symmetric, "rendezvous", rendezvous)
    patch.setattr("dsx_comm.symmetric._DEVICES", ("meta",))
    return asked


def shapes(rank, n):
    with pytest.MonkeyPatch.context() as patch:
        asked = stand_in(patch, rank)
        for size, shape in [((), ()), ((0,), (0,)), ((3, 4), (3, 4)), (((2, 0, 5),), (2, 0, 5)), ((7,), (7,))]:
            tensor = dsx_comm.empty(*size, dtype=torch.bfloat16, device="meta")
            assert tensor.shape == shape and tensor.dtype == torch.bfloat16
            assert dsx_comm.is_symmetric(tensor) == (tensor.numel() > 0)
            if tensor.dim():
                assert dsx_comm.is_symmetric(tensor[0:]) == (tensor.numel() > 0)
        name = dsx_comm.get_world_group().group_name
        assert asked == [(1,), name, (12,), name, (7,), name]
        sub = dsx_comm.new_group([0, 1])
        assert not dsx_comm.is_symmetric(dsx_comm.empty(3, device="meta"), sub)


def test_shapes():
    run_ranks(shapes, 2)


def fallback(rank, n, **failing):
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch, rank, **failing)
        tensor = dsx_comm.empty(3, 4, device="meta")
        assert tensor.shape == (3, 4) and not dsx_comm.is_symmetric(tensor)
        dsx_comm.barrier()


@pytest.mark.parametrize("failing", [{"empty_fails": (1,)}, {"meeting_fails": (1,)}, {"meeting_fails": (0, 1)}])
def test_what_one_rank_cannot_have_no_rank_has(failing):
    run_ranks(lambda rank, n: fallback(rank, n, **failing), 2)


def several_machines(rank, n):
    import logging

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("dsx_comm").addHandler(handler)
    logging.getLogger("dsx_comm").setLevel(logging.INFO)
    with pytest.MonkeyPatch.context() as patch:
        asked = stand_in(patch, rank)
        patch.setattr("socket.gethostname", lambda: f"node{rank}")
        assert not dsx_comm.is_symmetric(dsx_comm.empty(3, device="meta"))
        assert asked == [(3,)]  # nobody waits in a meeting that cannot come about
    return said


def test_several_machines():
    said = run_ranks(several_machines, 2)
    assert len(said[0]) == 1 and "on several machines" in said[0][0] and said[1] == []


def ordinary(rank, n):
    for shape in ((), (0,), (2, 3)):
        assert dsx_comm.empty(*shape, dtype=torch.int64).shape == shape
    scalar = dsx_comm.empty()
    scalar.fill_(rank + 1.0)
    dsx_comm.all_reduce(scalar)
    return scalar.item()


@pytest.mark.parametrize("backend", ["gloo", "dsx"])
def test_scalars_on_the_host(backend):
    assert run_ranks(ordinary, 2, backend=backend) == [3.0, 3.0]
