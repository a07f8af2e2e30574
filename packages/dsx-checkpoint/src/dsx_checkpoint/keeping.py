"""Removes older checkpoints after a new one was saved.

A checkpoint loses its name at once, and its files behind the caller: the next save of this process waits for that, and
the process does not end before.

Only checkpoints that were saved with `save_latest=True` are removed: one saved with `save_latest=False` (the best so
far, a release) always stays, and so do the new checkpoint, folders of other programs, and folders that cannot be read.
A checkpoint is first renamed to the name of an unfinished one. So if the process is killed during the removal, no load
can find the rest, and the next save removes it. That save may be another job's, so a file may be gone already.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointArgumentError, CheckpointError
from .files import read_text
from .folder import tags_in, temporary_name
from .format import INDEX_NAME
from .parsing import parse_index

logger = logging.getLogger("dsx.checkpoint")

__all__ = ["Keeping", "removable", "updates_of"]

_MOST_SHARING = 4
_ATTEMPTS = 100  # to remove a folder that another process removes at the same time


@dataclass(frozen=True)
class Keeping:
    """The number of checkpoints that stay.

    Attributes:
        last: this many of the newest, the new one included; None: all.
        every: also keep those whose number of updates is a multiple of this; None: no others.
    """

    last: int | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.last), ("keep_every", self.every)):
            if value is not None and (type(value) is not int or value < 1):
                raise CheckpointArgumentError(f"{name}: got {value!r}, expected a whole number of 1 or more, or None")

    @property
    def most_sharing(self) -> int:
        """The number of checkpoints that may share an unchanging file. Where several are kept, at least two files of
        their own are among them; where one is kept, it is shared with the one that is removed.
        """
        return 2 if self.last == 1 else _MOST_SHARING if self.last is None else min(_MOST_SHARING, self.last - 1)

    def remove_others(self, newest: Path) -> list[str]:
        """Take their names from checkpoints that need not be kept after `newest` was committed, and remove them behind
        the caller (`wait`). An error is only logged as a warning, because the new checkpoint exists in any case.

        Returns:
            Their tags.
        """
        removed, doomed = [], []
        for tag in removable(newest.parent, self, newest.name):
            folder = newest.with_name(temporary_name(tag, uuid.uuid4().hex[:12]))
            try:
                os.rename(newest.with_name(tag), folder)
            except OSError as error:
                logger.warning("%s: cannot be removed (%s)", newest.with_name(tag), error)
                continue
            removed.append(tag)
            doomed.append(folder)
        if removed:
            logger.info("%s: removed the checkpoints %s", newest.parent, ", ".join(removed))
            _REMOVALS.begin(doomed)
        return removed

    @staticmethod
    def wait() -> None:
        """Wait until the files of all checkpoints that were removed are gone."""
        _REMOVALS.wait()


class _Removals:
    """Removes folders on threads, which the interpreter waits for when it ends."""

    def __init__(self) -> None:
        self._running: list[threading.Thread] = []

    def begin(self, folders: Sequence[Path]) -> None:
        """Remove these folders."""
        thread = threading.Thread(target=_remove, args=(folders,), name="dsx-checkpoint-removal")
        thread.start()
        self._running = [*(other for other in self._running if other.is_alive()), thread]

    def wait(self) -> None:
        """Until all are gone."""
        for thread in self._running:
            if thread is not threading.current_thread():
                thread.join()
        self._running = []


_REMOVALS = _Removals()


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        for attempt in range(_ATTEMPTS):
            try:
                shutil.rmtree(folder)
                break
            except FileNotFoundError:  # a save of another job clears it away at the same time
                if not os.path.lexists(folder):
                    break
                logger.debug("%s: attempt %d", folder, attempt)
            except OSError as error:
                logger.warning("%s: cannot be removed (%s)", folder, error)
                break


def removable(root: Path, keeping: Keeping, newest: str) -> list[str]:
    """Tags of the checkpoints that `keeping` does not keep, oldest first."""
    if keeping.last is None:
        return []
    found: list[tuple[int, str, int | None]] = []
    for tag in tags_in(root):
        path = root / tag / INDEX_NAME
        if tag == newest:
            continue
        try:
            status = path.stat()
            latest, updates = _facts(str(path), status.st_mtime_ns, status.st_size)
        except (CheckpointError, OSError) as error:
            logger.debug("%s: left alone: %s", path, error)
            continue
        if latest:
            found.append((status.st_mtime_ns, tag, updates))
    found.sort()
    old = found[: max(0, len(found) - (keeping.last - 1))]
    return [tag for _, tag, updates in old if not (keeping.every and updates and updates % keeping.every == 0)]


@functools.lru_cache(maxsize=256)
def _facts(path: str, written: int, size: int) -> tuple[bool, int | None]:
    """Whether an index belongs to a checkpoint that `latest` was to name, and its number of updates. An index that has
    not changed is read once: that of a large model has many megabytes.
    """
    index = parse_index(read_text(Path(path)), path)
    return index.latest, updates_of(index.state)


def updates_of(state: object) -> int | None:
    """The number of updates in an encoded state; None if no engine wrote the state."""
    for key in ("engine", "counters", "global_steps"):
        state = state.get(key) if isinstance(state, dict) else None
    return state if isinstance(state, int) else None
