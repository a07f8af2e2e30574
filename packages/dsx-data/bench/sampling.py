"""Time per draw and memory of a curriculum over two metrics; aim: 10 million samples in at most 200 MB.

    python sampling.py --samples 10000000 --draws 200 [--json FILE]

Memory is what this process holds beyond what importing torch and dsx_data took: anonymous pages, and the pages of
mapped files, which the system may take back, apart. Compare the time per draw with the time of a training step.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from dsx_data import CurriculumSampler
from dsx_data.index import IndexWriter
from dsx_testkit.results import Table, add_json_option


def resident() -> dict[str, float]:
    """Megabytes of anonymous and file pages."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {name: int(fields[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile", "VmHWM")}


def write_order(path: Path, samples: int, seed: int) -> None:
    """An index of all samples in a random order of difficulty, in pieces."""
    order = np.random.default_rng(seed).permutation(samples).astype(np.uint32)
    with IndexWriter(path, "uint32", row_size=1) as writer:
        writer.add_rows(order)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256, help="samples per draw")
    parser.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    add_json_option(parser)
    options = parser.parse_args()
    if options.write:
        write_order(Path(options.write[0]), options.samples, int(options.write[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        metrics = {}
        for number, name in enumerate(("a", "b")):
            # In a process of its own: memory that this one had before would hide what sampling takes.
            target = ["--write", f"{folder}/{name}.dsxi", str(number)]
            subprocess.run([sys.executable, __file__, "--samples", str(options.samples), *target], check=True)
            metrics[name] = SimpleNamespace(
                index_to_sample_path=f"{folder}/{name}.dsxi", index_to_metric_path=None, difficulty_type="percentile",
                clustering_type="schedule_based", min_difficulty=10, max_difficulty=100, schedule_type="fixed_linear",
                schedule_config={"total_curriculum_step": options.draws // 2, "difficulty_step": 5},
            )  # fmt: skip
        before = resident()
        sampler = CurriculumSampler(
            options.samples, metrics, global_batch_size=options.batch, cluster_path=f"{folder}/clusters"
        )
        times, peak = [], before["RssAnon"]
        for _ in range(options.draws):
            begin = time.perf_counter()
            sampler.draw()
            times.append(time.perf_counter() - begin)
            peak = max(peak, resident()["RssAnon"])
        after = resident()
        rises = sorted(times)[-len(sampler.state_dict()["clusters"]) :]
        print(f"{options.samples:,} samples, {options.draws} draws of {options.batch}")
        held = after["RssAnon"] - before["RssAnon"]
        table = Table({"what": "", "measured": "{:.2f}", "unit": ""})
        table.add("a draw, median", float(np.median(times)) * 1e3, "ms")
        table.add("a draw, mean", float(np.mean(times)) * 1e3, "ms")
        table.add("the slowest draw, a rise of the difficulty", max(rises) * 1e3, "ms")
        table.add("memory held", held, "MB")
        table.add("most memory after a draw", peak - before["RssAnon"], "MB")
        table.add("mapped files", after["RssFile"] - before["RssFile"], "MB")
        table.goal("at most 200 MB held for 10 million samples", f"{held:.0f} MB", met=held <= 200)
        table.save(options.json)


if __name__ == "__main__":
    main()
