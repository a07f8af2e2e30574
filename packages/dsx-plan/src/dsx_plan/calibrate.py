"""`dsx plan calibrate`: measures this machine, in about a minute, and makes a `Machine` of it.

Facts come from the table where it knows the device, else from measurements; the constants follow from measurements
at sizes that training has: the three matrix products of a linear layer's forward and backward, the operators of a
transformer layer that are no products, a tiny operator, and an all-reduce of two processes where there is more than one
device or core.

Where the ranks of a host share its cores and its memory, as many processes as ranks measure at the same time: one that
measures alone gets more than each of two that train (docs/figures.md, "The planner").
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from dsx_core.device import Device, accelerator_kind
from torch.nn import functional as F

from .errors import MachineError
from .machine import Constants, Machine, device_in_table, fingerprint

__all__ = ["calibrate"]

_SECONDS = 1.0
"""The seconds of one measurement."""
_MOST_PROCESSES = 16
"""The most processes that measure at the same time; more of them give the same figures and take long to start."""


@dataclass(frozen=True)
class _Rates:
    """The speeds that one rank reaches.

    Attributes:
        products: floating-point operations per second of matrix products, by dtype.
        stream: bytes per second of an addition of large tensors.
        operators: bytes per second, inputs and outputs, of a transformer layer's other operators.
        operator_seconds: of an operator on next to nothing.
    """

    products: dict[str, float]
    stream: float
    operators: float
    operator_seconds: float


def calibrate(*, links: bool = True, report: Callable[[str], object] = lambda text: None) -> Machine:
    """Measure this machine.

    Args:
        links: measure messages between two processes, too.
        report: hears what is being measured.

    Raises:
        MachineError: two processes cannot meet.
    """
    on_cuda = accelerator_kind() == "cuda"
    device = torch.device("cuda" if on_cuda else "cpu")
    dtypes = {"float32": torch.float32, **({"bfloat16": torch.bfloat16, "float16": torch.float16} if on_cuda else {})}
    if on_cuda:
        report("matrix products, memory, small operators")
        rates = _rates(device, dtypes, _SECONDS)
    else:
        ranks = min(_MOST_PROCESSES, Machine.of_this_host().ranks_per_host)
        report(f"matrix products, memory, small operators, on {ranks} processes at once")
        rates = _rates_of_many(ranks)
    known = device_in_table(Device("cuda").name) if on_cuda else None
    if known is not None:
        machine = Machine.of_this_host()
        key = "bfloat16" if "bfloat16" in rates.products and "bfloat16" in machine.flops else "float32"
        constants = replace(
            machine.constants,
            products=min(1.0, rates.products[key] / machine.flops[key]),
            memory=min(1.0, rates.operators / machine.memory_bandwidth),
            operator_seconds=rates.operator_seconds,
        )
    else:
        base = Machine.of_this_host() if not on_cuda else _unknown_device()
        machine = replace(
            base,
            name=fingerprint(),
            flops={**({} if on_cuda else _assumed_halves(rates.products["float32"])), **rates.products},
            memory_bandwidth=rates.stream,
            host_bandwidth=rates.stream * (1 if on_cuda else base.ranks_per_host),
        )
        constants = Constants(
            products=1.0, memory=min(1.0, rates.operators / rates.stream), links=1.0,
            operator_seconds=rates.operator_seconds,
        )  # fmt: skip
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
    properties = Device("cuda").properties
    return Machine(
        name=properties.name, device="cuda", memory_bytes=properties.total_memory, flops={"float32": 1.0},
        memory_bandwidth=1.0, link_bandwidth=12e9, network_bandwidth=3e9, host_link_bandwidth=12e9,
        ranks_per_host=Device.count(), host_memory_bytes=64 << 30,
    )  # fmt: skip


def _timed(run: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """The mean of the seconds that `run` takes, over `seconds`. Not the median: a step has its share of what disturbs a
    machine that others use.
    """
    wait = Device.of(device).synchronize
    run()
    wait()
    start, runs = time.perf_counter(), 0
    while runs < 3 or time.perf_counter() - start < seconds:
        run()
        runs += 1
        if runs % 8 == 0:
            wait()  # so that a device is at most eight runs behind the clock that ends the loop
    wait()
    return (time.perf_counter() - start) / runs


def _assumed_halves(float32: float) -> dict[str, float]:
    """Processors without instructions for 16-bit products convert: an eighth of the fp32 rate is typical."""
    return {"bfloat16": float32 / 8, "float16": float32 / 8}


def _rates(
    device: torch.device, dtypes: dict[str, torch.dtype], seconds: float, together: Callable[[], object] = lambda: None
) -> _Rates:
    """Measure; `together` is called before each measurement, and returns when every process has called it."""
    measured: dict[str, tuple[float, float, float]] = {}
    for name, dtype in dtypes.items():
        together()
        measured[name] = _products(device, dtype, seconds)
    together()
    stream = _stream(device, seconds)
    together()
    operators = _operators(device, seconds)
    together()
    products = {name: _rate(*found, operators if device.type == "cuda" else None) for name, found in measured.items()}
    return _Rates(products, stream, operators, _small(device, seconds))


def _rate(flops: float, nbytes: float, seconds: float, bytes_per_second: float | None) -> float:
    """Floating-point operations per second of the arithmetic alone, as `cost` counts it: on a device it adds the time
    of the bytes to it. That time cannot be more than half of what was measured.
    """
    moving = 0.0 if bytes_per_second is None else min(seconds / 2, nbytes / bytes_per_second)
    return flops / (seconds - moving)


def _run_all(processes: Sequence[Any]) -> int:
    """Run processes side by side, at most two minutes; how many of them failed or hung."""
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    failed = [process for process in processes if process.exitcode != 0]
    for process in failed:
        process.kill()
    return len(failed)


def _rates_of_many(ranks: int) -> _Rates:
    """The medians of what so many processes with a thread each get while all of them measure."""
    import torch.multiprocessing as mp  # lazy import: only here are processes started

    context = mp.get_context("spawn")
    results, barrier = context.SimpleQueue(), context.Barrier(ranks)
    processes = [
        context.Process(target=_measuring, args=(barrier, results, _SECONDS), daemon=True) for _ in range(ranks)
    ]
    failed = _run_all(processes)
    if failed:
        raise MachineError(f"calibrate: {failed} of {ranks} processes that measured side by side failed or hung")
    found: list[_Rates] = [results.get() for _ in processes]

    def middle(values: list[float]) -> float:
        return sorted(values)[len(values) // 2]

    return _Rates(
        {name: middle([rates.products[name] for rates in found]) for name in found[0].products},
        *(middle([getattr(rates, name) for rates in found]) for name in ("stream", "operators", "operator_seconds")),
    )


def _measuring(barrier: Any, results: Any, seconds: float) -> None:
    torch.set_num_threads(1)
    results.put(_rates(torch.device("cpu"), {"float32": torch.float32}, seconds, lambda: barrier.wait(60)))


def _products(device: torch.device, dtype: torch.dtype, seconds: float) -> tuple[float, float, float]:
    """Floating-point operations, bytes and seconds of a transformer layer's products, forward and backward: the three
    products of a linear layer and attention differ in their rates, and a step has all of them. A linear layer's
    floating-point operations are 6 * rows * inputs * outputs, those of attention 4 * sequences * heads * length^2 *
    head width forward and 2.5 times as many backward. Each product of a linear layer reads or writes all three
    matrices; attention reads and writes 4 tensors of the size of its inputs forward and 8 backward.
    """
    sequences, length, width = (16, 1024, 4096) if device.type == "cuda" else (8, 128, 512)
    rows, wide, head = sequences * length, 4 * width, 64
    x = torch.randn(rows, width, device=device, dtype=dtype)
    weight = torch.randn(wide, width, device=device, dtype=dtype)
    gradient = torch.randn(rows, wide, device=device, dtype=dtype)
    shape = (sequences, width // head, length, head)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    upstream = torch.randn(shape, device=device, dtype=dtype)

    def layer() -> None:
        for _ in range(2):  # up and down; the smaller ones around attention are left out
            torch.mm(x, weight.T)
            torch.mm(gradient, weight)
            torch.mm(gradient.T, x)
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), upstream)

    flops = 2 * 6 * rows * width * wide + 3.5 * 4 * rows * length * width
    nbytes = (2 * 3 * (rows * width + rows * wide + wide * width) + 12 * rows * width) * x.element_size()
    return flops, nbytes, _timed(layer, device, seconds)


def _stream(device: torch.device, seconds: float) -> float:
    x = torch.ones(1 << (27 if device.type == "cuda" else 23), device=device)
    y = torch.empty_like(x)
    return 3 * x.nbytes / _timed(lambda: torch.add(x, x, out=y), device, seconds)


def _operators(device: torch.device, seconds: float) -> float:
    """Of a transformer layer's normalisation, GELU (four times as wide) and residual sum with their backward. On
    processors the exponentials bind, not the memory. The cost model knows one rate for all of them, so their mixture
    decides it.
    """
    rows, width = (16384, 4096) if device.type == "cuda" else (1024, 512)
    x = torch.randn(rows, width, device=device, requires_grad=True)
    wide = torch.randn(rows, 4 * width, device=device, requires_grad=True)
    upstream = torch.randn_like(x), torch.randn_like(wide)

    def layer() -> None:
        torch.autograd.grad((x + F.layer_norm(x, (width,)), F.gelu(wide)), (x, wide), upstream)

    # Tensors read and written, in sizes of x: normalisation 2 + 3, sum 3, the sum of its gradients 3, GELU 4 * (2 + 3).
    return 31 * x.nbytes / _timed(layer, device, seconds)


def _small(device: torch.device, seconds: float) -> float:
    """Seconds of an operator that does next to nothing, in a row of many, as a step has them."""
    x, count = torch.ones(64, device=device), 1000

    def many() -> None:
        for _ in range(count):
            x.mul_(1.0)

    return _timed(many, device, seconds) / count


def _copies(device: torch.device) -> float:
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    return host.nbytes / _timed(lambda: there.copy_(host, non_blocking=True), device, _SECONDS)


def _pairs(on_cuda: bool) -> bool:
    return Device.count() > 1 if on_cuda else (os.cpu_count() or 1) > 1


def _links(on_cuda: bool) -> tuple[float, float]:
    """Bytes per second that a rank of two sends, and seconds of the smallest message."""
    import torch.multiprocessing as mp  # lazy import: only here are processes started

    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    port = _free_port()
    ranks = [context.Process(target=_rank, args=(rank, port, on_cuda, results), daemon=True) for rank in range(2)]
    if _run_all(ranks) or results.empty():
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
    Device.of(device).make_current()
    dsx_comm.init_distributed(verbose=False)
    found = []
    for numel in (16, 1 << 22):
        x, times = torch.ones(numel, device=device), []
        for _ in range(20):
            dsx_comm.barrier()
            start = time.perf_counter()
            dsx_comm.all_reduce(x)
            Device.of(device).synchronize()
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
