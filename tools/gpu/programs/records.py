"""What the programs of `tools/dev.py gpu` share: records, and the process group of one rank."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIMULATED = os.environ.get("DSX_SIMCUDA") == "1"


def record(name: str, verdict: str, text: str = "", **figures: Any) -> None:
    """One line for the report, on disk at once."""
    line = {"name": name, "verdict": verdict, "text": text, "figures": figures}
    print(f"{verdict:10} {name} {text.splitlines()[0] if text else ''} {figures or ''}", flush=True)
    path = os.environ.get("DSX_GPU_RECORDS")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@contextmanager
def recorded(name: str) -> Iterator[None]:
    """An error inside becomes a record, and the program goes on. A device that is full is no fault of the code."""
    import torch

    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        record(name, "noted", f"no room on the device: {str(error).splitlines()[0]}")
    except Exception as error:  # noqa: BLE001  one case must not cost those that follow
        record(name, "bad", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    finally:
        gc.collect()


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group `nccl` of one rank."""
    import torch
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1, device_id=device)
        try:
            yield
        finally:
            dist.destroy_process_group()
