"""`dsx_activations` on model-parallel ranks: each rank keeps its slice of an input, and inputs that differ are
refused.
"""

import pytest
import torch
from dsx_testkit import RankError, run_ranks


class Axes:
    """Neighbours are model-parallel: the mpu of a job of `world` ranks in pairs."""

    def __init__(self, rank, world, model):
        import torch.distributed as dist

        groups = {}
        for start in range(0, world, model):
            ranks = tuple(range(start, start + model))
            groups["model", ranks] = dist.new_group(ranks)
        for start in range(model):
            ranks = tuple(range(start, world, model))
            groups["data", ranks] = dist.new_group(ranks)
        for (kind, ranks), group in groups.items():
            if rank in ranks:
                setattr(self, f"get_{kind}_parallel_group", lambda group=group: group)
                setattr(self, f"get_{kind}_parallel_rank", lambda ranks=ranks: ranks.index(rank))
                setattr(self, f"get_{kind}_parallel_world_size", lambda ranks=ranks: len(ranks))


def slices(rank, world):
    import dsx_activations
    from dsx_activations.configured import current
    from torch.autograd.graph import saved_tensors_hooks

    mpu = Axes(rank, world, world)
    dsx_activations.configure(mpu, partition_activations=True)
    held = []
    take = current().keeper.place.put
    current().keeper.place.put = lambda flat: held.append(flat.numel()) or take(flat)
    x = torch.arange(7.0, requires_grad=True)
    small, index = torch.ones(1), torch.arange(7)
    whole = torch.full((7,), 2.0)
    whole.no_checkpointing = True
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        y = dsx_activations.checkpoint(
            lambda x, *rest: torch.tanh(x) * rest[0] + rest[1][0] + rest[2], x, small, index, whole
        )
    assert held == [-(-7 // world)], held
    y.sum().backward()
    expected = x.detach().requires_grad_()
    torch.tanh(expected).sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_each_rank_keeps_its_slice():
    run_ranks(slices, 3)


def differing(rank, world):
    import dsx_activations

    dsx_activations.configure(Axes(rank, world, world), partition_activations=True)
    dsx_activations.checkpoint(torch.tanh, torch.full((4,), float(rank), requires_grad=True))


def test_inputs_that_differ_are_refused():
    with pytest.raises(RankError, match="no_checkpointing"):
        run_ranks(differing, 2)
