"""Audits right configurations of five systems, and of a loop that owns its steps, and counts false alarms.

    python packages/dsx-verify/bench/good_configurations.py [--only SYSTEM] [--json FILE]

Every combination of system, optimizer, accumulation, clipping, precision and dropout is trained on two ranks (plain: on
one); dsx at the ZeRO stages 0 to 3 in turn, in fp32. A sample of them is in the suite (`test_verify_good_steps.py`).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dsx_testkit import run_ranks
from dsx_testkit.results import Table, add_json_option
from dsx_verify import Expected, audit, audit_loop

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from verify_systems import OPTIMIZERS, Net, pairs, step_of, wrap

SYSTEMS = ("plain", "ddp", "fsdp1", "fsdp2", "dsx", "loop")
CHOICES = list(itertools.product(("sgd", "adamw", "adagrad"), (1, 3), (0.0, 0.1), (False, True), (0.0, 0.2)))


def receipt_of(kind: str, place: int, name: str, expected: Expected) -> Any:
    """The receipt of one configuration."""
    if kind == "dsx":
        return receipt_of_dsx(place % 4, name, expected)
    model = wrap("ddp" if kind == "loop" else kind, expected.model())
    optimizer = OPTIMIZERS[name](model.parameters())
    step = step_of(model, optimizer, expected)
    if kind != "loop":
        return audit(step, model, expected=expected, batches=pairs, optimizer=optimizer, steps=2, raise_error=False)
    own = dist.get_rank()

    def train() -> None:
        for first in range(0, 2 * expected.accumulation, expected.accumulation):
            step([pairs(2 * (first + micro) + own) for micro in range(expected.accumulation)])

    called = replace(expected, loss=lambda model, call: model(*call[0]))
    return audit_loop(train, model, optimizer=optimizer, expected=called, steps=2, raise_error=False)


def receipt_of_dsx(stage: int, name: str, expected: Expected) -> Any:
    """The receipt of an engine of dsx."""
    import dsx

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": expected.accumulation,
        "gradient_clipping": expected.max_norm,
        "steps_per_print": None,
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = dsx.initialize(model=expected.model(), optimizer=OPTIMIZERS[name], config=config)

    def step(micro_batches: list[Any]) -> list[float]:
        losses = []
        for batch in micro_batches:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses

    receipt = audit(step, engine, expected=expected, batches=pairs, steps=2, raise_error=False)
    engine.destroy()
    return receipt


def alarms(rank: int, world: int, kind: str) -> list[str]:
    """The receipts that are not clean."""
    found = []
    for place, (name, accumulation, clip, half, drop) in enumerate(CHOICES):
        half = half and kind != "dsx"
        compute = torch.bfloat16 if half else torch.float32
        settings = {"accumulation": accumulation, "max_norm": clip, "compute": compute, "autocast": half}

        def make(drop: float = drop) -> Net:
            return Net(drop=drop)

        got = receipt_of(kind, place, name, Expected(make, OPTIMIZERS[name], **settings))
        if not got.ok:
            found.append(f"{kind} {name} {settings} drop={drop}: {got}")
    return found


def main() -> None:
    """Audit all configurations; print the false alarms and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SYSTEMS, help="one system")
    add_json_option(parser)
    options = parser.parse_args()
    table = Table({"system": "", "configurations": "", "false alarms": ""})
    for system in [options.only] if options.only else SYSTEMS:
        found = run_ranks(alarms, 1 if system == "plain" else 2, system, timeout=600)[0]
        print("".join(f"{one}\n" for one in found), end="")
        table.add(system, len(CHOICES), len(found))
    table.save(options.json)


if __name__ == "__main__":
    main()
