"""Samples per second of an analysis: this package and DeepSpeed's DataAnalyzer on the same dataset.

    python analysis.py --samples 200000 --deepspeed /path/with/deepspeed [--json FILE]

The dataset is a tensor of tokens in memory, so that the time is the analyzer's. `seqlen` is the metric, one process.
DeepSpeed is run in a process of its own, with the folder given first on its path; without --deepspeed it is left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time

import torch
from dsx_testkit.results import Table, add_json_option

THEIRS = """
import sys, time, tempfile, torch
sys.path.insert(0, sys.argv[1])
from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer
samples, batch = int(sys.argv[2]), int(sys.argv[3])
data = torch.utils.data.TensorDataset(torch.randint(1, 1000, (samples, 64)))
with tempfile.TemporaryDirectory() as folder:
    begin = time.perf_counter()
    one = DataAnalyzer(data, batch_size=batch, metric_names=["seqlen"], save_path=folder,
                       metric_functions=[lambda rows: (rows[0] != 0).sum(1)],
                       metric_types=["single_value_per_sample"], metric_dtypes=[torch.int64])
    one.run_map()
    mapped = time.perf_counter()
    one.run_reduce()
    print("RESULT", mapped - begin, time.perf_counter() - mapped)
"""


def ours(samples: int, batch: int) -> tuple[float, float]:
    """Seconds of map and reduction."""
    from dsx_data import DataAnalyzer

    data = torch.utils.data.TensorDataset(torch.randint(1, 1000, (samples, 64)))
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        one = DataAnalyzer(
            data, batch_size=batch, metric_names=["seqlen"], save_path=folder,
            metric_functions=[lambda rows: (rows[0] != 0).sum(1)],
            metric_types=["single_value_per_sample"], metric_dtypes=[torch.int64],
        )  # fmt: skip
        one.run_map()
        mapped = time.perf_counter()
        one.run_reduce()
        return mapped - begin, time.perf_counter() - mapped


def theirs(path: str, samples: int, batch: int) -> tuple[float, float]:
    """The same of DeepSpeed."""
    command = [sys.executable, "-c", THEIRS, path, str(samples), str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT")), None)
    if line is None:
        raise SystemExit(f"DeepSpeed did not finish:\n{done.stderr[-2000:]}")
    _, mapped, reduced = line.split()
    return float(mapped), float(reduced)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--deepspeed", help="folder that holds the package deepspeed")
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {"dsx_data": ours(options.samples, options.batch)}
    if options.deepspeed:
        rows["DeepSpeed"] = theirs(options.deepspeed, options.samples, options.batch)
    table = Table({"system": "", "map s": "{:.2f}", "reduce s": "{:.2f}", "samples per second": "{:,.0f}",
                   "against DeepSpeed": "{:.1f}x"})  # fmt: skip
    for name, (mapped, reduced) in rows.items():
        ratio = sum(rows["DeepSpeed"]) / (mapped + reduced) if "DeepSpeed" in rows else None
        table.add(name, mapped, reduced, options.samples / (mapped + reduced), ratio)
    if "DeepSpeed" in rows:
        ratio = sum(rows["DeepSpeed"]) / sum(rows["dsx_data"])
        table.goal("at least 10x DeepSpeed", f"{ratio:.1f}x", met=ratio >= 10)
    table.save(options.json)


if __name__ == "__main__":
    main()
