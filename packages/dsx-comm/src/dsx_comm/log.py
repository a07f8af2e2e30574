"""The communication log: number, sizes, times and bandwidths of calls, and which rank the others wait for.

    dsx_comm.configure(enabled=True)
    ... training ...
    dsx_comm.log_summary(show_straggler=True)      # every rank calls it, rank 0 prints

Each call is timed by itself. The log does not make any call wait: an asynchronous call is timed from issue to its
completion, which a callback or a waiting thread notices; on an accelerator both ends are events, which are read when
the device has passed them, or in `log_summary`, which waits. Calls that are captured into a graph are not recorded.
On the host an asynchronous call that is polled or waited for late is still timed to the moment its data had arrived.

The latency of a synchronous call includes the wait for the slowest rank; `show_straggler` separates the two. The last
`SAMPLES` latencies per operation and size are kept for the trimmed mean; counts and totals are exact.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsx_core.device import Device, Mark

from .bandwidth import gbps, size_text, trimmed_mean
from .calls import OBSERVERS, Call
from .config import CommsLoggerConfig
from .errors import CommConfigError
from .works import notify

logger = logging.getLogger(__name__)

SAMPLES = 4096
_UNREAD = 256  # calls on accelerators whose events are kept before those that have passed are read


@dataclass
class Entry:
    """All calls of one name, message size and group size."""

    op: str
    size: int
    count: int = 0
    total_ms: float = 0.0
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def add(self, latency_ms: float) -> None:
        """Add one call."""
        self.count += 1
        self.total_ms += latency_ms
        self.samples.append(latency_ms)


Key = tuple[str, int, int]  # name, message bytes, group size


@dataclass
class _Started:
    """A call under way: its name, the device that times it, and when it began on that device."""

    key: Key
    op: str
    device: Device
    at: Mark


class CommsLogger:
    """Observer that records the calls its configuration selects."""

    def __init__(self) -> None:
        self.config = CommsLoggerConfig()
        self._entries: dict[Key, Entry] = {}
        self._unread: list[tuple[_Started, Mark]] = []  # calls on accelerators whose events are not read yet
        self._read_at = _UNREAD  # so many of them lead to a look at which have passed
        self._lock = threading.Lock()
        self._pending = 0

    def use(self, config: CommsLoggerConfig) -> None:
        """Switch to another configuration; what was recorded stays."""
        self.config = config
        OBSERVERS.remove(self)
        if config.enabled:
            OBSERVERS.add(self)

    def begin(self, call: Call) -> _Started | None:
        """Start the clock of a call (observer interface)."""
        config, labels = self.config, call.labels
        name = labels.get("log_name", call.op)
        if not (config.prof_all or labels.get("prof", False) or {name, call.op} & set(config.prof_ops)):
            return None
        if config.debug:
            name = f"{name} | [Caller Func: {labels.get('debug') or _caller()}]"
        device = Device.of(call.device)
        if device.is_capturing():
            return None
        self._read_passed()
        return _Started((name, call.message, call.size), call.op, device, device.mark())

    def end(self, token: _Started, call: Call, result: Any, is_async: bool) -> None:
        """Stop the clock, or arrange for it to be stopped (observer interface)."""
        if not is_async:
            self._stop(token)
            return
        with self._lock:
            self._pending += 1

        def arrived() -> None:
            self._stop(token)
            with self._lock:
                self._pending -= 1

        notify(result if isinstance(result, list) else [result], arrived)

    def _stop(self, token: _Started) -> None:
        end = token.device.mark()
        if not token.device.is_accelerator:
            self._record(token, token.device.milliseconds(token.at, end))
            return
        with self._lock:
            self._unread.append((token, end))

    def _read_passed(self) -> None:
        """Read the events that have passed, once there are many. Nobody waits.

        The limit follows what is under way, so that a device far behind does not have all events asked at each call.
        """
        if len(self._unread) < self._read_at:
            return
        with self._lock:
            known, self._unread = self._unread, []
        passed = [token.device.passed(end) for token, end in known]
        under_way = [one for one, is_past in zip(known, passed) if not is_past]
        with self._lock:
            self._unread = under_way + self._unread
            self._read_at = max(_UNREAD, 2 * len(self._unread))
        self._read([one for one, is_past in zip(known, passed) if is_past])

    def _read(self, calls: list[tuple[_Started, Mark]]) -> None:
        for token, end in calls:
            self._record(token, token.device.milliseconds(token.at, end))

    def _record(self, token: _Started, latency_ms: float) -> None:
        name, message, size = token.key
        with self._lock:
            self._entries.setdefault(token.key, Entry(token.op, size)).add(latency_ms)
        if self.config.verbose:
            algorithm, bus = gbps(token.op, message, latency_ms, size)
            logger.info(
                "comm op: %s | time (ms): %.2f | msg size: %s | algbw (Gbps): %.2f | busbw (Gbps): %.2f",
                name, latency_ms, size_text(message), algorithm, bus,
            )  # fmt: skip

    def entries(self) -> dict[Key, Entry]:
        """All entries recorded so far, events of accelerators read (which waits for them)."""
        with self._lock:
            unread, self._unread = self._unread, []
        self._read(unread)
        with self._lock:
            return dict(self._entries)

    def pending(self) -> int:
        """Asynchronous calls that have not completed yet."""
        with self._lock:
            return self._pending

    def reset(self) -> None:
        """Forget everything recorded."""
        with self._lock:
            self._entries.clear()
            self._unread.clear()


def _caller() -> str:
    """The first function on the stack that is not of this package."""
    frame = sys._getframe(1)
    package = __name__.rpartition(".")[0] + "."
    while frame.f_back is not None and (frame.f_globals.get("__name__", "") + ".").startswith(package):
        frame = frame.f_back
    return frame.f_code.co_name


LOG = CommsLogger()


def configure(
    config: Any = None,
    *,
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Set up the communication log.

    Args:
        config: a `CommsLoggerConfig`, a section as a dict, a whole configuration with a `comms_logger` key or
            attribute.
        deepspeed_config: the same under DeepSpeed's name.
        enabled, prof_all, prof_ops, verbose, debug: override single values. `enabled` means what it says.

    Raises:
        CommConfigError: an unknown key or a wrong value.
    """
    given = config if config is not None else deepspeed_config
    section = LOG.config if given is None else _section(given)
    changes = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    LOG.use(dataclasses.replace(section, **{k: v for k, v in changes.items() if v is not None}))


