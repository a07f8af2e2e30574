"""Milliseconds of a step by the way in which the ranks agree at its end, on stand-ins for devices: where is the host
idle, and where the device?

    python packages/dsx-zero/bench/step_agreement.py
    python packages/dsx-zero/bench/step_agreement.py --ranks 2 --rounds 1

A device is a thread that does its jobs one after the other: it sleeps (a kernel), or runs an all-reduce (the norm). A
host sleeps while it launches a kernel, and while the user's code runs between two steps. Messages and sums are real,
over gloo. `latency` is added to each message between hosts, for networks and for more ranks than this machine has.

Three ways: `message`, which travels while the host launches the norm; `norm`, for which the host waits until the device
has the sum; and `norm, then message`, where the host reads its own norm first (as fp16 with a check for overflow does
with `step_agreement: message`). `norm` costs the same with such a check.

Left out: what else a GPU does to these times. This shows who waits for whom, not the speed of a GPU.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from dsx_testkit import run_ranks
from dsx_testkit.results import Table, add_json_option

KERNELS = 20
"""Launches of a forward and backward."""
NUMBERS = 14
WAYS = ("message", "norm", "norm, then message")


@dataclass(frozen=True)
class Case:
    """One step, in seconds: `host` launches forward and backward, `device` computes them."""

    name: str
    host: float
    device: float
    update: float
    latency: float
    user: float = 0.005
    launch_update: float = 0.001


CASES = (
    Case("device, long update", host=0.04, device=0.1, update=0.02, latency=0.0),
    Case("device, long update", host=0.04, device=0.1, update=0.02, latency=0.01),
    Case("device, short update", host=0.04, device=0.1, update=0.001, latency=0.0),
    Case("device, short update", host=0.04, device=0.1, update=0.001, latency=0.01),
    Case("host", host=0.1, device=0.04, update=0.001, latency=0.0),
    Case("host", host=0.1, device=0.04, update=0.001, latency=0.01),
)


class Device:
    """Does its jobs in turn, beside the host."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], object]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._jobs.get()()

    def launch(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)

    def reached(self) -> threading.Event:
        """Set when all jobs so far are done."""
        event = threading.Event()
        self.launch(event.set)
        return event


class Rank:
    """One rank: a host and its device."""

    def __init__(self, world: int, hosts: Any, devices: Any) -> None:
        self._device, self._hosts, self._devices = Device(), hosts, devices
        self._mine, self._sums = torch.zeros(NUMBERS), torch.zeros(NUMBERS)
        self._rows = torch.zeros(world * NUMBERS)
        self._before: threading.Event | None = None

    def step(self, case: Case, way: str) -> None:
        """A step; at most two are under way, as where a script reads the loss of the step before."""
        for _ in range(KERNELS):
            time.sleep(case.host / KERNELS)
            self._device.launch(lambda: time.sleep(case.device / KERNELS))
        if way == "message":
            self._exchange(case, meanwhile=self._sum)
        elif way == "norm":
            self._sum()
            self._device.reached().wait()
        else:
            self._device.reached().wait()
            self._exchange(case, meanwhile=lambda: None)
        time.sleep(case.launch_update)
        self._device.launch(lambda: time.sleep(case.update))
        before, self._before = self._before, self._device.reached()
        if before is not None:
            before.wait()
        time.sleep(case.user)

    def end(self) -> None:
        self._device.reached().wait()
        self._before = None

    def _exchange(self, case: Case, meanwhile: Callable[[], None]) -> None:
        import dsx_comm

        handle = dsx_comm.all_gather_into_tensor(self._rows, self._mine, group=self._hosts, async_op=True)
        meanwhile()
        handle.wait()
        time.sleep(case.latency)

    def _sum(self) -> None:
        import dsx_comm

        self._device.launch(lambda: dsx_comm.all_reduce(self._sums, group=self._devices))


def measured(rank: int, world: int, rounds: int, steps: int) -> list[list[float]]:
    """Milliseconds of a step by case and way."""
    import torch.distributed as dist

    me = Rank(world, dist.new_group(), dist.new_group())
    found = []
    for case in CASES:
        samples: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(steps):
                    me.step(case, way)
                me.end()
                samples[way].append((time.perf_counter() - begin) * 1e3 / steps)
        found.append([statistics.median(times) for times in samples.values()])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="steps per timed sample")
    add_json_option(parser)
    options = parser.parse_args()
    table = Table({
        "the limit": "", "update ms": "{:.0f}", "latency ms": "{:.0f}", "message ms": "{:.1f}", "norm ms": "{:.1f}",
        "norm / message": "{:.3f}", "norm, then message ms": "{:.1f}", "norm / norm, then message": "{:.3f}",
    })  # fmt: skip
    for case, (message, norm, after) in zip(
        CASES, run_ranks(measured, options.ranks, options.rounds, options.steps, timeout=900)[0], strict=True
    ):
        table.add(case.name, case.update * 1e3, case.latency * 1e3, message, norm, norm / message, after, norm / after)
    table.save(options.json)


if __name__ == "__main__":
    main()
