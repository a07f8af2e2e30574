"""Audits right configurations of four systems and counts false alarms.

    python packages/dsx-verify/bench/good_configurations.py [--json FILE]

Every combination of system, optimizer, accumulation, clipping, precision and dropout is trained on two ranks (plain: on
one). A sample of them is in the suite (`test_verify_good_steps.py`).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch
from dsx_testkit import run_ranks
from dsx_testkit.results import Table, add_json_option
from dsx_verify import Expected, audit

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from verify_systems import OPTIMIZERS, Net, pairs, step_of, wrap

SYSTEMS = ("plain", "ddp", "fsdp1", "fsdp2")
CHOICES = list(itertools.product(("sgd", "adamw", "adagrad"), (1, 3), (0.0, 0.1), (False, True), (0.0, 0.2)))


def alarms(rank: int, world: int, kind: str) -> list[str]:
    """The receipts that are not clean."""
    found = []
    for name, accumulation, clip, half, drop in CHOICES:
        compute = torch.bfloat16 if half else torch.float32
        settings = {"accumulation": accumulation, "max_norm": clip, "compute": compute, "autocast": half}

        def make(drop: float = drop) -> Net:
            return Net(drop=drop)

        expected = Expected(make, OPTIMIZERS[name], **settings)
        model = wrap(kind, make())
        optimizer = OPTIMIZERS[name](model.parameters())
        step = step_of(model, optimizer, expected)
        got = audit(step, model, expected=expected, batches=pairs, optimizer=optimizer, steps=2, raise_error=False)
        if not got.ok:
            found.append(f"{kind} {name} {settings} drop={drop}: {got}")
    return found


def main() -> None:
    """Audit all configurations; print the false alarms and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    options = parser.parse_args()
    table = Table({"system": "", "configurations": "", "false alarms": ""})
    for system in SYSTEMS:
        found = run_ranks(alarms, 1 if system == "plain" else 2, system, timeout=600)[0]
        print("".join(f"{one}\n" for one in found), end="")
        table.add(system, len(CHOICES), len(found))
    table.save(options.json)


if __name__ == "__main__":
    main()
