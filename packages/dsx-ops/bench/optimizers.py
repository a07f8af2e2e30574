"""Optimizer steps beside their peers: milliseconds, bytes per second, share of what memory gives.

    python packages/dsx-ops/bench/optimizers.py [--elements 32000000] [--rounds 15] [--threads N] [--json FILE]

Every round runs every contender once, in a new order, and the medians over the rounds are compared: what disturbs the machine for a
moment disturbs all. The ceilings come first: torch's copy, and a loop that only reads four and writes three streams. Peers: torch AdamW as for-loop,
foreach and fused; DeepSpeed's CPUAdam when it can be imported. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import dsx_ops
import torch
from dsx_ops import native

TOUCH = 7  # native/include/dsx_ops/kernels.h
Step = Callable[[], object]


@dataclass
class Contender:
    """One way of doing a job; `nbytes` is what it must move at least."""

    name: str
    nbytes: float
    step: Step


def params_with_grads(count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """`count` tensors of `numel` elements, each with a gradient."""
    torch.manual_seed(0)
    found = [torch.nn.Parameter(torch.randn(numel).to(dtype)) for _ in range(count)]
    for p in found:
        p.grad = torch.randn(numel).to(dtype)
    return found


def torch_adam(count: int, numel: int, dtype: torch.dtype, **kind: bool) -> Step:
    """torch.optim.AdamW in one of its implementations."""
    return torch.optim.AdamW(params_with_grads(count, numel, dtype), lr=1e-3, weight_decay=0.1, **kind).step


def ours(kind: type, count: int, numel: int, dtype: torch.dtype, **options: object) -> Step:
    """One of our optimizers."""
    return kind(params_with_grads(count, numel, dtype), lr=1e-3, **options).step


def deepspeed_adam(count: int, numel: int, dtype: torch.dtype) -> Step | None:
    """DeepSpeed's CPU Adam, when it can be imported and its kernel be built."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(params_with_grads(count, numel, dtype), lr=1e-3, weight_decay=0.1).step
    except Exception as error:  # noqa: BLE001  whatever keeps a peer from running is printed, not ours to fix
        print(f"  (no DeepSpeed peer: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})")
        return None


def ceiling(total: int) -> list[Contender]:
    """What memory gives: a plain copy, and Adam's four reads and three writes with next to no arithmetic."""
    a, b = torch.randn(total), torch.empty(total)
    found = [Contender("torch copy_ (4 read, 4 written)", 8.0 * total, lambda: b.copy_(a))]
    module = native.module()
    if module is not None:
        streams = [torch.randn(total) for _ in range(4)]
        table = array("q", [*(t.data_ptr() for t in streams), 0, 0, 0, 0, total, 0])

        def touch(keep: object = streams) -> None:
            module.step(TOUCH, table, [0, 0, 0, 4], [0.0] * 11, 0, 0, torch.get_num_threads())

        found.append(Contender("16 read, 12 written, no arithmetic", 28.0 * total, touch))
    return found


def plain(total: int) -> list[Contender]:
    """fp32 AdamW on one large tensor: 28 bytes per parameter."""
    f32 = torch.float32
    found = [
        Contender("torch AdamW for-loop", 28.0 * total, torch_adam(1, total, f32, foreach=False, fused=False)),
        Contender("torch AdamW foreach", 28.0 * total, torch_adam(1, total, f32, foreach=True)),
        Contender("torch AdamW fused", 28.0 * total, torch_adam(1, total, f32, fused=True)),
        Contender("dsx FusedAdam", 28.0 * total, ours(dsx_ops.FusedAdam, 1, total, f32, weight_decay=0.1)),
    ]
    peer = deepspeed_adam(1, total, f32)
    return [*found, *([Contender("DeepSpeed CPUAdam", 28.0 * total, peer)] if peer else [])]


