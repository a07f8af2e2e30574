"""Time of one training step as users start it, dsx beside its peers, in one run.

    python packages/dsx/bench/step_time.py [--rounds 3] [--steps 10] [--precision bf16] [--only TEXT] [--json FILE]

Every system runs in fresh processes (one thread each), in turn, `rounds` times, so that a machine that drifts drifts
for all. All are started by torchrun and set nothing but what they must; the rows "dsx launch" are dsx started by its
own launcher. The table says which transport that gave. It has fp32 and bf16, rows where a peer wins come first, and
each time is the median over rounds of each round's median step. Losses after the last step are compared too: a fast
wrong answer is not a result. Peers that are not installed are left out and said so.
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


def worker(name: str, precision: str, steps: int, out: str) -> NoReturn:
    """One rank of one system: builds it, warms up, times `steps` steps, rank 0 writes the result."""
    import torch
    import torch.distributed as dist
    from _systems import SYSTEMS
    from dsx_testkit.benches import batch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    step = SYSTEMS[name].build(precision)
    rank = dist.get_rank() if dist.is_initialized() else 0
    times, loss = [], torch.zeros(())
    for i in range(steps + 3):
        data = batch(i, rank)
        begin = time.perf_counter()
        loss = step(*data)
        times.append(time.perf_counter() - begin)
    report_and_leave(out, {"ms": statistics.median(times[3:]) * 1e3, "loss": float(loss)})


def table(precision: str, results: dict[str, list[dict[str, Any]]]) -> Table:
    """The figures of a precision, printed: rows of dsx that a peer beats first."""
    from _systems import SYSTEMS

    median = {n: statistics.median(r["ms"] for r in rows) for n, rows in results.items() if rows}
    columns = {"system": "", "transport": "", "ms/step": "{:.0f}", "vs FSDP2": "{:.2f}x",
               "vs deepspeed, same stage": "{:.2f}x", "loss": "{:.4f}"}  # fmt: skip
    found = Table(columns, "" if precision == "fp32" else precision)
    rows = []
    for name, ms in median.items():
        ours = name.startswith("dsx") and SYSTEMS[name].processes > 1
        where = ", host optimizer" if name.endswith("host optimizer") else ""
        peer = median.get(f"deepspeed stage {SYSTEMS[name].stage}{where}") if ours else None
        fsdp = median.get("torch FSDP2") if ours else None
        last = results[name][-1]
        rows.append((name, last["transport"], ms, fsdp and fsdp / ms, peer and peer / ms, last["loss"]))
    for row in losers_first(rows, 3, 4):
        found.add(*row)
    wanted = {"fp32": (1.0, 1.2), "bf16": (1.3, 1.4)}[precision]
    ours = [row for row in rows if row[0].startswith("dsx")]
    for peer, column, least in (("FSDP2", 3, wanted[0]), ("DeepSpeed's same stage", 4, wanted[1])):
        if ratios := [row[column] for row in ours if row[column]]:
            text = f"{precision}: every stage at least {least:.1f}x {peer}"
            found.goal(text, f"{min(ratios):.2f}x at least", met=min(ratios) >= least)
    for text, one, other, most in (
        ("one process at most 1.02x a raw loop", "dsx stage 0, 1 process", "raw, 1 process", 1.02),
        ("stage 3 at most 1.06x stage 2", "dsx stage 3", "dsx stage 2", 1.06),
    ):
        if {one, other} <= median.keys():
            ratio = median[one] / median[other]
            found.goal(f"{precision}: {text}", f"{ratio:.3f}", met=ratio <= most)
    return found


def main() -> None:
    """Parse arguments and run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--precision", choices=PRECISIONS, help="default: both")
    parser.add_argument("--only", default="", help="systems whose name contains this text")
    add_json_option(parser)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.precision, args.steps, args.out)
    from _systems import SYSTEMS

    results = run_systems(
        {name: (system.processes, system.launcher) for name, system in SYSTEMS.items() if args.only in name},
        lambda name, precision: [
            __file__, "--worker", name, "--precision", precision, "--steps", str(args.steps)
        ],
        rounds=args.rounds,
        precisions=[args.precision] if args.precision else PRECISIONS,
    )  # fmt: skip
    for precision, found in results.items():
        table(precision, found).save(args.json)


if __name__ == "__main__":
    main()
