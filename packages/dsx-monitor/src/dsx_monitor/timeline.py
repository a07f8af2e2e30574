"""Traces for Chrome/Perfetto: when a rank was computing, gathering, reducing, offloading and waiting.

    timeline = Timeline(rank)
    stop = dsx_comm.observe(timeline)          # every communication, and every wait for one
    with timeline.range("forward"): ...
    store.listen(timeline.transfer)            # every read and write of a store on disk that can be listened to
    timeline.write(run_dir)                    # RUN/trace/rank00000.json
    merge_traces(run_dir)                      # RUN/trace.json: all ranks in one; `dsx report` does it too

A span is kept as four numbers and written out at the end, so that tracing costs a step some microseconds. On an
accelerator a span is a pair of events; one event that is taken together with the host's time converts them to the
host's clock. Spans that overlap in a lane (several gathers under way) are drawn in separate rows. Ranks of one host
share a clock. For several hosts, all ranks call `mark_meeting` right after a barrier, which gives the differences
between their clocks.

Left out: single kernels. torch.profiler records them, and its traces open in the same viewer.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dsx_core import replace_text

from .errors import ReportError
from .processes import accelerator, current_rank

if TYPE_CHECKING:
    from dsx_core.device import Device

__all__ = ["LANES", "Timeline", "merge_traces"]

LANES = ("compute", "host step", "wait", "gather", "reduce", "communication", "device-host", "host-disk")
"""Rows of a rank, from top to bottom."""

_LANE_OF = (
    ("gather", ("all_gather", "allgather", "gather")),
    ("reduce", ("all_reduce", "reduce", "compressed")),
)
TRACE, MERGED = "trace", "trace.json"


class Span(NamedTuple):
    """An activity with its start and end, in nanoseconds since 1970."""

    lane: str
    name: str
    start: int
    end: int
    arguments: dict[str, Any]


class Timeline:
    """Collects spans of one rank; safe to use from several threads.

    Args:
        rank: global rank of this process; None: found as for the monitors.
        device: an accelerator, whose work is timed; on the CPU the host's clock is used.
        limit: the most spans that are kept; later ones are only counted.
    """

    def __init__(self, rank: int | None = None, *, device: Any = "cpu", limit: int = 500_000) -> None:
        self.rank = current_rank() if rank is None else rank
        self._limit, self.dropped = limit, 0
        self._origin = time.time_ns() - time.perf_counter_ns()
        self._raw: list[tuple[str, str, Any, Any, dict[str, Any] | None]] = []
        self._lock = threading.Lock()
        self._waits = 0
        self._meeting: int | None = None
        self._device = accelerator(device)
        self._anchor = self._take_anchor(self._device) if self._device else None

    # - Collecting

    @contextmanager
    def range(self, name: str, lane: str = "compute", *, device: Any = None, **arguments: Any) -> Iterator[None]:
        """Record the context as a span. `device`: give a CPU device to use the host's clock, although the timeline is
        that of a CUDA device.
        """
        start = self._mark(device)
        try:
            yield
        finally:
            self._add(lane, name, start, self._mark(device), arguments)

    def begin(self, call: Any) -> Any:
        """A communication call begins (a method that `dsx_comm.observe` calls)."""
        return self._mark(call.device)

    def end(self, token: Any, call: Any, result: Any, is_async: bool) -> None:
        """The call has returned; an asynchronous one ends when its data have arrived."""
        lane = next((lane for lane, starts in _LANE_OF if call.op.startswith(starts)), "communication")
        arguments = {"bytes": call.message, "sent": call.sent / call.per, "ranks": call.size}

        def arrived(_: Any = None) -> None:
            self._add(lane, call.op, token, self._mark(call.device), arguments)

        if is_async and result is not None:
            _when_done(result, arrived)
        else:
            arrived()

    def transfer(self, op: str, name: str, nbytes: int) -> Callable[[], None]:
        """A transfer to or from disk begins. Call the returned function when the transfer has ended, from any thread.

        The engine gives this method to the stores of its state on disk. It uses the host's clock, also on CUDA, because
        disks do not work in the streams of a device.
        """
        start = time.perf_counter_ns()

        def over() -> None:
            self._add("host-disk", f"{op} {name}", start, time.perf_counter_ns(), {"bytes": nbytes})

        return over

    def begin_wait(self) -> Any:
        """This rank begins to wait for other ranks."""
        with self._lock:
            self._waits += 1
            return self._mark() if self._waits == 1 else None

    def end_wait(self, token: Any) -> None:
        """The wait is over."""
        with self._lock:
            self._waits -= 1
        if token is not None:
            self._add("wait", "wait", token, self._mark(), None)

    def mark_meeting(self) -> None:
        """Note a moment that is the same on all ranks, to compare the clocks of several hosts.

        Call it right after a barrier.
        """
        self._meeting = self._origin + time.perf_counter_ns()

    def _mark(self, device: Any = None) -> Any:
        if self._device is None or (device is not None and device.type != self._device.kind):
            return time.perf_counter_ns()
        return self._device.mark()

    def _add(self, lane: str, name: str, start: Any, end: Any, arguments: dict[str, Any] | None) -> None:
        if len(self._raw) < self._limit:
            self._raw.append((lane, name, start, end, arguments))
        else:
            self.dropped += 1

    def _take_anchor(self, device: Device) -> tuple[Any, int]:
        event = device.mark()
        event.synchronize()
        return event, time.perf_counter_ns()

    # - Reading

    def spans(self) -> list[Span]:
        """All spans so far, sorted by start; waits for the device."""
        found = [
            Span(lane, name, self._moment(start), self._moment(end), arguments or {})
            for lane, name, start, end, arguments in list(self._raw)
        ]
        return sorted(found, key=lambda span: (span.start, -span.end))

    def _moment(self, mark: Any) -> int:
        if isinstance(mark, int):
            return self._origin + mark
        event, at = self._anchor  # type: ignore[misc]
        mark.synchronize()
        return self._origin + at + int(event.elapsed_time(mark) * 1e6)

    def write(self, run_dir: str | os.PathLike[str]) -> Path:
        """Write this rank's trace into the run directory; opens in chrome://tracing and ui.perfetto.dev.

        Returns the file.
        """
        folder = Path(run_dir) / TRACE
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{self.rank:05d}.json"
        about = {"rank": self.rank, "host": platform.node(), "meeting": self._meeting, "dropped": self.dropped}
        content = {"traceEvents": _events(self.rank, self.spans()), "displayTimeUnit": "ms", "otherData": about}
        replace_text(path, json.dumps(content), durable=False)
        return path


def merge_traces(run_dir: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Put the traces of all ranks into one file. The times of other hosts are shifted to the clock of rank 0.

    Args:
        run_dir: the folder that `Timeline.write` was given.
        out: file to write; None: `trace.json` in the run directory.

    Returns:
        The file written.

    Raises:
        ReportError: there are no traces, or one cannot be read.
    """
    paths = sorted((Path(run_dir) / TRACE).glob("rank*.json"))
    if not paths:
        raise ReportError(
            f"merge_traces: got no {TRACE}/rank*.json in {run_dir}, expected what Timeline.write leaves there"
        )
    parts = [_read(path) for path in paths]
    first = parts[0]["otherData"]
    events: list[dict[str, Any]] = []
    for part in parts:
        shift = _shift(first, part["otherData"]) / 1e3
        events += [{**event, "ts": event["ts"] + shift} if "ts" in event else event for event in part["traceEvents"]]
    target = Path(out) if out is not None else Path(run_dir) / MERGED
    target.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    return target


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        _ = content["traceEvents"], content["otherData"]["host"]
        return content
    except (ValueError, KeyError, TypeError) as error:
        raise ReportError(f"merge_traces: {path} is no trace of Timeline.write: {error!r}") from None


