"""Findings of the simulated device: reports of mistakes, and the waits of the host."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from . import advice, frames, native
from .frames import Frame
from .operation import Operation

PRINTED_AT_MOST = 20
"""So many reports are printed when they are found; all are kept."""


@dataclass(frozen=True)
class Report:
    """One mistake: its kind, a sentence, the way to mend it, and the two operations where there are two.

    Kinds: "read before write", "write after read", "write after write", "freed while in use", "host access too early",
    "wrong device's stream", "collectives in different order", "collectives not ordered", "rank
    lost", "misuse".
    """

    kind: str
    text: str
    fix: str
    later: Operation | None = None
    earlier: Operation | None = None
    tensor: str = ""
    address: int = 0

    @property
    def stack(self) -> tuple[Frame, ...]:
        """The stack of the later operation."""
        return self.later.stack if self.later else ()

    @property
    def earlier_stack(self) -> tuple[Frame, ...]:
        """The stack of the earlier operation."""
        return self.earlier.stack if self.earlier else ()

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON holds it."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"simcuda: {self.kind}: {self.text}"]
        for title, operation in (("", self.later), ("earlier: ", self.earlier)):
            if operation is None:
                continue
            on = f" on {operation.stream}" if operation.stream else ""
            lines.append(f"  {title}{operation.name}{on}, at {operation.where}")
            lines += [f"      {frame}" for frame in frames.users_first(operation.stack)[1:4]]
        if self.tensor:
            lines.append(f"  memory: {self.tensor}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class HostSync(NamedTuple):
    """A wait of the host for the device: what waited, the user's line, and the name of the thread that waited.

    A thread that Python did not start has the system's name: backward's, for example, is "pt_autograd_0".
    """

    what: str
    where: str
    thread: str


@dataclass
class Seen:
    """The findings inside a `watch` block."""

    reports: list[Report] = field(default_factory=list)
    host_syncs: Counter[HostSync] = field(default_factory=Counter)


_reports: list[Report] = []
_printed_to: list[object] = []
"""For each report that was printed, what stderr was then."""


def _stderr() -> object:
    """Tells one stderr from another: pytest, for example, puts a file of its own there while a test runs."""
    try:
        found = os.fstat(2)
    except OSError:
        return None
    return id(sys.stderr), found.st_dev, found.st_ino


def printed_elsewhere() -> list[Report]:
    """Reports that were printed while stderr was another one than now, so that the user may not have seen them."""
    now = _stderr()
    return [report for report, then in zip(_reports, _printed_to) if then != now]


def stack_of(number: int) -> tuple[Frame, ...]:
    """A stack of the native library, without this package's frames."""
    return tuple(Frame(*item) for item in native.stack(number) if not frames.is_ours(item[0]))


def _operation(launch: dict[str, Any] | None, streams: dict[int, str]) -> Operation | None:
    if launch is None:
        return None
    place = launch["place"]
    stack = stack_of(place["stack"]) or stack_of(place["forward"])
    return Operation(launch["name"], streams[launch["stream"]], stack, place["backward"], launch["id"])


def stream_names() -> dict[int, str]:
    """The name of every stream, by the library's number."""
    names = {}
    for stream in native.read("sim_streams"):
        where = frames.where(stack_of(stream["made_at"])) if stream["made_at"] else ""
        device = f"cuda:{stream['device']}"
        if stream["name"]:
            names[stream["number"]] = f"stream {stream['name']!r} ({device})"
        elif stream["id"] == 0:
            names[stream["number"]] = f"the default stream of {device}"
        else:
            made = f", made at {where}" if where else ""
            names[stream["number"]] = f"stream {stream['id']} ({device}{made})"
    return names


def _report(raw: dict[str, Any], streams: dict[int, str], tensor: str) -> Report:
    later, earlier = _operation(raw["later"], streams), _operation(raw["earlier"], streams)
    if later is None:  # the host itself, or a collective
        place = raw["place"]
        stack = stack_of(place["stack"]) or stack_of(place["forward"])
        later = Operation(raw["text"], "", stack, place["backward"])
    kind = "wrong device's stream" if raw["wrong_device"] else raw["kind"]
    text = raw["text"] if earlier is None else advice.sentence(raw["kind"], later, earlier)
    if raw["block_bytes"]:
        tensor = f"{tensor or 'a tensor'} in a block of {raw['block_bytes']} bytes on cuda:{raw['device']}"
    fix = advice.fix(kind, raw["kind"], later, earlier)
    return Report(kind, text, fix, later, earlier, tensor, raw["address"])


def _collect() -> None:
    """Takes over what the library has found since the last time, and prints it."""
    if native.lib is None or native.lib.sim_report_count() <= len(_reports):
        return
    raw = native.read("sim_reports", len(_reports))
    streams = stream_names()
    for item in raw:
        report = _report(item, streams, advice.tensor_name(item["address"]))
        _reports.append(report)
        if len(_reports) <= PRINTED_AT_MOST:
            _printed_to.append(_stderr())
            sys.stderr.write(f"{report}\n")
        elif len(_reports) == PRINTED_AT_MOST + 1:
            sys.stderr.write("simcuda: more reports are kept, and not printed\n")
    sys.stderr.flush()


def reports() -> list[Report]:
    """All reports so far, oldest first."""
    _collect()
    return list(_reports)


def host_syncs() -> Counter[HostSync]:
    """The host's waits for the device so far, counted by the call that waited, the line of the user and the thread.

    `.total()` is the number of waits. The waits of a part are a difference: `host_syncs() - before`.
    """
    found: Counter[HostSync] = Counter()
    if native.lib is not None:
        for what, stack, thread, times in native.read("sim_host_syncs"):
            found[HostSync(what, frames.where(stack_of(stack)), thread)] += times
    return found


@contextmanager
def watch() -> Iterator[Seen]:
    """Collects the reports and host waits of a block; they are filled in at its end."""
    seen, start, before = Seen(), len(reports()), host_syncs()
    try:
        yield seen
    finally:
        seen.reports = reports()[start:]
        seen.host_syncs = host_syncs() - before


_keep: list[Any] = []


def install() -> None:
    """Lets the native library tell this module when it has found something."""
    listener = ctypes.CFUNCTYPE(None)(_collect)
    _keep.append(listener)
    native.lib.sim_listen(listener)
