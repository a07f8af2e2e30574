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
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from dsx_testkit.results import Table, add_json_option  # noqa: E402

PRECISIONS = ("fp32", "bf16")


def worker(name: str, precision: str, steps: int, out: str) -> None:
    """One rank of one system: builds it, warms up, times `steps` steps, rank 0 writes the result."""
    import torch
    import torch.distributed as dist
    from _systems import SYSTEMS
    from dsx_testkit.benches import batch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ.get("RANK", "0"))
    step = SYSTEMS[name].build(precision)
    times, loss = [], torch.zeros(())
    for i in range(steps + 3):
        data = batch(i, rank)
        begin = time.perf_counter()
        loss = step(*data)
        times.append(time.perf_counter() - begin)
    if rank == 0:
        transport = dist.get_backend().replace("undefined", "gloo") if dist.is_initialized() else ""  # torch's default
        found = {"ms": statistics.median(times[3:]) * 1e3, "loss": float(loss), "transport": transport}
        Path(out).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()  # a launcher ends the others when the first has ended
    os._exit(0)  # peers leave threads and groups behind; their teardown is not what is measured


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(name: str, precision: str, steps: int) -> dict[str, Any] | None:
    """Run one system once; None when it fails (its last words are shown)."""
    from _systems import SYSTEMS

    system = SYSTEMS[name]
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out.json"
        program = [__file__, "--worker", name, "--precision", precision, "--steps", str(steps), "--out", out]
        start = [sys.executable]
        if system.launcher == "dsx":
            start = [sys.executable, "-m", "dsx", "launch", "--no_local_rank", "--num_procs", str(system.processes)]
        elif system.processes > 1:
            start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={system.processes}",
                     f"--master-port={free_port()}"]  # fmt: skip
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        done = subprocess.run([*start, *program], env=variables, capture_output=True, text=True, timeout=600)
        if done.returncode or not Path(out).exists():
            print(f"  {name}: did not run: {(done.stdout + done.stderr)[-600:]}", flush=True)
            return None
        return json.loads(Path(out).read_text())


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
    rows.sort(key=lambda row: not (row[0].startswith("dsx") and min(row[3] or 1.0, row[4] or 1.0) < 1.0))
    for row in rows:
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

    precisions = [args.precision] if args.precision else list(PRECISIONS)
    chosen = [n for n in SYSTEMS if args.only in n]
    results: dict[str, dict[str, list[dict[str, Any]]]] = {p: {n: [] for n in chosen} for p in precisions}
    for r in range(args.rounds):
        for precision in precisions:
            for name in chosen:
                if done := run(name, precision, args.steps):
                    results[precision][name].append(done)
                    print(f"  round {r + 1}: {precision}, {name}: {done['ms']:.0f} ms", flush=True)
    print(f"\nmedians of {args.rounds} rounds")
    for precision, found in results.items():
        table(precision, found).save(args.json)


if __name__ == "__main__":
    main()
