"""Training over lanes that are streams: whatever a lane's stream and the caller's stream share is ordered between them.

`dsx_zero` runs whole on the CPU, with the lanes of a CUDA device over streams that only note their order, while
`StreamMemory` follows the memory of every operation. What it reports would be a race on a device.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import dsx_zero
import pytest
import torch
from dsx_comm import RankSet
from dsx_comm.lanes import CudaLane, lanes_from
from dsx_testkit import FakeCuda, MemoryStore, RecordingWork, StreamMemory, run_ranks
from dsx_zero.gather.executor import GatherExecutor
from dsx_zero.homes.home import HostHome, accumulate
from dsx_zero.params.partitioned_unit import PartitionedUnit
from dsx_zero.plan.units import find_parameters, plan_units
from dsx_zero.step.norm import sum_of_squares
from dsx_zero.transports.plain import PlainGather
from dsx_zero.transports.protocol import Stateless
from dsx_zero.transports.turns import InTurn, Turns

HOST = {"device": "cpu"}
DISK = {"device": "nvme"}
WHOLE = {"stage3_param_persistence_threshold": 0}
ALL_ON_HOST = {**WHOLE, "offload_optimizer": HOST, "offload_param": HOST}
CASES = {
    "on the device": WHOLE,
    "few gathered": {**WHOLE, "stage3_max_live_parameters": 300, "stage3_prefetch_bucket_size": 300},
    "states on the host": {**WHOLE, "offload_optimizer": HOST},
    "all on the host": ALL_ON_HOST,
    "all on disk": {**WHOLE, "offload_optimizer": DISK, "offload_param": {**DISK, "max_in_cpu": 0}},
}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


@contextmanager
def streams():
    """Lanes are streams inside; gives the memory that is watched."""
    with FakeCuda().installed() as cuda, lanes_from(CudaLane), StreamMemory(cuda) as memory:
        yield memory
    assert any("waits for" in line for line in cuda.log)


def train(settings, steps=3, batches=2):
    """The reports of a training at stage 3. (Stages below keep parameters where they are, and "meta" is refused.)"""
    device, adam = torch.device("meta"), lambda parameters: torch.optim.Adam(parameters, lr=0.01)
    with streams() as memory:
        config = {"stage": 3, **settings}
        model, optimizer = dsx_zero.shard(Net(), adam, config=config, device=device, store=MemoryStore())
        for _ in range(steps):
            for _ in range(batches):
                model(torch.ones(3, 16, device=device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(3, 16, device=device))  # an evaluation: gathers that no backward follows
        optimizer.synchronize()
    return memory.reports


def every_case(rank, world):
    return {name: train(case) for name, case in CASES.items()}


@pytest.mark.parametrize("world", [1, 2])
def test_nothing_is_used_by_two_streams_without_an_order(world):
    for found in run_ranks(every_case, world):
        assert found == {name: [] for name in CASES}


def test_memory_that_nobody_reads_is_the_lanes_own_too():
    """A rank that holds a unit gathers it once more for the others, into scratch memory."""
    model = Net().to("meta")
    plans = plan_units(model, find_parameters(model), stage=3, ranks_of=lambda _: RankSet(), bucket_size=1)
    with streams() as memory:
        units = [PartitionedUnit(plan) for plan in plans]
        for unit in units:
            unit.adopt(model, {info.name: info for info in find_parameters(model)})
        lane = CudaLane(torch.device("cuda"))
        gathers = GatherExecutor(units, transport=PlainGather(), lane=lane)
        for _ in range(2):
            for unit in units:
                gathers.run_gather(unit.index)
                gathers.run_gather(unit.index)
                gathers.arrive(unit.index)
                gathers.free(unit.index)
            gathers.settle()
    assert memory.reports == []


def test_the_first_gather_sees_shards_that_were_written_on_the_device():
    with FakeCuda().installed() as cuda:
        GatherExecutor([], transport=PlainGather(), lane=CudaLane(torch.device("cuda")))
    assert cuda.log == ["stream 1 waits for default"]


def test_norms_of_gradients_in_host_memory_travel_together_and_the_host_goes_on():
    ranks, device = RankSet(), torch.device("meta")
    norms = [(ranks, torch.tensor(3.0)), (ranks, torch.zeros((), device=device)), (ranks, torch.tensor(4.0))]
    with FakeCuda().installed() as cuda, StreamMemory(cuda):
        before = dict(cuda.host.clock)
        total, double = sum_of_squares(norms, device=device, alone=True, whole=False)
        assert "default" not in cuda.host.clock or cuda.host.clock["default"] == before.get("default", 0)
    assert total.device == device and not double


def test_adding_to_host_memory_is_the_devices_work_and_the_host_waits_only_to_read():
    device = torch.device("meta")
    home, values = HostHome(8, torch.float32, device), torch.zeros(8, device=device)
    with FakeCuda().installed() as cuda, StreamMemory(cuda) as memory:
        lane, before = CudaLane(torch.device("cuda")), dict(cuda.host.clock)
        home.store(values, lane)
        for _ in range(3):
            ticket = accumulate(home, values, lane)
            ticket.wait()  # of the stream
        assert all(cuda.host.clock.get(name, 0) == before.get(name, 0) for name in ("default", "stream 1"))
        home.view()
        assert cuda.host.clock.get("stream 1", 0) > before.get("stream 1", 0)
    assert memory.reports == []


def test_collectives_take_turns_on_the_device_and_the_copies_before_them_do_not():
    device, turns = torch.device("cuda"), Turns()
    group = SimpleNamespace(key=SimpleNamespace(device=device))

    class Sent(Stateless):
        def start(self, out, source, group, label):
            cuda.note(label)
            return RecordingWork()

    with FakeCuda().installed() as cuda:
        gathers, reduces, sent = CudaLane(device), CudaLane(device), InTurn(Sent(), turns)

        def fetched_and_gathered(label):
            cuda.note("copy")
            return sent.start(None, None, group, label)

        gathers.submit(lambda: fetched_and_gathered("first"))
        reduces.submit(lambda: sent.start(None, None, group, "second"))
        gathers.submit(lambda: fetched_and_gathered("third"))
    # each lane has an event for its ticket, behind the event of the turn
    assert cuda.log == [
        *("copy", "first", "event 1 on stream 1", "event 2 on stream 1"),
        *("stream 2 waits for event 1", "second", "event 3 on stream 2", "event 4 on stream 2"),
        *("copy", "stream 1 waits for event 3", "third", "event 5 on stream 1", "event 6 on stream 1"),
    ]
