"""The hang explainer: says which ranks are missing from a collective, and what every rank is doing instead.

It is on by default.

Each rank notes which communication calls it has issued, per group, and where its threads wait (two dictionary writes a
call). A thread looks every few seconds. When a call of this rank has waited longer than the limit, it raises an alarm
in the job's store. Every rank, even one that waits for nothing, answers with what it is doing: the call it is in or the
last one it issued, its number in the group, the place in the code. The rank that raised the alarm makes a text of the
answers, prints it and leaves it for the others: four requests of each rank, whatever the number of ranks. (Where that
rank is gone, another one takes its place.) The waiting calls fail with the text. On "dsx" groups they fail at once; on
gloo when their wait ends, shortly after the limit.

For calls on a device the host does not wait, and must not be made to wait: torch blocks it in a wait with a timeout.
There the thread looks at one unfinished call of each group at a time (`follow`). The report is printed; the backend's
own watchdog ends the call at the group's time limit.

The limit is nine tenths of the time limit of the group that waits (9 minutes where that is 10); a first report that
stops nothing is printed after a minute. `explain_hangs` sets both for all groups. Not seen: calls on a device that this
package did not issue.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .departures import Departures
from .device_works import completion
from .errors import CommArgumentError, CommError, HangError, PeerLostError
from .hang_notes import DEFAULT_LIMIT, GroupLog, Waiting
from .hang_report import explain, missing_ranks, place_of
from .hang_store import answer, answers, collect, connected, publish, published

logger = logging.getLogger(__name__)

DEFAULT_NOTICE = 60.0
SHARE = 0.9  # of a group's time limit
GRACE = 3.0  # seconds between the alarm and the end of waits, beside the periods in which all look: time for a report
_SECOND_CHANCE = 0.7  # seconds for ranks that look late, on a busy host; below 1, when others take the report over
_MOST_PERIOD, _LEAST_PERIOD = 5.0, 0.1  # seconds between looks


@dataclass
class _Settings:
    limit: float | None = None  # None: a share of each group's own
    notice: float = DEFAULT_NOTICE


@dataclass
class _State:
    groups: WeakKeyDictionary[Any, GroupLog] = field(default_factory=WeakKeyDictionary)
    logs: dict[str, GroupLog] = field(default_factory=dict)  # the same by name
    waiting: dict[int, Waiting] = field(default_factory=dict)  # by thread
    in_flight: dict[str, Waiting] = field(default_factory=dict)  # by group: the call on a device that is looked at
    answered: int = 0  # alarms seen
    world: Any = None
    stopped: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # groups that a hang has ended
    prefix: str = ""  # of this world's alarms in the store
    departures: Departures = field(default_factory=Departures)


class _Label(threading.local):
    value = ""


class Watch:
    """This process' notes, and the thread that looks at them."""

    def __init__(self) -> None:
        self.settings = _Settings()
        self._state = _State()
        self._labels = _Label()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._answer = 2 * _MOST_PERIOD + GRACE  # seconds from a limit to the report; known once, as waits are many

    # - notes, on the way of every call

    def log_of(self, group: Any) -> GroupLog:
        """The log of the calls that were issued in `group`; made at the first call."""
        log = self._state.groups.get(group)
        if log is None:
            log = GroupLog(group.group_name, SHARE * _time_limit(group))
            self._state.groups[group] = self._state.logs[log.name] = log
        return log

    def enter(
        self,
        group: Any,
        op: str,
        message: int | None = None,
        label: str = "",
        *,
        abort: Any = None,
        timeout: float | None = None,
        on_device: bool = False,
    ) -> Waiting:
        """This thread issues a call and may wait. `timeout`: the call's time limit in seconds; None: its group's."""
        if self._thread is None:
            self.arm()
        log = self._state.groups.get(group) or self.log_of(group)
        log.issued += 1
        log.op, log.message = op, message
        limit = self.settings.limit
        if limit is None:
            limit = log.limit if timeout is None else SHARE * timeout
        thread = threading.get_ident()
        label = label or self._labels.value
        note = Waiting(log, log.issued, op, message, label, thread, time.monotonic(), limit, abort, on_device)
        self._state.waiting[thread] = note
        return note

    def resume(self, note: Waiting, works: Sequence[Any] = (), timeout: timedelta | None = None) -> timedelta | None:
        """The thread waits for the works of a call that was issued before, or goes on to wait for the one it is in.

        Args:
            note: of the call.
            works: the backend's.
            timeout: what the caller allows; None: no limit of its own.

        Returns:
            The limit that the wait has to be given. On a device it is the caller's: ProcessGroupNCCL blocks the host
            until the work is done if it is given a timeout, so the explainer's thread looks at the works instead. On
            the host a wait without a limit ends when the explanation of a hang is there.
        """
        thread = threading.get_ident()
        if self._state.waiting.get(thread) is not note:
            note.thread, note.since = thread, time.monotonic()
            self._state.waiting[thread] = note
        if note.on_device:
            if works:
                self.follow(note, works)
        elif timeout is None and note.limit:
            return timedelta(seconds=note.limit + self._answer)
        return timeout

    def leave(self, note: Waiting) -> None:
        """The thread is through; others may still wait for the same call."""
        self._state.waiting.pop(threading.get_ident(), None)

    def current(self) -> Waiting | None:
        """The call that this thread is in."""
        return self._state.waiting.get(threading.get_ident())

    def follow(self, note: Waiting, works: Sequence[Any]) -> None:
        """Look at a call on a device until it is done. One of each group is enough: those behind it are done later."""
        if note.log.name not in self._state.in_flight and self._thread is not None:
            note.is_done = completion(works)
            if note.is_done is not None:
                self._state.in_flight[note.log.name] = note

    def label(self) -> str:
        """The innermost `unit` of this thread."""
        return self._labels.value

    @contextlib.contextmanager
    def unit(self, name: str) -> Iterator[None]:
        """Communication inside the block is on behalf of `name`."""
        before = self.label()
        self._labels.value = name
        try:
            yield
        finally:
            self._labels.value = before

    def verdict(self, note: Waiting, error: BaseException) -> BaseException:
        """The error to raise for `error`: the explanation of a hang, or who has left the job, if that is known."""
        if isinstance(error, CommError) and not isinstance(error, (HangError, PeerLostError)):
            return HangError(note.failed) if note.failed else error
        text, ranks = self._state.stopped.get(note.log.name, (note.failed, ()))
        if text or isinstance(error, HangError):
            # The missing rank, too, fails in its next call: it must not blame the rank that has stopped to wait for it.
            return HangError(text or str(error), ranks)
        left = self._state.departures.of_group(note.log.name)
        if not left:
            return error
        said = "; ".join(f"rank {rank} has left the job: {why}" for rank, why in left.items())
        return PeerLostError(
            f"{error.args[0]}\n{said}" if isinstance(error, PeerLostError) else f"{note.what}: {said}\n({error})"
        )

    # - the thread

    def arm(self) -> None:
        """Start to look, unless the thread runs: a rank that has made no call yet can say where it is, too.

        Raises:
            CommError: the thread cannot be started.
        """
        if self._thread is not None or self.settings.limit == 0:
            return
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self._state.world = dist.group.WORLD
        self._wake = threading.Event()
        thread = threading.Thread(target=self._run, args=(self._wake,), daemon=True, name="dsx-comm-watch")
        try:
            thread.start()
        except RuntimeError as error:
            raise CommError(
                f"the thread that explains hangs cannot be started ({error}); raise the limit of threads or of memory "
                "(ulimit -u, ulimit -v, pids.max), or call dsx_comm.explain_hangs(limit=0) first, which does without it"
            ) from error
        self._thread = thread
        self._answer = 2 * self._period() + GRACE

    def rest(self) -> None:
        """End the thread (the process group goes away, or the process); the next call starts it again."""
        self._state.departures.announce()
        self._stop()
        self._state = _State()

    def forked(self) -> None:
        """This is a child of the process: it has its parent's notes, but not its thread (which may hold a lock)."""
        self._thread, self._wake = None, threading.Event()
        self._state = _State()

    def poke(self) -> None:
        """Settings have changed: start over."""
        self._stop()

    def _stop(self) -> None:
        # Wait for it: a thread that returns from the store's C++ code into an interpreter that is ending takes the
        # process down with SIGABRT. One that the store does not answer does not return either, and is left alone.
        self._wake.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(GRACE)

    def _run(self, stop: threading.Event) -> None:
        state, period = self._state, self._period()
        store: Any = None
        while True:
            try:
                if store is None:
                    store = connected(state)
                else:
                    self._look(store, state, period, stop)
            except Exception as error:  # noqa: BLE001 - whatever it is, later hangs have to be explained too
                if not answers(store):
                    return  # the store is gone: the job is ending
                logger.debug("the hang explainer could not look this time: %r", error)
            if stop.wait(period) or not dist.is_initialized() or dist.group.WORLD is not state.world:
                return

    def _period(self) -> float:
        """Seconds between looks."""
        limit, notice = self.settings.limit, self.settings.notice
        return min(_MOST_PERIOD, max(_LEAST_PERIOD, (notice if limit is None else min(limit, notice)) / 10))

    def _look(self, store: Any, state: _State, period: float, stop: threading.Event) -> None:
        alarm = f"alarm/{state.answered}"
        now = time.monotonic()
        waiting = list(state.waiting.values()) + _unfinished(state)
        over = [w for w in waiting if now - w.since > w.limit]
        worst = min(over or waiting, key=lambda w: w.since, default=None)
        waited = now - worst.since if worst is not None else 0.0
        final = bool(over)
        stage = 2 if final else 1 if waited > self.settings.notice else 0
        if worst is not None and stage > worst.told:
            mine = {
                "group": worst.log.name,
                "what": worst.what,
                "number": worst.number,
                "waited": waited,
                "final": final,
                "by": dist.get_rank(),
            }
            store.compare_set(alarm, "", json.dumps(mine))
            worst.told = stage
        if not store.check([alarm]):
            return
        raised = json.loads(store.get(alarm))
        answer(store, alarm, dist.get_rank(), self._describe(state, raised))
        state.answered += 1
        report = self._report(store, alarm, raised, period, stop)
        if report is not None and raised["final"]:
            state.stopped[raised["group"]] = report
            _fail([note for note in list(state.waiting.values()) if note.log.name == raised["group"]], report[0])

    def _report(
        self, store: Any, alarm: str, raised: dict[str, Any], period: float, stop: threading.Event
    ) -> tuple[str, tuple[int, ...]] | None:
        """The text of an alarm and the missing ranks: made by the rank that raised it, once all have had the time to
        look and answer. None: there is no report, as the process ends.
        """
        makes = raised["by"] == dist.get_rank()
        stop.wait(period + (0.3 if makes else 0.4))
        while not makes:
            report = published(store, alarm)
            if report is not None or stop.is_set():
                return report
            stop.wait(1.0)
            # who raised the alarm may have ended
            makes = published(store, alarm) is None and store.add(f"{alarm}/makes", 1) == 1
        told, size = collect(store, alarm), dist.get_world_size() if dist.is_initialized() else 0
        if len(told) < size and not stop.is_set():
            stop.wait(_SECOND_CHANCE)
            told = collect(store, alarm)
        text = explain(raised, told, size)
        missing = tuple(missing_ranks(raised, told))
        publish(store, alarm, text, missing)
        print(text, file=sys.stderr, flush=True)  # noqa: T201  (the point of the exercise)
        return text, missing

    def _describe(self, state: _State, raised: dict[str, Any]) -> dict[str, Any]:
        log = state.logs.get(raised["group"], GroupLog(raised["group"]))
        waiting = [*state.waiting.values(), *state.in_flight.values()]
        here = next((w for w in waiting if w.log.name == raised["group"]), None) or next(iter(waiting), None)
        thread = here.thread if here is not None else threading.main_thread().ident
        return {
            "issued": log.issued,
            "last": log.what,
            "member": raised["group"] in _my_groups(),
            "in": here and {"group": here.log.name, "what": here.what, "number": here.number, "label": here.label},
            "for": here and time.monotonic() - here.since,
            "at": place_of(sys._current_frames().get(thread or 0)),
        }


