"""Optimizer steps beside their peers: milliseconds, bytes per second, and the goals.

    python packages/dsx-ops/bench/optimizers.py [--elements 32000000] [--rounds 11] [--threads N]
        [--jobs fp32 ...] [--json FILE]

Peers: torch AdamW as for-loop, foreach and fused; DeepSpeed's CPUAdam when it can be imported. Run it on an idle
machine.
"""

from __future__ import annotations

import sys

import dsx_ops
import torch
from _measure import Contender, Goal, Job, Step, run_jobs, stream_contender

F32, BF16 = torch.float32, torch.bfloat16


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


def deepspeed_class() -> type | None:
    """DeepSpeed's CPU Adam, when it can be imported and its kernel be built."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam(params_with_grads(1, 100, F32), lr=1e-3).step()
        return DeepSpeedCPUAdam
    except Exception as error:  # noqa: BLE001  whatever keeps a peer from running is printed, not ours to fix
        print(f"  (no DeepSpeed peer: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})")
        return None


DEEPSPEED = deepspeed_class()


def deepspeed_adam(name: str, nbytes: float, numel: int, dtype: torch.dtype) -> list[Contender]:
    """The peer, if it is there."""
    if DEEPSPEED is None:
        return []
    return [Contender(name, nbytes, DEEPSPEED(params_with_grads(1, numel, dtype), lr=1e-3, weight_decay=0.1).step)]


def over(memory: dsx_ops.FusedAdam, kind: type, *, step: object, **options: object) -> Step:
    """Another Adam over the parameter, gradient and moments of `memory`, with a `step` as it counts: on which pages
    tensors lie changes a pass by up to 8 %.
    """
    (p,) = memory.param_groups[0]["params"]
    optimizer = kind([p], lr=1e-3, weight_decay=0.1, **options)
    moments = {k: memory.state[p][k] for k in ("exp_avg", "exp_avg_sq")}
    optimizer.state[p] = {"step": step, **moments}
    return optimizer.step


def plain(total: int) -> Job:
    """fp32 AdamW on one large tensor: 28 bytes per parameter; all contenders over the same memory."""
    params = params_with_grads(1, total, F32)
    adam = dsx_ops.FusedAdam(params, lr=1e-3, weight_decay=0.1)
    adam.step()
    params[0].grad.zero_()  # so that the stream, which adds it, changes nothing
    stream = stream_contender(
        [params[0].detach(), params[0].grad, *(adam.state[params[0]][k] for k in adam.state_names)]
    )
    torch_adam_over = {
        name: over(adam, torch.optim.AdamW, step=torch.tensor(1.0), **kind)
        for name, kind in (
            ("torch for-loop", {"foreach": False, "fused": False}),
            ("torch foreach", {"foreach": True}),
            ("torch fused", {"fused": True}),
        )
    }
    found = [
        *([stream] if stream else []),
        *(Contender(name, 28.0 * total, step) for name, step in torch_adam_over.items()),
        Contender("dsx FusedAdam", 28.0 * total, adam.step),
    ]
    if DEEPSPEED is not None:
        found.append(Contender("DeepSpeed CPUAdam", 28.0 * total, over(adam, DEEPSPEED, step=1)))
    mine = "dsx FusedAdam"
    goals = [Goal(mine, "stream: 4 read, 3 written", 0.95), Goal(mine, "torch fused", 1.0)]
    return Job(found, [*goals, Goal(mine, "DeepSpeed CPUAdam", 1.0), Goal(mine, "torch for-loop", 6.5)])


def many(total: int) -> Job:
    """2000 tensors of 10,000 elements."""
    count = 2000 * total // 32_000_000 or 1
    found = [
        Contender("torch fused", 28e4 * count, torch_adam(count, 10_000, F32, fused=True)),
        Contender("dsx FusedAdam", 28e4 * count, ours(dsx_ops.FusedAdam, count, 10_000, F32, weight_decay=0.1)),
    ]
    return Job(found, [Goal("dsx FusedAdam", "torch fused", 3.0)])


def low_precision(total: int) -> Job:
    """bf16 parameters and gradients; bytes per parameter depend on the states."""
    split = ours(dsx_ops.FusedAdam, 1, total, BF16, split_master=True)
    found = [
        Contender("torch fused, bf16 states", 14.0 * total, torch_adam(1, total, BF16, fused=True)),
        Contender("dsx FusedAdam, fp32 (28 B)", 28.0 * total, ours(dsx_ops.FusedAdam, 1, total, F32)),
        Contender("dsx CPUAdam, fp32 states (22 B)", 22.0 * total, ours(dsx_ops.CPUAdam, 1, total, BF16)),
        Contender("dsx FusedAdam, bf16 states (14 B)", 14.0 * total, ours(dsx_ops.FusedAdam, 1, total, BF16)),
        Contender("dsx FusedAdam, split master (26 B)", 26.0 * total, split),
        Contender("dsx Adam8bit (10.06 B)", 10.0625 * total, ours(dsx_ops.Adam8bit, 1, total, BF16)),
        *deepspeed_adam("DeepSpeed CPUAdam, bf16", 22.0 * total, total, BF16),
    ]
    goals = [
        Goal("dsx CPUAdam, fp32 states (22 B)", "DeepSpeed CPUAdam, bf16", 3.0),
        Goal("dsx Adam8bit (10.06 B)", "dsx FusedAdam, fp32 (28 B)", 2.0),
    ]
    return Job(found, goals)


def sequence(total: int) -> Job:
    """Unscale, clip, AdamW, bf16 copy: four passes, or one after the norm."""
    low = [torch.empty(total, dtype=BF16) for _ in range(3)]

    def chain(params: list[torch.Tensor], step: Step, copy: torch.Tensor) -> Step:
        def run() -> None:
            grad = params[0].grad
            if grad is not None:
                grad.mul_(1.0)  # unscale
                grad.mul_(1.0)  # clip
            step()
            copy.copy_(params[0].detach())

        return run

    theirs, mine = params_with_grads(1, total, F32), params_with_grads(1, total, F32)
    fused = torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.1, fused=True)
    adam = dsx_ops.FusedAdam(mine, lr=1e-3, weight_decay=0.1)
    found = [
        Contender("torch: unscale, clip, fused AdamW, cast", 50.0 * total, chain(theirs, fused.step, low[0])),
        Contender("dsx: one call", 30.0 * total, lambda: adam.step(grad_scale=1.5, copy_out={mine[0]: low[1]})),
        Contender("dsx: norm and overflow check", 4.0 * total, lambda: dsx_ops.norm([mine[0].detach()])),
    ]
    if DEEPSPEED is not None:
        others = params_with_grads(1, total, F32)
        peer = DEEPSPEED(others, lr=1e-3, weight_decay=0.1)
        found.append(Contender("DeepSpeed: the same with CPUAdam", 50.0 * total, chain(others, peer.step, low[2])))
    goals = [
        Goal("dsx: one call", "torch: unscale, clip, fused AdamW, cast", 1.6),
        Goal("dsx: one call", "DeepSpeed: the same with CPUAdam", 2.0),
    ]
    return Job(found, goals)


def family(total: int) -> Job:
    """The other rules, fp32, beside the stream of Adam."""
    stream = stream_contender([torch.randn(total) for _ in range(4)])
    found = [
        *([stream] if stream else []),
        Contender("dsx CPUAdagrad", 20.0 * total, ours(dsx_ops.CPUAdagrad, 1, total, F32)),
        Contender("dsx FusedLion", 20.0 * total, ours(dsx_ops.FusedLion, 1, total, F32)),
        Contender("dsx SGD, momentum", 20.0 * total, ours(dsx_ops.SGD, 1, total, F32, momentum=0.9)),
        Contender("dsx FusedLamb", 40.0 * total, ours(dsx_ops.FusedLamb, 1, total, F32)),
    ]
    return Job(found, [Goal(c.name, "stream: 4 read, 3 written", 0.7, rate=True) for c in found[1:]])


JOBS = {"fp32": plain, "many": many, "bf16": low_precision, "sequence": sequence, "family": family}

if __name__ == "__main__":
    sys.exit(run_jobs(JOBS, __doc__, 32_000_000))
