"""The options of an engine, the native engines that they make, and the check of an offset in a file."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch

from . import fallback, files, native
from .errors import EngineStartError, OptionError

__all__ = ["Options", "checked_offset"]

MAX_THREADS = 8  # of the engines that block in system calls, when only a queue depth is given
MAX_OPTION = (1 << 31) - 1
MAX_OFFSET = (1 << 63) - 1  # the largest offset that the kernel can address


@dataclass(frozen=True)
class Options:
    """The options of an engine. Names as in the `aio` section of a configuration, sizes in bytes."""

    engine: str = "auto"
    block_size: int = 1 << 20
    queue_depth: int = 32
    threads: int = 1
    single_submit: bool = False
    overlap_events: bool = True
    direct: bool = True

    def __post_init__(self) -> None:
        files.check_engine(self.engine)
        for name in ("block_size", "queue_depth", "threads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_OPTION:
                raise OptionError(f"{name}={value!r}: expected a whole number from 1 to {MAX_OPTION}")

    @property
    def blocking_threads(self) -> int:
        """Number of threads of an engine whose threads block in system calls: each has one submission in flight."""
        return max(self.threads, min(self.queue_depth, MAX_THREADS))

    def make(self, kind: str) -> Any:
        """A native engine of this kind (or the Python one). Raises `EngineStartError`."""
        workers = self.threads if kind not in ("python", "threads") else self.blocking_threads
        try:
            if kind == "python":
                return fallback.PythonEngine(self.block_size, workers)
            return native.module().Engine(
                kind, self.block_size, self.queue_depth, workers, self.single_submit, self.overlap_events
            )
        except (OSError, RuntimeError, MemoryError) as error:
            # Not an OSError: nothing is wrong with the folder or the file that the engine is made for.
            raise EngineStartError(
                f"the {workers} I/O thread(s) of engine {kind!r} cannot be started: {error}; the process or its user"
                " has reached a limit: raise that of memory (ulimit -v, or a container's), of processes (ulimit -u) or"
                " of open files (ulimit -n), or ask for fewer threads"
            ) from error


def checked_offset(offset: object, tensor: torch.Tensor) -> int:
    """`offset` as an int; raises OptionError if it is not a whole number, or if no file can be that long."""
    try:
        value = operator.index(offset)  # type: ignore[arg-type]
    except TypeError:
        raise OptionError(f"offset={offset!r}: expected a whole number of bytes") from None
    if value < 0:
        raise OptionError(f"offset={value}: expected at least 0")
    if value + tensor.numel() * tensor.element_size() > MAX_OFFSET:
        raise OptionError(f"offset={value}: expected an end of the transfer within {MAX_OFFSET} bytes")
    return value
