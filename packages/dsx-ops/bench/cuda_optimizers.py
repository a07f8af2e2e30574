"""CUDA optimizer steps beside torch's fused ones and the copy bandwidth of the device.

    python packages/dsx-ops/bench/cuda_optimizers.py [--elements 134217728] [--rounds 21] [--json FILE]

Times are those of CUDA events around one step, medians over rounds in which every contender runs once, in a new order.
Copy bandwidth is `copy_` between two buffers as large as a parameter, counted as bytes read plus bytes written. Without
a CUDA device it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import dsx_ops
import torch
from dsx_ops import onebit
from dsx_ops.cuda import loader
from dsx_testkit.results import Table, add_json_option

Step = Callable[[], object]


@dataclass
class Contender:
    """One way of doing a job; `nbytes` is what it must move at least."""

    name: str
    nbytes: float
    step: Step


def parameters(count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """`count` tensors of `numel` elements with gradients, on the device."""
    found = [torch.nn.Parameter(torch.randn(numel, device="cuda").to(dtype)) for _ in range(count)]
    for p in found:
        p.grad = torch.randn(numel, device="cuda").to(dtype)
    return found


def ours(kind: type, count: int, numel: int, dtype: torch.dtype, **options: object) -> Step:
    """One of our optimizers."""
    return kind(parameters(count, numel, dtype), lr=1e-3, **options).step


def torchs(count: int, numel: int, dtype: torch.dtype) -> Step:
    """torch's fused AdamW."""
    return torch.optim.AdamW(parameters(count, numel, dtype), lr=1e-3, fused=True).step


def one_tensor(n: int) -> list[Contender]:
    """fp32 AdamW on one tensor."""
    return [
        Contender("torch AdamW fused", 28.0 * n, torchs(1, n, torch.float32)),
        Contender("dsx FusedAdam", 28.0 * n, ours(dsx_ops.FusedAdam, 1, n, torch.float32, weight_decay=0.01)),
    ]


