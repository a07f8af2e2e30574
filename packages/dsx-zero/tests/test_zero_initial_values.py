"""Rank 0's initial values reach all ranks in few messages, whatever the sizes of the parameters."""

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn


class Uneven(nn.Module):
    """Parameters of many sizes, some without elements, one frozen, one of another dtype."""

    def __init__(self):
        super().__init__()
        sizes = [(3,), (40, 2), (1,), (0,), (2, 2), (300,), (5,), (0, 4), (7,)]
        self.many = nn.ParameterList(torch.randn(size) for size in sizes)
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.low = nn.Parameter(torch.randn(9).bfloat16())

    def forward(self, x):
        return x * sum(parameter.float().sum() for parameter in self.parameters())


def whole_of(parameter):
    found = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()
    return found.clone()  # those without elements are not divided


def adopted(rank, world, message, init):
    from dsx_zero.params import whole

    whole._MESSAGE = message
    torch.manual_seed(rank)  # other values on each rank
    if init:
        with dsx_zero.Init():
            model = Uneven()
        wanted = {name: whole_of(p) for name, p in model.named_parameters()}
    else:
        model = Uneven()
        wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
        for value in wanted.values():
            dsx_comm.broadcast(value, 0)
    with dsx_comm.count_traffic() as traffic:
        model, _ = dsx_zero.shard(
            model,
            lambda p: torch.optim.SGD(p, lr=0.1),
            config={"stage": 3, "stage3_param_persistence_threshold": 0},
        )
    for name, parameter in model.named_parameters():
        assert torch.equal(whole_of(parameter), wanted[name]), name
    return traffic.calls("broadcast")


@pytest.mark.parametrize("init", [False, True])
@pytest.mark.parametrize(("message", "calls"), [(1 << 28, 3), (400, 5), (1, 9)])
def test_the_values_of_rank_0_in_as_many_messages_as_their_bytes_need(message, calls, init):
    found = run_ranks(adopted, 2, message, init)
    assert found == [calls] * 2
