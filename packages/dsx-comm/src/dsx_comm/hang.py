"""The hang explainer: says which ranks are missing from a collective, and what every rank is doing instead. On by default.

Each rank notes which communication calls it has issued, per group, and where its threads wait (two dictionary writes a
call). A thread looks every few seconds. When a call of this rank has waited longer than the limit, it raises an alarm in the
job's store; every rank, also one that waits nowhere, answers with what it is doing: the call it is in or the last one it issued, its
number in the group, the place in the code. From the answers each rank makes the same text; the lowest rank that answered
prints it, and the waiting calls fail with it. On "dsx" groups they fail at once; on gloo when their wait ends, shortly after
the limit.

The limit is nine tenths of the time limit of the group that waits (9 minutes where that is 10); a first report that
stops nothing is printed after a minute. `explain_hangs` sets both for all groups. Not seen: kernels that wait on a GPU without a thread of
this process waiting in this package.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from .errors import CommArgumentError, HangError
from .meeting import fresh_prefix

DEFAULT_LIMIT = 540.0  # of groups that do not tell their time limit
DEFAULT_NOTICE = 60.0
SHARE = 0.9  # of a group's time limit
GRACE = 3.0  # seconds between the alarm and the end of waits: time for the others to answer
_OURS = (os.path.dirname(__file__), os.path.dirname(dist.__file__))


@dataclass
class Waiting:
    """A thread inside a communication call, or waiting for one."""

    group: str
    number: int
    what: str
    label: str
    thread: int
    since: float
    limit: float  # seconds
    abort: Any = None  # makes the group's calls fail with a text, where the group can
    told: int = 0  # 1: the notice was given, 2: the last report
    failed: str = ""


@dataclass
class _GroupLog:
    limit: float = DEFAULT_LIMIT
    issued: int = 0
    what: str = "nothing"


@dataclass
class _Settings:
    limit: float | None = None  # None: a share of each group's own
    notice: float = DEFAULT_NOTICE


@dataclass
class _State:
    groups: dict[str, _GroupLog] = field(default_factory=dict)
    waiting: dict[int, Waiting] = field(default_factory=dict)
    answered: int = 0  # alarms seen
    world: Any = None
    prefix: str = ""  # of this world's alarms in the store


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

    # - notes, on the way of every call

    def enter(self, group: Any, what: str, label: str = "", abort: Any = None, timeout: float | None = None) -> Waiting:
        """A call is issued by this thread and may wait. `timeout`: the call's time limit in seconds; None: its group's."""
        self.arm()
        name = group.group_name
        log = self._state.groups.get(name)
        if log is None:
            log = self._state.groups[name] = _GroupLog(SHARE * _time_limit(group) if timeout is None else DEFAULT_LIMIT)
        log.issued += 1
        log.what = what
        limit = self.settings.limit
        if limit is None:
            limit = log.limit if timeout is None else SHARE * timeout
        thread = threading.get_ident()
        note = Waiting(name, log.issued, what, label or self.label(), thread, time.monotonic(), limit, abort)
        self._state.waiting[thread] = note
        return note

    def resume(self, note: Waiting) -> None:
        """The thread waits for a call that was issued before."""
        note.thread = threading.get_ident()
        note.since = time.monotonic()
        self._state.waiting[note.thread] = note

    def leave(self, note: Waiting) -> None:
        """The thread is through; others may still wait for the same call."""
        self._state.waiting.pop(threading.get_ident(), None)

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

    def patience(self, note: Waiting | None) -> float | None:
        """Seconds a wait may last before it has to end; None: as long as the group's own limit."""
        limit = self.settings.limit if note is None else note.limit
        return limit + GRACE if limit else None

    def verdict(self, note: Waiting, error: BaseException) -> BaseException:
        """The error to raise for `error`: the explanation, if there is one."""
        return HangError(note.failed) if note.failed and not isinstance(error, HangError) else error

    # - the thread

    def arm(self) -> None:
        """Start to look, unless the thread runs: a rank that has made no call yet can say where it is, too."""
        if self._thread is not None:
            return
        if not dist.is_initialized() or dist.get_world_size() == 1 or self.settings.limit == 0:
            return
        self._state.world = dist.group.WORLD
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._wake,), daemon=True, name="dsx-comm-watch")
        self._thread.start()

    def rest(self) -> None:
        """End the thread (the process group goes away, or the process); the next call starts it again."""
        self._stop()
        self._state = _State()

    def forked(self) -> None:
        """This is a child of the process: it has the notes of its parent, but not its thread (which may hold a lock of the event)."""
        self._thread, self._wake = None, threading.Event()
        self._state = _State()

    def poke(self) -> None:
        """Settings have changed: start over."""
        self._stop()

    def _stop(self) -> None:
        # and wait for it: what returns from the store's C++ code into an interpreter that is ending takes the process down with SIGABRT
        self._wake.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(GRACE)  # a store that does not answer keeps it, and then it does not return either

    def _run(self, stop: threading.Event) -> None:
        state, settings = self._state, self.settings
        soonest = settings.notice if settings.limit is None else min(settings.limit, settings.notice)
        period = min(5.0, max(0.1, soonest / 10))
        try:
            own = _own_connection()
            if not state.prefix:  # the store may have alarms of an earlier world
                state.prefix = fresh_prefix(own, "dsx_hang", dist.get_rank())
            store = dist.PrefixStore(state.prefix, own)  # pyright: ignore[reportPrivateImportUsage]
            while not stop.wait(period) and dist.is_initialized() and dist.group.WORLD is state.world:
                self._look(store, state, period, stop)
        except (RuntimeError, ValueError):
            return  # the store is gone: the job is ending

    def _look(self, store: Any, state: _State, period: float, stop: threading.Event) -> None:
        alarm = f"alarm/{state.answered}"
        now = time.monotonic()
        waiting = list(state.waiting.values())
        over = [w for w in waiting if now - w.since > w.limit]
        worst = min(over or waiting, key=lambda w: w.since, default=None)
        waited = now - worst.since if worst is not None else 0.0
        final = bool(over)
        stage = 2 if final else 1 if waited > self.settings.notice else 0
        if worst is not None and stage > worst.told:
            worst.told = stage
            mine = json.dumps(
                {"group": worst.group, "what": worst.what, "number": worst.number, "waited": waited, "final": final}
            )
            store.compare_set(alarm, "", mine)
        if not store.check([alarm]):
            return
        raised = json.loads(store.get(alarm))
        rank = dist.get_rank()
        store.set(f"{alarm}/{rank}", json.dumps(self._describe(state, raised)))
        state.answered += 1
        stop.wait(min(GRACE - 0.5, 2 * period + 0.2))
        answers = _collect(store, alarm)
        text = explain(raised, answers)
        if rank == min(answers):
            print(text, file=sys.stderr, flush=True)  # noqa: T201  (the point of the exercise)
        if raised["final"]:
            for note in list(state.waiting.values()):
                if note.group == raised["group"]:
                    note.failed = text
                    if note.abort is not None:
                        note.abort(text)

    def _describe(self, state: _State, raised: dict[str, Any]) -> dict[str, Any]:
        log = state.groups.get(raised["group"], _GroupLog())
        here = next((w for w in list(state.waiting.values()) if w.group == raised["group"]), None)
        here = here or next(iter(list(state.waiting.values())), None)
        thread = here.thread if here is not None else threading.main_thread().ident
        return {
            "issued": log.issued,
            "last": log.what,
            "member": raised["group"] in _my_groups(),
            "in": here and {"group": here.group, "what": here.what, "number": here.number, "label": here.label},
            "for": here and time.monotonic() - here.since,
            "at": _place(sys._current_frames().get(thread or 0)),
        }


