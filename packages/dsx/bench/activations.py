"""Activation checkpointing: memory and time, on one CPU process.

    python packages/dsx/bench/activations.py overhead   # against torch.utils.checkpoint, 12 layers
    python packages/dsx/bench/activations.py budget     # against 20 choices by hand that fit the same budget
    python packages/dsx/bench/activations.py offload    # how much of paced copies sleeping compute hides
    python packages/dsx/bench/activations.py compiled   # compiled blocks at stage 3 against eager ones

`--small` runs everything at a size that shows that it works. With `--json FILE` each part writes its table to a file of
its own, `FILE-overhead.json` and so on for `FILE.json`. Bytes are the allocator's, from the profiler's events: the most
that is allocated at a time during forward and backward above what was allocated before, gradients included.
Variants run in turn within each round; times are medians of the rounds.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import dsx_activations
import torch
from dsx_activations.blocks import recompute_modules
from dsx_activations.plan import peak_bytes
from dsx_testkit.benches import Block, run_parts
from dsx_testkit.results import Table
from dsx_zero import compile_units, shard
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint


class Model(nn.Module):
    """Blocks, each called through `call`."""

    def __init__(self, layers: int, width: int, call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.call = call or (lambda block, x: block(x))
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x.square().mean()


def step_seconds(model: nn.Module, x: torch.Tensor) -> float:
    """Forward and backward."""
    began = time.perf_counter()
    model(x).backward()
    return time.perf_counter() - began


def step_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """The peak of one step above what was there before; gradients exist already."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        model(x).backward()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def compare(models: dict[str, nn.Module], x: torch.Tensor, rounds: int) -> dict[str, float]:
    """Median seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds + 1):
        for name, model in models.items():
            seconds = step_seconds(model, x)
            if number:
                times[name].append(seconds)
    return {name: statistics.median(found) for name, found in times.items()}


def overhead(small: bool) -> Table:
    """Peak bytes and time of recomputing every block."""
    layers, width, tokens, rounds = (3, 64, 64, 2) if small else (12, 256, 256, 7)
    x = torch.randn(4, tokens, width)
    models = {
        "no recomputation": Model(layers, width),
        "torch.utils.checkpoint": Model(layers, width, lambda b, x: torch_checkpoint(b, x, use_reentrant=False)),
        "dsx checkpoint": Model(layers, width, dsx_activations.checkpoint),
    }
    seconds = compare(models, x, rounds)
    held = {name: step_bytes(model, x) for name, model in models.items()}
    table = Table({"every block": "", "peak of a step, MiB": "{:.2f}", "ms per step": "{:.2f}"}, "overhead")
    for name in models:
        table.add(name, held[name] / 2**20, seconds[name] * 1e3)
    ours, plain, peer = "dsx checkpoint", "no recomputation", "torch.utils.checkpoint"
    bytes_ratio, time_ratio = held[ours] / held[plain], seconds[ours] / seconds[peer]
    table.goal(f"bytes at most 0.35 of {plain}", f"{bytes_ratio:.3f}", met=bytes_ratio <= 0.35)
    table.goal(f"time at most that of {peer}", f"{time_ratio:.3f}x", met=time_ratio <= 1)
    return table


def noting(decide: Callable[..., Any], costs: list[Any], found: Any, outside: int) -> Any:
    """`decide`, with what blocks cost noted."""
    costs.extend(found)
    return decide(found, outside=outside)


def budget(small: bool) -> Table:
    """Budgets of 25, 50 and 75 % of the activations against 20 choices by hand that also fit."""
    sizes = {"budget, MiB": "{:.2f}", "planned peak, MiB": "{:.2f}", "peak with temporaries of operators": "{:.2f}"}
    times = {"ms per step": "{:.1f}", "choices by hand": "", "ms of the best": "{:.1f}", "beside it": "{:.3f}x"}
    table = Table({"budget": "{:.0%}", "recomputed": "", "all but products": "", **sizes, **times}, "budget")
    layers, width, tokens, rounds = (4, 64, 64, 1) if small else (12, 256, 256, 5)
    x = torch.randn(4, tokens, width)
    for fraction in (0.25, 0.5, 0.75):
        model = Model(layers, width)
        found = dsx_activations.apply_memory_budget(model, fraction)
        costs: list[Any] = []
        decide = found._decide
        found._decide = partial(noting, decide, costs)  # type: ignore[method-assign]
        step_seconds(model, x)
        choice, rng = found.choice, random.Random(0)
        assert choice is not None
        fitting: dict[str, tuple[str, ...]] = {}
        for _ in range(2000):
            kept = set(rng.sample(range(layers), rng.randint(0, layers)))
            names = tuple(cost.name for number, cost in enumerate(costs) if number not in kept)
            if len(fitting) < 20 and peak_bytes(costs, names) <= choice.budget:
                fitting[",".join(names)] = names
        models: dict[str, nn.Module] = {"chosen": model}
        for label, names in fitting.items():
            models[label] = Model(layers, width)
            recompute_modules(models[label], names)
        seconds = compare(models, x, rounds)
        best = min((value for name, value in seconds.items() if name != "chosen"), default=None)
        planned = [number / 2**20 for number in (choice.budget, choice.peak, step_bytes(model, x))]
        ratio = seconds["chosen"] / best if best else None
        others = [len(fitting), best * 1e3 if best else None, ratio]
        table.add(fraction, len(choice.recomputed), len(choice.selected), *planned, seconds["chosen"] * 1e3, *others)
        text = f"{fraction:.0%}: at most 1.05 of the best of {len(fitting)} choices by hand that fit"
        table.goal(text, f"{ratio:.3f}x" if ratio else "no choice fits", met=ratio <= 1.05 if ratio else None)
    return table


class PacedLane:
    """Copies in a thread, at a speed; waiting is counted."""

    def __init__(self, seconds_per_copy: float) -> None:
        self._pace, self._pool = seconds_per_copy, ThreadPoolExecutor(1)
        self.copies, self.waited = 0, 0.0

    def submit(self, job: Callable[[], Any]) -> Any:
        self.copies += 1

        def run() -> None:
            time.sleep(self._pace)
            job()

        return _Paced(self, self._pool.submit(run))

    def see_writes_so_far(self) -> None:
        """One order of jobs."""

    def free_after_use(self, buffer: Any) -> None:
        buffer.free()

    def drain(self) -> None:
        """Jobs start by themselves."""


class _Paced:
    def __init__(self, lane: PacedLane, future: Future[None]) -> None:
        self._lane, self._future = lane, future

    def wait(self) -> None:
        began = time.perf_counter()
        self._future.result()
        self._lane.waited += time.perf_counter() - began

    synchronize = wait


class _Sleeping(torch.autograd.Function):
    """Takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(x)  # so that the backward recomputes
        time.sleep(seconds)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        _ = ctx.saved_tensors
        time.sleep(2 * ctx.seconds)
        return grads[0], None