def _shift(first: dict[str, Any], other: dict[str, Any]) -> int:
    """Nanoseconds to add to the other rank's times."""
    if other["host"] == first["host"] or first["meeting"] is None or other["meeting"] is None:
        return 0
    return first["meeting"] - other["meeting"]


def _events(rank: int, spans: Iterable[Span]) -> list[dict[str, Any]]:
    """Spans in the Trace Event Format: complete events in microseconds; process = rank, thread = row."""
    rows: dict[str, list[int]] = {}  # by lane: the time at which each of its rows is free again
    names: dict[int, str] = {}
    events: list[dict[str, Any]] = []
    for span in spans:
        row = _free_row(rows.setdefault(span.lane, []), span)
        place = LANES.index(span.lane) if span.lane in LANES else len(LANES)
        thread = place * 1000 + row
        names[thread] = span.lane if row == 0 else f"{span.lane} {row + 1}"
        event = {"ph": "X", "cat": span.lane, "name": span.name, "pid": rank, "tid": thread, "ts": span.start / 1e3}
        events.append({**event, "dur": (span.end - span.start) / 1e3, "args": span.arguments})
    head = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}]
    head.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
    for thread, name in sorted(names.items()):
        head.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}})
        head.append(
            {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": {"sort_index": thread}}
        )
    return head + events


def _free_row(ends: list[int], span: Span) -> int:
    """The first row that is free when the span starts. Spans of the lane "compute" are nested and share one row."""
    if span.lane == "compute":
        return 0
    for row, end in enumerate(ends):
        if end <= span.start:
            ends[row] = span.end
            return row
    ends.append(span.end)
    return len(ends) - 1


def _when_done(result: Any, callback: Any) -> None:
    """Call `callback` when the handles of an asynchronous call have completed; at once if a handle cannot tell."""
    works = [work for work in (result if isinstance(result, (list, tuple)) else [result]) if work is not None]
    left, lock = [len(works)], threading.Lock()

    def arrived(_: Any = None) -> None:
        with lock:
            left[0] -= 1
            last = left[0] == 0
        if last:
            callback()

    if not works:
        callback()
    for work in works:
        if hasattr(work, "on_arrival"):
            work.on_arrival(arrived)
            continue
        try:
            future = work.get_future()
        except (RuntimeError, AttributeError):
            arrived()
        else:
            future.then(arrived)
