"""A run directory: the files of one training run that `dsx_monitor.report` draws.

    RUN/meta.json              what ran: title, config, environment, and every start (first one, resumes)
    RUN/events.jsonl           the events of rank 0 (section `jsonl` with output_path RUN and an empty job_name)
    RUN/memory/rank00000.jsonl one line per snapshot and rank: time, step and the bytes of `MemorySnapshot`

Every file only grows. So a run that is stopped and resumed in the same directory, with any number of ranks, continues
the same curves. This module writes `meta.json` and the memory files; it does not depend on the training framework.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from dsx_core import replace_text

from .memory import memory_snapshot
from .processes import accelerator_in_use, current_rank, current_world_size
from .secrets import command_without_secrets, without_secrets
from .tolerance import tolerating
from .writers.appended import AppendedFile

__all__ = ["MemoryLog", "start_run"]

logger = logging.getLogger("dsx_monitor")

META = "meta.json"
MEMORY = "memory"


def start_run(
    run_dir: str | os.PathLike[str],
    *,
    title: str,
    config: Mapping[str, Any] | None = None,
    world_size: int | None = None,
    step: int = 0,
    facts: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Path:
    """Write or extend `meta.json`. Call it at the start and at each resume, on all ranks or on rank 0; rank 0 writes.

    If a folder cannot be made, the disk is full or `meta.json` is damaged, there is a warning and training goes on.

    Args:
        title: headline of the report.
        config: the configuration of the run; values that JSON cannot hold are written as text. Keys of services,
            passwords and tokens are masked, here, in `facts` and in the recorded command.
        world_size: number of processes; None: that of the process group, else the variable WORLD_SIZE, else 1.
        step: samples seen so far (0 at the first start); the report marks the start there.
        facts: other facts, such as the number of parameters.
        quiet: if this process has recorded its start already, only add what it has not told. Frameworks set it, so that
            a call of the user takes precedence.

    Returns:
        The run directory. Rank 0 makes it if needed.
    """
    folder = Path(run_dir)
    if current_rank() != 0:
        return folder
    process = f"{platform.node()}:{os.getpid()}:{_born()}"
    with tolerating(f"{folder / META} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        meta = _read_meta(folder / META)
        known = meta["starts"] and meta["starts"][-1].get("process") == process
        told = {"config": without_secrets(_text_keys(config)), "facts": without_secrets(_text_keys(facts))}
        if known and quiet:
            meta.update({name: value for name, value in told.items() if not meta.get(name)})
        else:
            if known and meta["starts"][-1].get("step") == step:
                meta["starts"].pop()  # this process has recorded its start already; the new record replaces it
            meta.update(title=title, environment=environment(), **told)
            meta["starts"].append({
                "time": round(time.time(), 6), "step": step, "world_size": world_size or current_world_size(),
                "command": command_without_secrets(sys.argv), "process": process,
            })  # fmt: skip
        replace_text(folder / META, json.dumps(meta, indent=1, default=str), durable=False)
    return folder


def _read_meta(path: Path) -> dict[str, Any]:
    """The data of earlier starts. If the file cannot be read, there is a warning and the list of starts is empty."""
    if not path.exists():
        return {"starts": []}
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(start, dict) for start in meta["starts"]):
            raise ValueError("a start that is no object")
        return meta
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("monitor: %s is damaged and is written again: %s: %s", path, type(error).__name__, error)
        return {"starts": []}


def _text_keys(value: Any) -> Any:
    """Nested mappings with strings as keys, as JSON needs them; an empty mapping for None."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {str(key): _text_keys(item) if isinstance(item, Mapping) else item for key, item in value.items()}
    return value


def _born() -> str:
    """The start time of this process as the kernel counts it; it tells apart processes that had the same id."""
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
        device = accelerator_in_use()
        if device is not None:
            facts["device"] = device.name
    return facts


class MemoryLog:
    """Appends this rank's memory to the run directory; every rank has its own file.

    If a folder cannot be made or a file cannot be written, there is one warning and training goes on.

    Args:
        run_dir: the run directory.
        rank: as for the monitors.
        interval: least seconds between two lines; a call before that only reads the clock.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, rank: int | None = None, interval: float = 1.0) -> None:
        self.rank = current_rank() if rank is None else rank
        self.path = Path(run_dir) / MEMORY / f"rank{self.rank:05d}.jsonl"
        self._interval, self._next = interval, 0.0
        self._file: AppendedFile | None = None
        with self._tolerating():
            self._file = AppendedFile(self.path)

    def record(self, step: int, *, force: bool = False) -> None:
        """Write a line if one is due, at `step` (samples seen by all ranks)."""
        now = time.monotonic()
        if self._file is None or (now < self._next and not force):
            return
        self._next = now + self._interval
        line = {"time": round(time.time(), 3), "step": step, **memory_snapshot(pss=True).as_dict()}
        with self._tolerating():
            try:
                self._file.append(json.dumps(line) + "\n")
            except OSError:
                file, self._file = self._file, None
                with suppress(OSError):  # the rest of its buffer cannot be written either
                    file.close()
                raise

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            with self._tolerating():
                file.close()

    def _tolerating(self) -> AbstractContextManager[None]:
        return tolerating(f"the memory of rank {self.rank} cannot be written to {self.path}")

    def __enter__(self) -> MemoryLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
