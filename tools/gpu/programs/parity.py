"""Losses of dsx over stages, dtypes and places of the states, against plain PyTorch on the same device."""

from __future__ import annotations

import os
import sys
import tempfile

# For products whose bits do not depend on the schedule; read when cuBLAS starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from records import SIMULATED, one_rank, record, recorded
from training import DTYPES, cases, config, engine_of, engine_step, plain_step, small_model

STEPS = 3 if SIMULATED else 8
# Half precision rounds a gradient's last bit by the order of its sums, and AdamW's first steps take its sign.
TOLERANCE = {"fp32": 2e-5, "bf16": 4e-3, "fp16": 2e-3}


def distance(found: list[float], wanted: list[float]) -> float:
    """The greatest relative difference; infinite where a value is not finite."""
    pairs = zip(found, wanted, strict=True)
    each = [abs(a - b) / max(1e-6, abs(b)) for a, b in pairs]
    return max(each) if all(d == d for d in each) else float("inf")


def main() -> int:
    """All cases; the differences are records."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    wanted = {}
    for dtype in DTYPES:
        with recorded(f"plain torch {dtype}"):
            step = plain_step(dtype)
            wanted[dtype] = [step(number).item() for number in range(STEPS)]
    with one_rank(), tempfile.TemporaryDirectory() as folder:
        for stage, dtype, place in cases():
            name = f"stage {stage}, {dtype}, {place}"
            with recorded(name):
                engine = engine_of(small_model(), config(stage, dtype, place, folder))
                step = engine_step(engine)
                # Read at the end only: a read in every step would hide what a race does.
                losses = [loss.item() for loss in [step(number) for number in range(STEPS)]]
                engine.destroy()
                apart = distance(losses, wanted[dtype])
                right = apart <= TOLERANCE[dtype]
                text = "" if right else f"losses differ from plain torch's {wanted[dtype]} by {apart:.2g}"
                record(name, "good" if right else "bad", text, losses=losses, apart=apart)
    return 0


if __name__ == "__main__":
    sys.exit(main())
