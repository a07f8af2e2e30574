"""Milliseconds of Muon's step on a sharded GPT of 19 M parameters, beside what it cannot do without.

    python packages/dsx-zero/bench/muon_step.py [--ranks 2] [--stage 2] [--steps 20] [--json FILE]

Three things take turns, each behind a forward and backward that is not timed: the whole step; the orthogonalisations
that this rank owns, from copies in memory; and messages of the step's sizes, two all-to-alls of the momentum over the
ranks. The goal of the step is at most 1.05 times the other two together. All run over gloo, in float32.

Left out: the speed of a GPU, where messages run beside the arithmetic.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import dsx_ops
import dsx_zero
import torch
import torch.distributed as dist
from dsx_testkit import run_ranks
from dsx_testkit.benches import GPT, Turns, batch, take_turns
from dsx_testkit.results import Table, add_json_option
from dsx_zero.plan.matrices import owners_of


def made(parameters: Any) -> dsx_ops.Muon:
    """Muon for the matrices of blocks, AdamW for the rest."""
    listed = list(parameters)
    wide = [p for p in listed if p.dim() == 2 and p.shape[0] >= 512]  # not embeddings and the head
    kept = {id(p) for p in wide}
    rest = {"params": [p for p in listed if id(p) not in kept], "use_muon": False}
    return dsx_ops.Muon([{"params": wide, "use_muon": True}, rest], lr=1e-3)


def ready(model: Any, rank: int) -> Callable[[int], None]:
    """A forward and backward, which is not part of what is timed."""

    def run(turn: int) -> None:
        model(*batch(turn, rank)).backward()

    return run


def measured(rank: int, world: int, stage: int, count: int) -> dict[str, list[float]]:
    """Milliseconds of `count` turns, by name, as this rank's clock saw them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = GPT()
    rule = made(plain.parameters())
    settings = rule.param_groups[0]
    shapes = [tuple(p.shape) for p in settings["params"]]
    owners = owners_of([rule.work(shape, settings) for shape in shapes], world)
    mine = [torch.randn(shape) for shape, owner in zip(shapes, owners) if owner == rank]
    model, optimizer = dsx_zero.shard(plain, made, config={"stage": stage})
    backward = ready(model, rank)
    share = -(-sum(a * b for a, b in shapes) // world**2)  # what one rank sends another one, in each direction
    sent, came = torch.zeros(share * world), torch.zeros(share * world)
    seconds: dict[str, list[float]] = {"step": [], "arithmetic": [], "messages": []}

    def timed(name: str, what: Callable[[], object]) -> float:
        dist.barrier()
        began = time.perf_counter()
        what()
        dist.barrier()
        seconds[name].append((time.perf_counter() - began) * 1e3)
        return 0.0

    def step(turn: int) -> float:
        backward(turn)
        timed("step", optimizer.step)
        optimizer.zero_grad()
        return 0.0

    def messages() -> None:
        for _ in range(2):
            dist.all_to_all_single(came, sent)

    turns: Turns = take_turns(
        {
            "arithmetic": lambda turn: timed("arithmetic", lambda: [rule.of_matrix(m, settings) for m in mine]),
            "messages": lambda turn: timed("messages", messages),
            "step": step,
        },
        count,
    )
    return {name: times[-len(turns.ms[name]) :] for name, times in seconds.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--steps", type=int, default=20)
    add_json_option(parser)
    options = parser.parse_args()
    of_ranks = run_ranks(measured, options.ranks, options.stage, options.steps, timeout=1800)
    worst = {name: [max(turn) for turn in zip(*(found[name] for found in of_ranks))] for name in of_ranks[0]}
    median = {name: sorted(times)[len(times) // 2] for name, times in worst.items()}
    least = median["arithmetic"] + median["messages"]
    table = Table({"what": "", "ms": "{:.1f}", "of arithmetic and messages": "{:.2f}x"})
    for name, ms in median.items():
        table.add(name, ms, ms / least)
    table.goal("a step of at most 1.05x both", f"{median['step'] / least:.2f}x", met=median["step"] <= 1.05 * least)
    table.save(options.json)


if __name__ == "__main__":
    main()