def offload(small: bool) -> Table:
    """Share of the copies' time that is not waited for."""
    layers, compute, copy = (4, 0.002, 0.0015) if small else (24, 0.01, 0.008)
    lane = PacedLane(copy)
    dsx_activations.configure(None, checkpoint_in_cpu=True, lane=lane)
    x = torch.randn(1000, requires_grad=True)
    y = x * 1
    for _ in range(layers):
        y = dsx_activations.checkpoint(lambda x: _Sleeping.apply(x, compute), y)
    y.sum().backward()
    dsx_activations.configure()
    total = lane.copies * copy
    share = 1 - lane.waited / total
    table = Table({"copies": "", "ms each": "{:.1f}", "ms waited": "{:.1f}", "hidden": "{:.1%}"}, "offload")
    table.add(lane.copies, copy * 1e3, lane.waited * 1e3, share)
    table.goal("at least 80 % hidden", f"{share:.1%}", met=share >= 0.8)
    return table


def compiled(small: bool) -> Table:
    """Compiled blocks at stage 3 on this process."""
    layers, width, tokens, rounds = (2, 64, 32, 2) if small else (6, 512, 256, 7)
    x = torch.randn(2, tokens, width)
    backend = "aot_eager" if small else "inductor"
    models: dict[str, nn.Module] = {}
    for name in ("eager", backend):
        models[name], _ = shard(Model(layers, width), torch.optim.AdamW, stage=3)
    compile_units(models[backend], backend=backend)
    seconds = compare(models, x, rounds)
    table = Table({"blocks": "", "ms per step": "{:.2f}", "of eager": "{:.3f}x"}, "compiled")
    for name, value in seconds.items():
        table.add(name, value * 1e3, value / seconds["eager"])
    ratio = seconds[backend] / seconds["eager"]
    table.goal("compiled blocks take at most 0.95 of eager ones", f"{ratio:.3f}x", met=ratio <= 0.95)
    return table


if __name__ == "__main__":
    run_parts({"overhead": overhead, "budget": budget, "offload": offload, "compiled": compiled}, __doc__)
