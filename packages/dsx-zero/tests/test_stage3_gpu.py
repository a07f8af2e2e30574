"""The mechanism of stage 3 on a CUDA device: gathers on a stream of their own, memory freed behind events."""

import copy

import pytest
import torch
from dsx_comm import RankSet
from dsx_comm.lanes import CudaLane, make_lane
from dsx_zero.gather.executor import GatherExecutor
from dsx_zero.gather.hooks import UnitHooks
from dsx_zero.gather.lifetime import GatherLifetime
from dsx_zero.order.backward import BackwardClock
from dsx_zero.order.executor import CollectiveExecutor
from dsx_zero.order.protocol import NullOrder
from dsx_zero.params.partitioned_unit import PartitionedUnit
from dsx_zero.plan.units import find_parameters, plan_units
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Deep(nn.Module):
    def __init__(self, width, depth, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = x + (block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant))
        return x.square().mean()


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_gradients_and_memory_on_a_side_stream(reentrant):
    width, depth = 1024, 8
    model = Deep(width, depth, reentrant).cuda()
    oracle = copy.deepcopy(model)
    infos = find_parameters(model)
    units = [PartitionedUnit(p) for p in plan_units(model, infos, stage=3, ranks_of=lambda _: RankSet())]
    for unit in units:
        unit.adopt(model, {info.name: info for info in infos})
    lane = make_lane(torch.device("cuda"))
    assert isinstance(lane, CudaLane)

    class SlowCopy:
        def start(self, out, source, group, label):
            torch.cuda._sleep(2_000_000)  # a gather that arrives late: who does not wait for it reads something else
            out.copy_(source)

    gathers = GatherExecutor(units, transport=SlowCopy(), lane=lane)
    order = NullOrder(CollectiveExecutor(lambda unit: None, gathers))
    lifetime = GatherLifetime(units, executor=gathers, order=order, clock=BackwardClock(order))
    UnitHooks(model, units, lifetime)
    x = torch.randn(64, width, device="cuda", requires_grad=True)
    plain = {n: p for u in units for g in u.groups for n, p in zip(g.layout.names, g.parameters)}
    for _ in range(3):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            model(x)
        torch.cuda.synchronize()
        block = 4 * (width * width + width)
        assert torch.cuda.max_memory_allocated() - before < 3 * block + 40 * x.nbytes
        model(x).backward()
        oracle(x).backward()
        for name, parameter in oracle.named_parameters():
            torch.testing.assert_close(plain[name].grad, parameter.grad, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            for group in (g for u in units for g in u.groups):
                group.shard.view().mul_(0.9)
            for parameter in oracle.parameters():
                parameter.mul_(0.9)
        lifetime.parameters_changed()
