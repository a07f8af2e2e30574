"""Time of one training step, dsx beside its peers, in one run.

    python packages/dsx/bench/step_time.py [--rounds 3] [--steps 10] [--only TEXT] [--json FILE]

Every system runs in fresh processes (one thread each), in turn, `rounds` times, so that a machine that drifts drifts
for all. The table gives the median over rounds of each round's median step, and the ratios the goals are about. Losses
after the last step are compared too: a fast wrong answer is not a result. Peers that are not installed are left out and
said so. All run over gloo; the rows "shared memory" are dsx over dsx-comm's transport, which is what its launcher takes
on one host.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


def worker(name: str, steps: int, out: str) -> None:
    """One rank of one system: builds it, warms up, times `steps` steps, rank 0 writes the result."""
    import torch
    import torch.distributed as dist
    from _systems import SYSTEMS
    from dsx_testkit.benches import batch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, system = int(os.environ["RANK"]), SYSTEMS[name]
    if system.backend == "dsx":
        import dsx_comm  # noqa: F401  registers it
    if system.processes > 1 and system.backend:
        dist.init_process_group(system.backend)
    step = system.build()
    times, loss = [], torch.zeros(())
    for i in range(steps + 3):
        data = batch(i, rank)
        begin = time.perf_counter()
        loss = step(*data)
        times.append(time.perf_counter() - begin)
    if rank == 0:
        Path(out).write_text(json.dumps({"ms": statistics.median(times[3:]) * 1e3, "loss": float(loss)}))
    os._exit(0)  # peers leave threads and groups behind; their teardown is not what is measured


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(name: str, world: int, steps: int) -> dict[str, float] | None:
    """Run one system once; None when it fails (its last words are shown)."""
    with tempfile.TemporaryDirectory() as folder:
        out, port = f"{folder}/out.json", str(free_port())
        ranks = []
        for rank in range(world):
            env = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "OMP_NUM_THREADS": "1",
            }
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(world)}
            command = [sys.executable, __file__, "--worker", name, "--steps", str(steps), "--out", out]
            log = open(f"{folder}/log{rank}", "w")  # noqa: SIM115  lives as long as the process
            ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        try:
            codes = [p.wait(timeout=600) for p in ranks]
        except subprocess.TimeoutExpired:
            codes = [-1]
            for p in ranks:
                p.kill()
        if any(codes) or not Path(out).exists():
            print(f"  {name}: did not run: {Path(folder, 'log0').read_text()[-600:]}", flush=True)
            return None
        return json.loads(Path(out).read_text())


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """The figures as markdown."""
    from _systems import SYSTEMS

    median = {n: statistics.median(r["ms"] for r in rows) for n, rows in results.items() if rows}
    lines = ["| system | ms/step | vs FSDP2 | vs deepspeed, same stage | loss |", "|---|---|---|---|---|"]
    for name, ms in median.items():
        ours = name.startswith("dsx") and SYSTEMS[name].processes > 1
        where = ", host optimizer" if name.endswith("host optimizer") else ""
        peer = median.get(f"deepspeed stage {SYSTEMS[name].stage}{where}") if ours else None
        fsdp = median.get("torch FSDP2") if SYSTEMS[name].processes > 1 else None
        cells = [f"{fsdp / ms:.2f}x" if fsdp else "", f"{peer / ms:.2f}x" if peer else ""]
        lines.append(f"| {name} | {ms:.0f} | {' | '.join(cells)} | {results[name][-1]['loss']:.4f} |")
    if {"raw, 1 process", "dsx stage 0, 1 process"} <= median.keys():
        lines.append(f"\none process, dsx / raw: {median['dsx stage 0, 1 process'] / median['raw, 1 process']:.3f}")
    return "\n".join(lines)


def main() -> None:
    """Parse arguments and run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", default="", help="systems whose name contains this text")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.steps, args.out)
    from _systems import SYSTEMS

    chosen = {n: system.processes for n, system in SYSTEMS.items() if args.only in n}
    results: dict[str, list[dict[str, float]]] = {n: [] for n in chosen}
    for r in range(args.rounds):
        for name, world in chosen.items():
            done = run(name, world, args.steps)
            if done:
                results[name].append(done)
                print(f"  round {r + 1}: {name}: {done['ms']:.0f} ms", flush=True)
    print(
        f"\n{time.strftime('%Y-%m-%d')}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores, medians"
        f" of {args.rounds} rounds\n"
    )
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
