"""Races between streams are noticed without a device: each mistake below is planted in dsx itself, and `StreamMemory`
must report it. The same program without the mistake gives no report. On a CPU nothing runs late, so that the values are
right all the same.

As `test_planted_bugs.py`, for mistakes that only a device would show.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import dsx_zero
import dsx_zero.gather.executor
import pytest
import torch
from dsx_comm.lanes import CudaLane, lanes_from
from dsx_testkit import FakeCuda, MemoryStore, StreamMemory
from dsx_zero.homes.home import HostHome

HOST, DISK = {"device": "cpu"}, {"device": "nvme", "max_in_cpu": 0, "buffer_size": 4096}
ON_DEVICE: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
ON_HOST = {**ON_DEVICE, "offload_param": HOST, "offload_optimizer": HOST}
ON_DISK = {**ON_DEVICE, "offload_param": DISK, "offload_optimizer": {"device": "nvme"}}


class Blocks(torch.nn.Module):
    """Several units, which are gathered ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def model_at_stage_3(config: dict[str, Any]) -> None:
    """Three updates of a model on device 0, which has no values."""
    device = torch.device("meta")
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # noqa: E731
    model, optimizer = dsx_zero.shard(Blocks(), sgd, config=config, device=device, store=MemoryStore())
    for _ in range(3):
        model(torch.ones(3, 16, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def no_work(result: torch.Tensor) -> None:
    """What a job returns that leaves nothing pending."""


def lane_of_another_device(config: dict[str, Any]) -> None:
    """A lane of device 1 while device 0 is current, with work of its user on device 1 around."""
    lane = CudaLane(torch.device("cuda", 1))
    with torch.cuda.device(1):
        x = torch.zeros(8, device="meta")
    ticket = lane.submit(lambda: no_work(x.add_(1)), see_writes_so_far=True)
    ticket.wait()
    with torch.cuda.device(1):
        x.mul_(2)


def store_on_the_host(config: dict[str, Any]) -> None:
    """What the device has just computed is copied to the host on a lane."""
    home, x = HostHome(8, torch.float32, torch.device("meta")), torch.zeros(8, device="meta")
    x.add_(1)
    home.store(x, CudaLane(torch.device("cuda"))).wait()


# - The races


def staged_on_the_callers_stream() -> Any:
    """The shard on its way to the device lies in memory of the caller's stream, which is dropped after the gather."""

    def fetching(home, device, lane):
        view = home.view()
        if view is not None and view.device == device:
            return lambda: view
        out = torch.empty(home.numel, dtype=home.dtype, device=device)
        ticket = home.fetch(out, lane)
        return lambda: (ticket.wait(), out)[1]

    return patch.object(dsx_zero.gather.executor, "fetching", fetching)


def read_into_memory_of_the_caller() -> Any:
    """The copy of a shard from disk does not wait for what used its memory on the device before."""

    def fetching(home, device, lane):
        values, arriving = home.take()
        out = torch.empty(home.numel, dtype=home.dtype, device=device)

        def give():
            arriving.wait()
            return out.copy_(values, non_blocking=True)

        return give

    return patch.object(dsx_zero.gather.executor, "fetching", fetching)


def stored_without_seeing_writes() -> Any:
    """What the device has computed leaves for the host before it is there."""

    def store(self, values, lane, *, start=0):
        target = self._tensor[start : start + values.numel()]
        ticket = lane.submit(lambda: no_work(target.copy_(values, non_blocking=True)))
        self._arriving = (*self._arriving, ticket)
        return ticket

    return patch.object(HostHome, "store", store)


def host_reads_what_is_under_way() -> Any:
    return patch("dsx_comm.lanes._CudaTicket.synchronize", lambda self: None)


def the_current_stream_of_the_current_device() -> Any:
    right = torch.cuda.current_stream
    return patch.object(torch.cuda, "current_stream", lambda device=None: right())


def freed_without_an_event() -> Any:
    return patch.object(CudaLane, "free_after_use", lambda self, buffer: buffer.free())


def gathers_do_not_see_the_step() -> Any:
    return patch.object(dsx_zero.gather.executor.GatherExecutor, "shards_changed", lambda self: None)


def nobody_waits_for_a_gather() -> Any:
    return patch("dsx_comm.lanes._CudaTicket.wait", lambda self: None)


@dataclass(frozen=True)
class Race:
    """One mistake, the program in which it matters, and what the reports must say."""

    name: str
    plant: Callable[[], AbstractContextManager[Any]]
    says: str
    config: dict[str, Any] = field(default_factory=lambda: ON_DEVICE)
    program: Callable[[dict[str, Any]], None] = model_at_stage_3


RACES = [
    Race("a staged shard is memory of the caller's stream", staged_on_the_callers_stream, "handed out again", ON_HOST),
    Race("shards from disk overwrite memory in use", read_into_memory_of_the_caller, "behind earlier uses", ON_DISK),
    Race(
        "values leave for the host before they are there",
        stored_without_seeing_writes,
        "behind aten.add_",
        program=store_on_the_host,
    ),
    Race("the host reads what is under way", host_reads_what_is_under_way, "on host is not ordered", ON_HOST),
    Race(
        "waits go to the stream of the current device",
        the_current_stream_of_the_current_device,
        "on default of 1",
        program=lane_of_another_device,
    ),
    Race("gathered memory is freed without an event", freed_without_an_event, "handed out again on stream"),
    Race("gathers do not see what the step wrote", gathers_do_not_see_the_step, "plain.py"),
    Race("nobody waits for a gather", nobody_waits_for_a_gather, "is not ordered behind aten.copy_.default on stream"),
]


def reports(race: Race, planted: bool) -> list[str]:
    with FakeCuda().installed() as cuda, lanes_from(CudaLane), StreamMemory(cuda) as memory:
        if planted:
            with race.plant():
                race.program(race.config)
        else:
            race.program(race.config)
    return memory.reports


@pytest.mark.parametrize("race", RACES, ids=[race.name.replace(" ", "-") for race in RACES])
def test_the_race_is_reported_and_the_right_code_is_silent(race):
    assert reports(race, planted=False) == []
    found = reports(race, planted=True)
    assert any(race.says in report for report in found), found[:3]