def many(total: int) -> list[Contender]:
    """The same in tensors of 10,000 elements."""
    count, f32 = max(total // 10_000, 1), torch.float32
    return [
        Contender("torch AdamW fused", 28e4 * count, torch_adam(count, 10_000, f32, fused=True)),
        Contender("dsx FusedAdam", 28e4 * count, ours(dsx_ops.FusedAdam, count, 10_000, f32, weight_decay=0.1)),
    ]


def low_precision(total: int) -> list[Contender]:
    """bf16 parameters and gradients; bytes per parameter depend on the states."""
    bf16 = torch.bfloat16
    found = [
        Contender("torch AdamW fused, bf16 states", 14.0 * total, torch_adam(1, total, bf16, fused=True)),
        Contender("dsx CPUAdam, fp32 states", 22.0 * total, ours(dsx_ops.CPUAdam, 1, total, bf16)),
        Contender("dsx FusedAdam, bf16 states", 14.0 * total, ours(dsx_ops.FusedAdam, 1, total, bf16)),
        Contender(
            "dsx FusedAdam, split master", 26.0 * total, ours(dsx_ops.FusedAdam, 1, total, bf16, split_master=True)
        ),
        Contender("dsx Adam8bit", 10.0625 * total, ours(dsx_ops.Adam8bit, 1, total, bf16)),
    ]
    peer = deepspeed_adam(1, total, bf16)
    return [*found, *([Contender("DeepSpeed CPUAdam, bf16", 22.0 * total, peer)] if peer else [])]


def phase(total: int) -> list[Contender]:
    """Unscale, clip, AdamW, bf16 copy: four passes, or one after the norm."""
    chained = params_with_grads(1, total, torch.float32)
    fused = params_with_grads(1, total, torch.float32)
    copies = [torch.empty(total, dtype=torch.bfloat16) for _ in range(2)]
    adam = torch.optim.AdamW(chained, lr=1e-3, weight_decay=0.1, fused=True)
    mine = dsx_ops.FusedAdam(fused, lr=1e-3, weight_decay=0.1)

    def torch_chain() -> None:
        grad = chained[0].grad
        if grad is not None:
            grad.mul_(1.0)
            grad.mul_(1.0)
        adam.step()
        copies[0].copy_(chained[0].detach())

    return [
        Contender("torch: unscale, clip, fused AdamW, cast", 50.0 * total, torch_chain),
        Contender("dsx: one call", 30.0 * total, lambda: mine.step(grad_scale=1.5, copy_out={fused[0]: copies[1]})),
        Contender("dsx: norm and overflow check", 4.0 * total, lambda: dsx_ops.norm([fused[0].detach()])),
    ]


def family(total: int) -> list[Contender]:
    """The other rules, fp32."""
    f32 = torch.float32
    return [
        Contender("dsx CPUAdagrad", 20.0 * total, ours(dsx_ops.CPUAdagrad, 1, total, f32)),
        Contender("dsx FusedLion", 20.0 * total, ours(dsx_ops.FusedLion, 1, total, f32)),
        Contender("dsx SGD, momentum", 20.0 * total, ours(dsx_ops.SGD, 1, total, f32, momentum=0.9)),
        Contender("dsx FusedLamb", 40.0 * total, ours(dsx_ops.FusedLamb, 1, total, f32)),
    ]


JOBS = {"ceiling": ceiling, "fp32, one tensor": plain, "fp32, tensors of 10 K": many, "bf16": low_precision,
        "whole phase": phase, "other rules": family}  # fmt: skip


def measure(contenders: list[Contender], rounds: int) -> dict[str, float]:
    """Median seconds per contender over interleaved rounds."""
    for c in contenders:
        c.step(), c.step()
    times: dict[str, list[float]] = {c.name: [] for c in contenders}
    shuffled = random.Random(0)
    for _ in range(rounds):
        order = contenders[:]
        shuffled.shuffle(order)
        for c in order:
            start = time.perf_counter()
            c.step()
            times[c.name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> int:
    """Run the jobs and print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=32_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    status = dsx_ops.native_status()
    print(f"torch {torch.__version__}, {options.threads} threads, isa {status['isa']}, {options.elements} parameters, "
          f"median of {options.rounds}")  # fmt: skip
    results, copy_rate = {}, 0.0
    print("\n| job | contender | ms | GB/s | of copy bandwidth | against the job's first |\n|---|---|---|---|---|---|")
    for job, make in JOBS.items():
        contenders = make(options.elements)
        medians = measure(contenders, options.rounds)
        first = medians[contenders[0].name]
        for c in contenders:
            seconds = medians[c.name]
            rate = c.nbytes / seconds / 1e9
            copy_rate = copy_rate or rate
            print(
                f"| {job} | {c.name} | {seconds * 1e3:.2f} | {rate:.1f} | {rate / copy_rate:.2f} | {first / seconds:.2f}x |"
            )
            results[f"{job}/{c.name}"] = {"ms": seconds * 1e3, "gb_per_s": rate}
        del contenders
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
