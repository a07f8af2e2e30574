"""How few experiments the autotuner needs, beside a search that tries everything.

    python packages/dsx/bench/autotuner.py [--small] [--json FILE] [--updates 6]

A GPT of 19 M parameters on two processes; the space is stage x micro-batch x accumulation x bucket x recomputation, 128
points. The oracle measures every point once, in one pair of processes. Then `dsx launch --autotuning tune` searches the
same space as a user starts it. The table has a row for each experiment (the first one counts): its throughput by the
tuner's and by the oracle's figures, and, by the oracle's, the share of the best point that the tuner would have found
if it had ended there. Below it stand experiments that ran out of memory, what the tuner reports beside what the
script's own clock says, and the time of both. `--small` takes a tiny model and eight points, to see that it runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dsx_testkit.results import Table, add_json_option

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

MICRO, STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
FULL = {
    "zero_optimization.stage": [0, 1, 2, 3],
    MICRO: [4, 1, 2, 8],
    STEPS: [1, 2],
    "zero_optimization.reduce_bucket_size": [500_000_000, 1_000_000],
    "activation_checkpointing.memory_budget": [None, 0.5],
}
SMALL = {"zero_optimization.stage": [0, 2], MICRO: [2, 8], STEPS: [1, 2]}
SIZES = {"full": {}, "small": {"width": 64, "layers": 2, "heads": 2, "length": 32}}


def document(space: dict[str, list[Any]], last: int) -> dict[str, Any]:
    """The configuration that leaves the space open."""
    from dsx_plan.autotuning.documents import with_values

    base = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "steps_per_print": 0,
        "autotuning": {"enabled": True, "end_profile_step": last, "tuner_num_trials": 50},
    }
    return with_values(base, space)


def build(size: str) -> Any:
    """The model."""
    import torch
    from dsx_testkit.benches import GPT

    torch.manual_seed(0)
    torch.set_num_threads(1)
    return GPT(**SIZES[size])


def train(engine: Any, size: str) -> list[float]:
    """Train until the engine ends it; the times at which updates ended, by this script's own clock."""
    from dsx_testkit.benches import batch

    ends, micro = [], engine.train_micro_batch_size_per_gpu()
    length = SIZES[size].get("length", 128)
    try:
        for step in itertools.count():
            ids, targets = batch(step, engine.global_rank, micro, length)
            engine.backward(engine(ids, targets))
            before = engine.global_steps
            engine.step()
            if engine.global_steps > before:
                ends.append(time.perf_counter())
    except SystemExit:
        ends.append(time.perf_counter())
    return ends


def worker(config: str, size: str) -> None:
    """An experiment: what the tuner starts. Leaves the script's own measurement beside the tuner's."""
    import dsx

    engine, *_ = dsx.initialize(model=build(size), config=config)
    ends = train(engine, size)
    section = engine.config.autotuning
    own = (ends[-1] - ends[section.start_profile_step - 2]) / (len(ends) - section.start_profile_step + 1)
    if int(os.environ.get("RANK", "0")) == 0:
        (Path(section.metric_path).parent / "own.json").write_text(json.dumps({"latency": own}))


def oracle(rank: int, world: int, space: dict[str, list[Any]], size: str, folder: str, last: int) -> dict[str, float]:
    """Measure every point: name -> samples per second."""
    import dsx
    from dsx.config import load_config
    from dsx.planned import PlannedEngine
    from dsx_plan.autotuning.space import read_space

    asked = document(space, last)
    section = load_config({MICRO: 1, "autotuning": asked["autotuning"]}, world_size=1).autotuning
    training = {key: value for key, value in asked.items() if key != "autotuning"}
    points = read_space(
        training, section, PlannedEngine().value_type, data_parallel=world, from_arguments={}
    ).candidates()
    found = {}
    for number, point in enumerate(points):
        path = Path(folder) / point.name / "metrics.json"
        measure = {"enabled": True, "metric_path": str(path), "end_profile_step": last}
        engine, *_ = dsx.initialize(model=build(size), config={**point.applied_to(training), "autotuning": measure})
        train(engine, size)
        engine.destroy()
        dsx.comm.barrier()
        found[point.name] = json.loads(path.read_text())["throughput"]
        if rank == 0:
            print(f"  {number + 1}/{len(points)} {point.name}: {found[point.name]:.1f} samples/s", flush=True)
    return found