def many_tensors(n: int) -> list[Contender]:
    """2000 tensors."""
    each = max(n // 2000, 1)
    return [
        Contender("torch AdamW fused", 28.0 * each * 2000, torchs(2000, each, torch.float32)),
        Contender("dsx FusedAdam", 28.0 * each * 2000, ours(dsx_ops.FusedAdam, 2000, each, torch.float32)),
    ]


def low_precision(n: int) -> list[Contender]:
    """bf16 parameters and gradients."""
    bf16 = torch.bfloat16
    return [
        Contender("torch AdamW fused, bf16 states", 14.0 * n, torchs(1, n, bf16)),
        Contender("dsx FusedAdam, bf16 states", 14.0 * n, ours(dsx_ops.FusedAdam, 1, n, bf16)),
        Contender(
            "dsx FusedAdam, fp32 states", 22.0 * n, ours(dsx_ops.FusedAdam, 1, n, bf16, state_dtype=torch.float32)
        ),
        Contender("dsx FusedAdam, split master", 26.0 * n, ours(dsx_ops.FusedAdam, 1, n, bf16, split_master=True)),
        Contender("dsx Adam8bit", 10.0625 * n, ours(dsx_ops.Adam8bit, 1, n, bf16)),
    ]


def whole_phase(n: int) -> list[Contender]:
    """Norm, unscale, clip, AdamW and bf16 copy."""
    theirs, mine = parameters(1, n, torch.float32), parameters(1, n, torch.float32)
    copies = [torch.empty(n, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    adam, fused = torch.optim.AdamW(theirs, lr=1e-3, fused=True), dsx_ops.FusedAdam(mine, lr=1e-3)

    def torch_chain() -> None:
        theirs[0].grad.mul_(1 / 1024)
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        adam.step()
        copies[0].copy_(theirs[0].detach())

    def one_call() -> None:
        norm = dsx_ops.update.squared_norms([mine[0].grad]).sum().sqrt() / 1024
        fused.step(grad_scale=1024 * norm.clamp(min=1.0), copy_out={mine[0]: copies[1]})

    return [
        Contender("torch: unscale, clip, fused AdamW, cast", 54.0 * n, torch_chain),
        Contender("dsx: norm, one call", 34.0 * n, one_call),
    ]


def family(n: int) -> list[Contender]:
    """The other rules, fp32."""
    f32 = torch.float32
    return [
        Contender("dsx CPUAdagrad", 20.0 * n, ours(dsx_ops.CPUAdagrad, 1, n, f32)),
        Contender("dsx FusedLion", 20.0 * n, ours(dsx_ops.FusedLion, 1, n, f32)),
        Contender("dsx SGD, momentum", 20.0 * n, ours(dsx_ops.SGD, 1, n, f32, momentum=0.9)),
        Contender("dsx FusedLamb", 40.0 * n, ours(dsx_ops.FusedLamb, 1, n, f32)),
    ]


def codes(n: int) -> list[Contender]:
    """Quantisers and signs."""
    x, error = torch.randn(n, device="cuda"), torch.zeros(n, device="cuda")
    return [
        Contender("dsx quantize int8", 5.0 * n, lambda: dsx_ops.quantize(x)),
        Contender("dsx quantize int4", 4.5 * n, lambda: dsx_ops.quantize(x, bits=4)),
        Contender("dsx quantize_fp8", 5.0 * n, lambda: dsx_ops.quantize_fp8(x)),
        Contender("dsx compress_with_feedback", 20.125 * n, lambda: onebit.compress_with_feedback(x, error)),
    ]


JOBS = {"one tensor": one_tensor, "2000 tensors": many_tensors, "bf16": low_precision, "whole phase": whole_phase,
        "other rules": family, "codes": codes}  # fmt: skip


def seconds(step: Step) -> float:
    """Of one run, between two events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure(contenders: list[Contender], rounds: int) -> dict[str, float]:
    """Median seconds per contender over interleaved rounds."""
    for c in contenders:
        c.step(), c.step()
    times: dict[str, list[float]] = {c.name: [] for c in contenders}
    shuffled = random.Random(0)
    for _ in range(rounds):
        for c in shuffled.sample(contenders, len(contenders)):
            times[c.name].append(seconds(c.step))
    return {name: statistics.median(t) for name, t in times.items()}


def copy_bandwidth(n: int, rounds: int) -> float:
    """Bytes read and written per second by copy_ between two buffers of n fp32 numbers."""
    a, b = torch.randn(n, device="cuda"), torch.empty(n, device="cuda")
    return 8.0 * n / measure([Contender("copy", 8.0 * n, lambda: b.copy_(a))], rounds)["copy"]


def main() -> int:
    """Run the jobs; print one Markdown table and the goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 27)
    parser.add_argument("--rounds", type=int, default=21)
    add_json_option(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing measured")
        return 0
    n = options.elements
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {n} parameters; {loader.status()}")
    copy_rate = copy_bandwidth(n, options.rounds)
    print(f"\ncopy bandwidth {copy_rate / 1e9:.0f} GB/s")
    table = Table({"job": "", "contender": "", "ms": "{:.3f}", "GB/s": "{:.0f}", "of copy bandwidth": "{:.2f}",
                   "against the job's first": "{:.2f}x"})  # fmt: skip
    results: dict[str, float] = {}
    for job, make in JOBS.items():
        contenders = make(n)
        medians = measure(contenders, options.rounds)
        for c in contenders:
            took = medians[c.name]
            share, ratio = c.nbytes / took / copy_rate, medians[contenders[0].name] / took
            table.add(job, c.name, took * 1e3, c.nbytes / took / 1e9, share, ratio)
            results[f"{job}/{c.name}"] = took
        del contenders
        torch.cuda.empty_cache()
    step = results["one tensor/dsx FusedAdam"]
    share, ratio = 28.0 * n / step / copy_rate, results["one tensor/torch AdamW fused"] / step
    table.goal("FusedAdam at least 0.90 of the copy bandwidth", f"{share:.2f}", met=share >= 0.90)
    table.goal("FusedAdam at least 1.00x torch fused", f"{ratio:.2f}x", met=ratio >= 1.0)
    table.save(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
