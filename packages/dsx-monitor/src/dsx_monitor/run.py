"""A run directory: the files of one training run that `dsx_monitor.report` draws.

    RUN/meta.json              what ran: title, config, environment, and every start (first one, resumes)
    RUN/events.jsonl           the events of rank 0 (section `jsonl` with output_path RUN and an empty job_name)
    RUN/memory/rank00000.jsonl one line per snapshot and rank: time, step and the bytes of `MemorySnapshot`

Every file only grows, so a run that is stopped and resumed in the same directory, with any number of ranks, goes on in
the same curves. Only `start_run` and `MemoryLog` write here; nothing depends on the training framework.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .events import last_byte
from .memory import memory_snapshot
from .monitor import current_rank

__all__ = ["MemoryLog", "start_run"]

META = "meta.json"
MEMORY = "memory"


def start_run(
    run_dir: str | os.PathLike[str],
    *,
    title: str,
    config: Mapping[str, Any] | None = None,
    world_size: int = 1,
    step: int = 0,
    facts: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Path:
    """Write or extend `meta.json`. Call on rank 0 only, at the start and at each resume.

    Args:
        title: headline of the report.
        config: the configuration in force; anything JSON cannot hold is written as text.
        step: samples seen so far (0 at the first start), where the report marks the start.
        facts: further things worth knowing, such as the number of parameters.
        quiet: do nothing if this process has told of its start already; for frameworks, whose users may know better.

    Returns:
        The run directory, made if needed.
    """
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / META
    meta: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"starts": []}
    process = f"{platform.node()}:{os.getpid()}:{_born()}"
    known = meta["starts"] and meta["starts"][-1].get("process") == process
    if known and quiet:
        return folder
    if known and meta["starts"][-1]["step"] == step:
        meta["starts"].pop()  # the same start, told again with more words
    meta.update(title=title, config=dict(config or {}), environment=environment(), facts=dict(facts or {}))
    start = {"time": time.time(), "step": step, "world_size": world_size, "command": sys.argv, "process": process}
    meta["starts"].append(start)
    partial = path.with_name(f"{META}.{os.getpid()}")
    partial.write_text(json.dumps(meta, indent=1, default=str), encoding="utf-8")
    os.replace(partial, path)  # a reader never sees half a file
    return folder


def _born() -> str:
    """When this process began, as the kernel counts; tells processes apart that had the same number."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as stream:
            return stream.read().rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""


def environment() -> dict[str, Any]:
    """Versions and hardware of this process, without initialising a device."""
    facts: dict[str, Any] = {
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["torch"] = torch.__version__
        facts["threads"] = torch.get_num_threads()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            facts["device"] = torch.cuda.get_device_name()
    return facts


class MemoryLog:
    """Appends this rank's memory to the run directory; every rank has its own file.

    Args:
        run_dir: the run directory.
        rank: as for the monitors.
        interval: least seconds between two lines; calls in between cost a clock read.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, rank: int | None = None, interval: float = 1.0) -> None:
        self.rank = current_rank() if rank is None else rank
        folder = Path(run_dir) / MEMORY
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank{self.rank:05d}.jsonl"
        ended = last_byte(self.path) in (b"", b"\n")
        self._stream = self.path.open("a", encoding="utf-8")
        if not ended:  # a crash cut the last line in half
            self._stream.write("\n")
        self._interval, self._next = interval, 0.0

    def record(self, step: int, *, force: bool = False) -> None:
        """Write a line if one is due, at `step` (samples seen by all ranks)."""
        now = time.monotonic()
        if now < self._next and not force:
            return
        self._next = now + self._interval
        line = {"time": round(time.time(), 3), "step": step, **memory_snapshot(pss=True).as_dict()}
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def __enter__(self) -> MemoryLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
