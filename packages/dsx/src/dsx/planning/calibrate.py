"""`dsx plan calibrate`: measures this machine, in about a minute, and makes a `Machine` of it.

Facts come from the table where it knows the device, else from the best of a few measurements; the five constants follow
from measurements at sizes that training has: matrix products, an elementwise operator, a tiny operator, and an
all-reduce of two processes on this machine where there is more than one device or core.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .errors import MachineError
from .machine import Constants, Machine, device_in_table, fingerprint

__all__ = ["calibrate"]

_SECONDS = 1.0
"""Of one measurement."""


def calibrate(*, links: bool = True, report: Callable[[str], object] = lambda text: None) -> Machine:
    """Measure this machine.

    Args:
        links: measure messages between two processes, too.
        report: hears what is being measured.

    Raises:
        MachineError: two processes cannot meet.
    """
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if on_cuda else "cpu")
    dtypes = {"float32": torch.float32, **({"bfloat16": torch.bfloat16, "float16": torch.float16} if on_cuda else {})}
    rates = {}
    for name, dtype in dtypes.items():
        report(f"matrix products in {name}")
        rates[name] = _products(device, dtype)
    report("memory")
    bandwidth = _memory(device)
    report("small operators")
    operator = _small(device)
    known = device_in_table(torch.cuda.get_device_name(0)) if on_cuda else None
    if known is not None:
        machine = Machine.of_this_host()
        key = "bfloat16" if "bfloat16" in rates and "bfloat16" in machine.flops else "float32"
        constants = replace(
            machine.constants,
            products=min(1.0, rates[key] / machine.flops[key]),
            memory=min(1.0, bandwidth / machine.memory_bandwidth),
            operator_seconds=operator,
        )
    else:
        base = Machine.of_this_host() if not on_cuda else _unknown_device()
        machine = replace(
            base,
            name=fingerprint(),
            flops={**({} if on_cuda else {"bfloat16": rates["float32"] / 8, "float16": rates["float32"] / 8}), **rates},
            memory_bandwidth=bandwidth,
            host_bandwidth=bandwidth * (1 if on_cuda else base.ranks_per_host),
        )
        constants = Constants(products=1.0, memory=1.0, links=1.0, operator_seconds=operator)
    if on_cuda:
        report("copies to and from the host")
        machine = replace(machine, host_link_bandwidth=_copies(device))
    if links and _pairs(on_cuda):
        report("messages between two processes")
        rate, latency = _links(on_cuda)
        if known is None:
            machine = replace(machine, link_bandwidth=rate)
            constants = replace(constants, message_seconds=min(0.5, latency))
        else:
            share = min(1.0, rate / machine.link_bandwidth)
            constants = replace(constants, links=share, message_seconds=min(0.5, latency))
    return replace(machine, constants=constants, calibrated_on=fingerprint(), source=f"measured on {fingerprint()}")


def _unknown_device() -> Machine:
    properties = torch.cuda.get_device_properties(0)
    return Machine(
        name=properties.name, device="cuda", memory_bytes=properties.total_memory, flops={"float32": 1.0},
        memory_bandwidth=1.0, link_bandwidth=12e9, network_bandwidth=3e9, host_link_bandwidth=12e9,
        ranks_per_host=torch.cuda.device_count(), host_memory_bytes=64 << 30,
    )  # fmt: skip


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    """The median of seconds that `run` takes, of as many runs as fit into a second."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    run()
    wait()
    found: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(found) < 3 or (time.perf_counter() < end and len(found) < 200):
        start = time.perf_counter()
        run()
        wait()
        found.append(time.perf_counter() - start)
    return sorted(found)[len(found) // 2]


def _products(device: torch.device, dtype: torch.dtype) -> float:
    size = 8192 if device.type == "cuda" else 768
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / _timed(lambda: a @ b, device)


def _memory(device: torch.device) -> float:
    x = torch.ones(1 << (27 if device.type == "cuda" else 23), device=device)
    y = torch.empty_like(x)
    return 3 * x.nbytes / _timed(lambda: torch.add(x, x, out=y), device)


def _small(device: torch.device) -> float:
    """Seconds of an operator that does next to nothing, in a row of many, as a step has them."""
    x, count = torch.ones(64, device=device), 1000

    def many() -> None:
        for _ in range(count):
            x.mul_(1.0)

    return _timed(many, device) / count


def _copies(device: torch.device) -> float:
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    return host.nbytes / _timed(lambda: there.copy_(host, non_blocking=True), device)


def _pairs(on_cuda: bool) -> bool:
    return torch.cuda.device_count() > 1 if on_cuda else (os.cpu_count() or 1) > 1


def _links(on_cuda: bool) -> tuple[float, float]:
    """Bytes per second that a rank of two sends, and seconds of the smallest message."""
    import torch.multiprocessing as mp  # lazy import: only here are processes started

    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    port = _free_port()
    ranks = [context.Process(target=_rank, args=(rank, port, on_cuda, results), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    failed = [process for process in ranks if process.exitcode != 0]
    for process in failed:
        process.kill()
    if failed or results.empty():
        raise MachineError(
            "calibrate: two processes of this machine could not exchange messages within two minutes; leave links out"
            " (--no-links), and write link_bandwidth and constants.links into the file yourself"
        )
    return results.get()


def _rank(rank: int, port: int, on_cuda: bool, results: Any) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    import dsx_comm

    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dsx_comm.init_distributed(verbose=False)
    found = []
    for numel in (16, 1 << 22):
        x, times = torch.ones(numel, device=device), []
        for _ in range(20):
            dsx_comm.barrier()
            start = time.perf_counter()
            dsx_comm.all_reduce(x)
            if on_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        found.append(sorted(times)[len(times) // 2])
    dsx_comm.destroy_process_group()
    if rank == 0:
        latency, large = found
        results.put(((1 << 22) * 4 / max(1e-9, large - latency), latency / max(1.0, math.log2(2))))


def _free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
