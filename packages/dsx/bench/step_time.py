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
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from dsx_testkit.results import Table, add_json_option  # noqa: E402


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


def table(results: dict[str, list[dict[str, float]]]) -> Table:
    """The figures, printed."""
    from _systems import SYSTEMS

    median = {n: statistics.median(r["ms"] for r in rows) for n, rows in results.items() if rows}
    found = Table({"system": "", "ms/step": "{:.0f}", "vs FSDP2": "{:.2f}x", "vs deepspeed, same stage": "{:.2f}x",
                   "loss": "{:.4f}"})  # fmt: skip
    least: dict[str, list[float]] = {"FSDP2": [], "deepspeed": []}
    for name, ms in median.items():
        ours = name.startswith("dsx") and SYSTEMS[name].processes > 1
        where = ", host optimizer" if name.endswith("host optimizer") else ""
        peer = median.get(f"deepspeed stage {SYSTEMS[name].stage}{where}") if ours else None
        fsdp = median.get("torch FSDP2") if SYSTEMS[name].processes > 1 else None
        found.add(name, ms, fsdp / ms if fsdp else None, peer / ms if peer else None, results[name][-1]["loss"])
        least["FSDP2"] += [fsdp / ms] if ours and fsdp else []
        least["deepspeed"] += [peer / ms] if peer else []
    for peer, ratios, wanted in (("FSDP2", least["FSDP2"], 1.0), ("DeepSpeed's same stage", least["deepspeed"], 1.2)):
        if ratios:
            text = f"every stage at least {wanted:.1f}x {peer}"
            found.goal(text, f"{min(ratios):.2f}x at least", met=min(ratios) >= wanted)
    if {"raw, 1 process", "dsx stage 0, 1 process"} <= median.keys():
        ratio = median["dsx stage 0, 1 process"] / median["raw, 1 process"]
        found.goal("one process at most 1.02x a raw loop", f"{ratio:.3f}", met=ratio <= 1.02)
    return found


def main() -> None:
    """Parse arguments and run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", default="", help="systems whose name contains this text")
    add_json_option(parser)
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
    print(f"\nmedians of {args.rounds} rounds")
    table(results).save(args.json)


if __name__ == "__main__":
    main()