def search(space: dict[str, list[Any]], size: str, folder: Path, last: int) -> dict[str, Any]:
    """Run the tuner as a user does; its results."""
    (folder / "dsx.json").write_text(json.dumps(document(space, last)))
    words = [sys.executable, "-m", "dsx.launcher", "--num_procs", "2", "--autotuning", "tune", "--no_local_rank",
             str(HERE / "autotuner.py"), "--size", size, "--config", "dsx.json"]  # fmt: skip
    subprocess.run(words, cwd=folder, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads((folder / "autotuning_results" / "results.json").read_text())


def report(known: dict[str, float], results: dict[str, Any], folder: Path, seconds: tuple[float, float]) -> Table:
    """The table. `known`: samples per second of every point; `seconds`: of the oracle and of the search."""
    best, rows = max(known.values()), results["experiments"]
    names = [row["name"].removeprefix("first_") for row in rows]
    measured = [row["value"] or 0.0 for row in rows]
    columns = {"samples/s, tuner": "{:.1f}", "samples/s, oracle": "{:.1f}", "share of the best so far": "{:.3f}"}
    table = Table({"experiments": "", "configuration": "", **columns, "predicted by": ""})
    shares = []
    for count, row in enumerate(rows, start=1):
        chosen = max(range(count), key=measured.__getitem__)  # what the tuner would take: by its own measurements
        shares.append(known[names[chosen]] / best)
        name = names[count - 1]
        table.add(count, name, row["value"], known.get(name), shares[-1], row["predicted_by"])
    last = [row for row in rows if row["metrics"]][-1]  # not the first, whose end waits for the planner
    own = json.loads((folder / "autotuning_exps" / last["name"] / "own.json").read_text())["latency"]
    told = last["metrics"]["latency"]
    failed = sum(row["reason"] == "out of memory" for row in rows)
    early = shares[:4][-1]
    text = f"0.98 of the best of {len(known)} points after four experiments"
    table.goal(text, f"{early:.3f}; {shares[-1]:.3f} after all {len(rows)}", met=early >= 0.98)
    table.goal("no experiment runs out of memory", f"{failed} of {len(rows)}", met=not failed)
    text = "the reported time of an update within 2 % of the script's own clock"
    table.goal(text, f"{told / own - 1:+.1%}", met=abs(told / own - 1) <= 0.02)
    text = "the search takes less time than trying every point"
    table.goal(text, f"{seconds[1]:.0f} s beside {seconds[0]:.0f} s", met=seconds[1] < seconds[0])
    return table


def main() -> None:
    """Parse arguments; oracle, search, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model and eight points: only to see that it runs")
    parser.add_argument(
        "--updates", type=int, default=6, help="number of the last measured update; the third is the first"
    )
    add_json_option(parser)
    parser.add_argument("--config", help=argparse.SUPPRESS)
    parser.add_argument("--size", default="full", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.config:
        worker(args.config, args.size)
        return
    from dsx_testkit import run_ranks

    size, space = ("small", SMALL) if args.small else ("full", FULL)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        # Without a group: dsx.initialize makes the one that the launcher's ranks get.
        known, _ = run_ranks(oracle, 2, space, size, name, args.updates, backend=None, timeout=7200)
        middle = time.perf_counter()
        results = search(space, size, folder, args.updates)
        report(known, results, folder, (middle - began, time.perf_counter() - middle)).save(args.json)


if __name__ == "__main__":
    main()
