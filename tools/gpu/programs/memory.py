"""`memory.py STAGE PLACE`: peak, retries of the allocator and locked bytes of a 350 M model, against `dsx plan`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from dsx.planning import plan
from records import SIMULATED, one_rank, record, recorded
from speed import data_of, model_of, settings
from training import engine_of, engine_step

SIZE = "350M"
# What the plan does not count: workspaces of cuBLAS, and rounding of the allocator where a model is small.
ROOM = 160 * 2**20
STEPS = 3


def locked_bytes() -> int:
    """VmLck of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmLck:"):
            return int(line.split()[1]) * 1024
    return 0


def main(stage: int, place: str) -> int:
    """One case, in a process of its own, so that no other has left anything."""
    name = f"{SIZE}, stage {stage}, {place}"
    with tempfile.TemporaryDirectory() as folder, recorded(name):
        wanted = settings(SIZE, stage, place, folder)
        with one_rank():
            data = data_of(SIZE)
            before = locked_bytes()
            torch.cuda.reset_peak_memory_stats()
            engine = engine_of(model_of(SIZE), wanted)
            step = engine_step(engine, lambda number: data)
            for number in range(STEPS):
                step(number)
            torch.cuda.synchronize()
            peak, retries = torch.cuda.max_memory_allocated(), torch.cuda.memory_stats().get("num_alloc_retries", 0)
            locked = locked_bytes() - before
            engine.destroy()
        example = tuple(t.cpu() for t in data)
        planned = plan(
            lambda: model_of(SIZE), wanted, world_size=1, machine="H100-SXM", batch=example, changes=False
        ).peak_bytes
        good = peak <= 1.1 * planned + ROOM
        verdict = "noted" if SIMULATED else "good" if good else "bad"
        text = "" if good else "more than the plan says"
        record(
            name, verdict, text, peak_bytes=peak, planned_bytes=planned, num_alloc_retries=retries, locked_bytes=locked
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
