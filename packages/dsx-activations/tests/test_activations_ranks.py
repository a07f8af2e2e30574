"""`dsx_activations` on model-parallel ranks: each rank keeps its slice of an input, and inputs that differ are
refused.
"""

import pytest
import torch
from dsx_testkit import RankError, run_ranks
from dsx_testkit.recomputed_models import Axes


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
