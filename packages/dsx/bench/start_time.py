"""Time from the launcher's command to the end of the first training step, dsx beside its peers, in one run.

    python packages/dsx/bench/start_time.py [--rounds 3] [--precision bf16] [--only stage] [--json FILE]

The systems are those of `step_time.py`, started as there: torchrun, and `dsx launch`. The clock starts when the
command is given, so that launcher, imports, meeting of the ranks, building and one step of a GPT of 19 M parameters
count. "CPU" is what rank 0 itself took, all threads, its imports included. Rows that a peer beats come first. Goal: no
stage of dsx starts later than DDP.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from dsx_testkit.benches import PRECISIONS, losers_first, report_and_leave, run_systems  # noqa: E402
from dsx_testkit.results import Table, add_json_option  # noqa: E402

LEFT_OUT = ("1 process", "host optimizer")
DDP = "torch DDP"


def worker(name: str, precision: str, began: float, out: str) -> NoReturn:
    """One rank of one system: builds it and makes one step."""
    import torch
    import torch.distributed as dist
    from _systems import SYSTEMS
    from dsx_testkit.benches import batch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    step = SYSTEMS[name].build(precision)
    step(*batch(0, dist.get_rank() if dist.is_initialized() else 0)).item()
    report_and_leave(out, {"ms": 1e3 * (time.time() - began), "cpu": time.process_time()})


def table(precision: str, results: dict[str, list[dict[str, Any]]]) -> Table:
    """The figures of a precision."""
    found = Table(
        {"system": "", "transport": "", "seconds": "{:.2f}", "CPU seconds of rank 0": "{:.2f}", "DDP takes": "{:.2f}x"},
        "" if precision == "fp32" else precision,
    )
    seconds = {name: statistics.median(row["ms"] for row in rows) / 1e3 for name, rows in results.items() if rows}
    rows = []
    for name, took in seconds.items():
        ratio = seconds[DDP] / took if DDP in seconds and name.startswith("dsx") else None
        cpu = statistics.median(row["cpu"] for row in results[name])
        rows.append((name, results[name][-1]["transport"], took, cpu, ratio))
    for row in losers_first(rows, 4):
        found.add(*row)
    if ratios := [row[4] for row in rows if row[4]]:
        text = f"{precision}: no stage starts later than DDP"
        found.goal(text, f"{min(ratios):.2f}x at least", met=min(ratios) >= 1)
    return found


def main() -> None:
    """Parse arguments and run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=PRECISIONS, help="default: both")
    parser.add_argument("--only", default="", help="systems whose name contains this text")
    add_json_option(parser)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.precision, args.began, args.out)
    from _systems import SYSTEMS

    chosen = [name for name in SYSTEMS if args.only in name and not any(text in name for text in LEFT_OUT)]
    results = run_systems(
        {name: (SYSTEMS[name].processes, SYSTEMS[name].launcher) for name in chosen},
        lambda name, precision: [__file__, "--worker", name, "--precision", precision, "--began", str(time.time())],
        rounds=args.rounds,
        precisions=[args.precision] if args.precision else PRECISIONS,
    )
    for precision, found in results.items():
        table(precision, found).save(args.json)


if __name__ == "__main__":
    main()
