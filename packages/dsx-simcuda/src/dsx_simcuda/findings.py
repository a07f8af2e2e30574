"""What the simulated device has to tell: reports of mistakes, and the waits of the host."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from . import frames, native
from .frames import Frame


@dataclass(frozen=True)
class Report:
    """One mistake. `stack` is where the later operation was launched, `earlier_stack` the other one's place."""

    kind: str
    text: str
    fix: str = ""
    stack: tuple[Frame, ...] = ()
    earlier_stack: tuple[Frame, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON holds it."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"simcuda: {self.kind}: {self.text}"]
        lines += [f"    {frame}" for frame in frames.users_first(self.stack)[:6]]
        return "\n".join(lines)


class HostSync(NamedTuple):
    """A wait of the host for the device: what waited, and the user's line."""

    what: str
    where: str


@dataclass
class Seen:
    """What happened inside a `watch` block."""

    reports: list[Report] = field(default_factory=list)
    host_syncs: Counter[HostSync] = field(default_factory=Counter)


_reports: list[Report] = []
_syncs: Counter[HostSync] = Counter()


def reports() -> list[Report]:
    """All reports so far, oldest first."""
    return list(_reports)


def host_syncs() -> Counter[HostSync]:
    """How often the host has waited for the device so far, by what waited and at which line of the user.

    `.total()` is the number of waits. The waits of a part are a difference: `host_syncs() - before`.
    """
    return Counter(_syncs)


@contextmanager
def watch() -> Iterator[Seen]:
    """Collects the reports and host waits of a block; they are filled in at its end."""
    seen, start, before = Seen(), len(_reports), host_syncs()
    try:
        yield seen
    finally:
        seen.reports = _reports[start:]
        seen.host_syncs = host_syncs() - before


def _listen(kind_bytes: bytes, text_bytes: bytes) -> None:
    kind, text = kind_bytes.decode(), text_bytes.decode()
    stack = frames.current()
    if kind == "sync":
        _syncs[HostSync(text, frames.where(stack))] += 1
        return
    report = Report(kind, text, stack=stack)
    _reports.append(report)
    sys.stderr.write(f"{report}\n")
    sys.stderr.flush()


def write(folder: str | Path) -> Path:
    """Writes all reports of this process into the folder as JSON; returns the file."""
    target = Path(folder) / f"simcuda-{os.environ.get('RANK', '0')}-{os.getpid()}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps([report.as_dict() for report in _reports], indent=1))
    return target


_keep: list[Any] = []


def install() -> None:
    """Lets the native library tell this module."""
    import ctypes

    listener = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(_listen)
    _keep.append(listener)
    native.lib.sim_listen(listener)