WATCH = Watch()
atexit.register(WATCH.rest)
os.register_at_fork(after_in_child=WATCH.forked)


def _time_limit(group: Any) -> float:
    """Seconds after which a group's calls fail by themselves, where its backends tell."""
    found = []
    for device in getattr(group, "_device_types", ()):
        try:
            found.append(group._get_backend(device).options._timeout.total_seconds())
        except (AttributeError, RuntimeError):  # a backend without options
            continue
    return min(found, default=DEFAULT_LIMIT / SHARE)


def _own_connection() -> Any:
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        return store.clone()  # another thread may be blocked inside the job's own one
    except (AttributeError, RuntimeError):  # not every kind of store has it
        return store


def _my_groups() -> set[str]:
    return set(dist.distributed_c10d._world.pg_names.values())


def _collect(store: Any, alarm: str) -> dict[int, Any]:
    keys = {rank: f"{alarm}/{rank}" for rank in range(dist.get_world_size())}
    return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}


def _place(frame: Any) -> str:
    """`file:line in function` of the innermost frame outside this package and torch.distributed."""
    if frame is None:
        return "an unknown place"
    stack = traceback.extract_stack(frame)
    theirs = [f for f in stack if not f.filename.startswith(_OURS)]
    last = (theirs or stack)[-1]
    return f"{last.filename}:{last.lineno} in {last.name}"


def explain(raised: dict[str, Any], answers: dict[int, Any]) -> str:
    """The text of a report: who is missing from the call that `raised` names, and what each rank does."""
    group, number = raised["group"], raised["number"]
    members = [r for r, a in answers.items() if a["member"]]
    silent = [r for r in range(dist.get_world_size()) if r not in answers] if dist.is_initialized() else []
    missing = [r for r in members if answers[r]["issued"] < number]
    head = f"{raised['what']} (call #{number} of group {group}) has waited {raised['waited']:.1f} s. "
    if missing:
        head += f"Rank(s) {', '.join(map(str, missing))} did not enter it. "
    if silent:
        head += f"Rank(s) {', '.join(map(str, silent))} did not answer (ended, frozen, or busy without giving up the interpreter). "
    if not missing and not silent:
        head += "All ranks have issued it: they may differ in what they called. "
    lines = [_line(rank, answers[rank]) for rank in sorted(answers)]
    return "\n".join([head.rstrip(), *lines])


def _line(rank: int, answer: dict[str, Any]) -> str:
    inside = answer["in"]
    if inside:
        label = f" for {inside['label']}" if inside["label"] else ""
        text = f"in {inside['what']}{label} (call #{inside['number']} of group {inside['group']}) since {answer['for']:.1f} s"
    else:
        text = f"in no communication; last call of this group: #{answer['issued']} {answer['last']}"
    return f"  rank {rank}: {text}, at {answer['at']}"


def explain_hangs(limit: float | None = None, notice: float | None = None) -> None:
    """Change when hangs are explained.

    Args:
        limit: seconds after which a waiting call of any group fails with the explanation; 0 turns the explainer off. None: no
            change; before the first change it is nine tenths of each group's time limit.
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