WATCH = Watch()
atexit.register(WATCH.rest)
os.register_at_fork(after_in_child=WATCH.forked)


def _fail(notes: list[Waiting], text: str) -> None:
    """Let the waits end with this explanation: all of them, also where one cannot be ended."""
    for note in notes:
        note.failed = text
        try:
            if note.abort is not None:
                note.abort(text)
        except Exception as error:  # noqa: BLE001 - see above
            logger.debug("%s: the wait could not be ended: %r", note.what, error)


def _unfinished(state: _State) -> list[Waiting]:
    """The calls on devices that are looked at and not done yet."""
    for name, note in list(state.in_flight.items()):
        try:
            done = note.is_done is None or note.is_done()
        except RuntimeError:  # its backend has given it up, and says why by itself
            done = True
        if done:
            note.is_done = None
            del state.in_flight[name]
    return list(state.in_flight.values())


def _time_limit(group: Any) -> float:
    """Seconds after which a group's calls fail by themselves, where its backends tell."""
    found = []
    for device in getattr(group, "_device_types", ()):
        try:
            found.append(group._get_backend(device).options._timeout.total_seconds())
        except (AttributeError, RuntimeError):  # a backend without options
            continue
    return min(found, default=DEFAULT_LIMIT / SHARE)


def _my_groups() -> set[str]:
    return set(dist.distributed_c10d._world.pg_names.values())


def explain_hangs(limit: float | None = None, notice: float | None = None) -> None:
    """Change when hangs are explained.

    Args:
        limit: seconds after which a waiting call of any group fails with the explanation (a call on a device is only
            reported); 0 turns the explainer off. None: no change; before the first change it is nine tenths of each
            group's time limit.
        notice: seconds after which a report is printed that stops nothing. None: no change.

    Raises CommArgumentError for negative numbers.
    """
    for name, value in (("limit", limit), ("notice", notice)):
        if value is not None and not value >= 0:
            raise CommArgumentError(f"{name}: got {value!r}, expected seconds of at least 0")
    old = WATCH.settings
    WATCH.settings = _Settings(old.limit if limit is None else limit, old.notice if notice is None else notice)
    WATCH.poke()


def unit(name: str) -> contextlib.AbstractContextManager[None]:
    """Within the block, communication of this thread is reported as being for `name` (a parameter unit, a phase)."""
    return WATCH.unit(name)
