"""Waits of the host in a step: an error of torch (`set_sync_debug_mode`), and torch's own sanitizer around steps.

`syncs.py` counts waits; `syncs.py sanitizer` only trains, in a process that was started with TORCH_CUDA_SANITIZER=1.
"""

from __future__ import annotations

import sys
import tempfile
import warnings

import torch
from records import one_rank, record, recorded
from training import config, engine_of, engine_step, small_model, tokens

# Waits that a step may have, without reading the loss: see the budgets of the simulated device's tests.
CASES = [
    *((stage, "fp32", "none", 0) for stage in range(4)),
    (2, "bf16", "none", 1),
    (3, "bf16", "none", 1),
    (2, "fp16", "none", 1),
    (2, "bf16", "optimizer on host", 2),
    (3, "bf16", "optimizer on host", 2),
]
SANITIZED = [(0, "none"), (2, "none"), (2, "optimizer on host"), (3, "none"), (3, "parameters on host")]


def waits_of(step, data) -> list[str]:
    """The texts of torch's warnings in one step."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step(data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename}:{w.lineno}" for w in seen if "synchroniz" in str(w.message)]


def count() -> None:
    """Every case: warm, then one step with warnings; with none allowed, one more where a wait is an error."""
    ready = tokens(0)  # made before: bringing it to the device is the user's wait
    with one_rank(), tempfile.TemporaryDirectory() as folder:
        for stage, dtype, place, budget in CASES:
            name = f"waits of the host: stage {stage}, {dtype}, {place}"
            with recorded(name):
                engine = engine_of(small_model(), config(stage, dtype, place, folder, clip=0.0))
                step = engine_step(engine, lambda number: ready)
                for number in range(3):
                    step(number)
                found = waits_of(step, 3)
                if budget == 0 and not found:
                    torch.cuda.set_sync_debug_mode("error")
                    try:
                        step(4)
                    finally:
                        torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
                engine.destroy()
                good = len(found) <= budget
                text = "" if good else f"{len(found)} waits, expected at most {budget}\n" + "\n".join(found)
                record(name, "good" if good else "bad", text, waits=len(found), budget=budget)


def sanitized() -> None:
    """Steps that torch's sanitizer watches; it raises where two streams touch the same tensor without order."""
    with one_rank(), tempfile.TemporaryDirectory() as folder:
        for stage, place in SANITIZED:
            name = f"torch's sanitizer: stage {stage}, {place}"
            with recorded(name):
                engine = engine_of(small_model(), config(stage, "bf16", place, folder))
                step = engine_step(engine)
                for number in range(3):
                    step(number)
                torch.cuda.synchronize()
                engine.destroy()
                record(name, "good")


if __name__ == "__main__":
    sanitized() if sys.argv[1:] == ["sanitizer"] else count()
