"""Is the right rank blamed, for the right phase, and nobody when all are equal?

    python packages/dsx-monitor/bench/stragglers.py [ranks] [--json FILE]

Each trial lets one rank sleep 30 ms per step, in its data loader or in its forward, and compares the ranks after 8
steps; then 200 steps in which all are equal, compared every 10. The goals: 20 of 20, and no false alarm.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from typing import Any

import torch
from dsx_testkit import run_ranks
from dsx_testkit.results import Table, add_json_option

TRIALS, STEPS, CALM, EVERY = 20, 8, 200, 10
PHASES = ("outside", "forward")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(4))
        self.sleep = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02 + self.sleep)  # every rank's own work; sleeping ranks do not fight for cores
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def session(rank: int, world: int, folder: str) -> tuple[list[Any], int]:
    chance = random.Random(7)  # the same on all ranks
    found = []
    for trial in range(TRIALS):
        guilty, phase = chance.randrange(world), chance.choice(PHASES)
        latest = train(rank, STEPS, STEPS, guilty, phase)
        found.append(((guilty, phase), latest[-1] if latest else None, trial))
    alarms = [report for report in train(rank, CALM, EVERY, None, "") if report]
    return found, len(alarms)


def train(rank: int, steps: int, every: int, guilty: int | None, phase: str) -> list[Any]:
    """The worst straggler of each comparison, as (rank, phase), or None."""
    import dsx

    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "steps_per_print": None,
        "zero_optimization": {"stage": 2},
        "straggler": {"enabled": True, "every": every},
        "log_level": "error",
    }
    engine = dsx.initialize(model=model, config=config)[0]
    watch = next(o for o in engine._parts.observers if type(o).__name__ == "StragglerWatch")
    x, verdicts = torch.randn(4, 256), []
    for step in range(1, steps + 1):
        if rank == guilty and phase == "outside":
            time.sleep(0.03)
        model.sleep = 0.03 if rank == guilty and phase == "forward" else 0.0
        engine.backward(engine(x))
        engine.step()
        if step % every == 0:
            worst = watch._monitor.latest.found
            verdicts.append((worst[0].rank, worst[0].phase) if worst else None)
    engine.destroy()
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", nargs="?", type=int, default=2)
    add_json_option(parser)
    options = parser.parse_args()
    world = options.ranks
    with tempfile.TemporaryDirectory() as folder:
        found, alarms = run_ranks(session, world, folder, timeout=280)[0]
    right = sum(truth == verdict for truth, verdict, _ in found)
    for truth, verdict, trial in found:
        if truth != verdict:
            print(f"trial {trial}: {truth} was slow, {verdict} was blamed")
    table = Table({"ranks": "", "slow rank and its phase named": "", f"false alarms in {CALM} calm steps": ""})
    table.add(world, f"{right} of {TRIALS}", alarms)
    table.goal("every slow rank named with its phase", f"{right} of {TRIALS}", met=right == TRIALS)
    table.goal("no false alarm", f"{alarms} in {CALM // EVERY} comparisons", met=not alarms)
    table.save(options.json)


if __name__ == "__main__":
    main()