def _section(given: Any) -> CommsLoggerConfig:
    if isinstance(given, CommsLoggerConfig):
        return given
    if isinstance(given, Mapping):
        # a section, even one with a misspelt key; else a whole configuration, which may have none
        inner = given.get("comms_logger", given if not _KEYS.isdisjoint(given) else {})
        return inner if isinstance(inner, CommsLoggerConfig) else CommsLoggerConfig.from_dict(inner)
    inner = getattr(given, "comms_logger", given)
    if isinstance(inner, Mapping):
        return CommsLoggerConfig.from_dict(inner)
    values = {name: getattr(inner, name) for name in _KEYS if hasattr(inner, name)}
    if set(values) != _KEYS:
        raise CommConfigError("comms_logger", f"got {type(given).__name__}, expected a dict or a CommsLoggerConfig")
    return CommsLoggerConfig.from_dict(values)


_KEYS = {f.name for f in dataclasses.fields(CommsLoggerConfig)}


def reset_log() -> None:
    """Forget everything the log has recorded."""
    LOG.reset()


def has_comm_data() -> bool:
    """True if the log has recorded anything."""
    return bool(LOG.entries())


def get_comm_operation_count(op: str | None = None) -> int:
    """Number of recorded calls, of one name or of all."""
    return sum(e.count for (name, _, _), e in LOG.entries().items() if op in (None, name))


def get_logged_comm_ops() -> list[str]:
    """Names that were recorded, in the order of first use."""
    return list(dict.fromkeys(name for name, _, _ in LOG.entries()))


__all__ = [
    "LOG",
    "CommsLogger",
    "Entry",
    "configure",
    "gbps",
    "get_comm_operation_count",
    "get_logged_comm_ops",
    "has_comm_data",
    "reset_log",
    "trimmed_mean",
]
