"""One record per communication call, handed to whoever watches: byte counters and the communication log.

Every public function of this package describes what it is about to do as a `Call` and runs it through `run`. With
nobody watching that costs one look at an empty tuple. A `Call` holds sizes, never tensors.

Two sizes are told apart. `message` is the size S the bandwidth formulas use (`bandwidth.py`). `sent` is what this rank
puts on the wire by the volume formulas below, in the dtype that travels; algorithms that send more (a tree broadcast
forwards) are counted as if they did not, so that numbers compare across backends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

import torch

from .agreement import AGREEMENT
from .hang import WATCH
from .shm.process_group import ShmProcessGroup


class Labels(TypedDict, total=False):
    """Keyword arguments that every function takes on top of torch's: they steer the communication log.

    prof: log this call although the log, which must be on, is restricted to other operations (`prof_all: false`).
    log_name: the name to log it under (default: the function's).
    debug: who called; appended to the name when the log's `debug` is on (default: found from the stack).
    """

    prof: bool
    log_name: str
    debug: str


@dataclass(frozen=True)
class Call:
    """What one call does: operation, group and the sizes in bytes on this rank.

    `sent` is in units of 1/`per` bytes: the volume of an all-reduce need not be a whole number.
    """

    op: str
    group: Any
    size: int
    message: int
    sent: int
    device: torch.device
    labels: Labels
    per: int = 1
    detail: str = ""  # what else must agree between ranks: dtype, operator, root


class Observer(Protocol):
    """Watches calls. `begin` returns a token or None (not interested); `end` gets it back with the call's result."""

    def begin(self, call: Call) -> Any: ...

    def end(self, token: Any, call: Call, result: Any, is_async: bool) -> None: ...


class WaitObserver(Protocol):
    """Hears when a thread of this process begins and ends to wait: inside a synchronous call, or for a handle.

    On CUDA it is the current stream that waits, so marks belong on it, not on the host's clock. Waits may be nested.
    """

    def begin_wait(self) -> Any: ...

    def end_wait(self, token: Any) -> None: ...


class Observers:
    """Those who watch at the moment. A tuple that is replaced, so that threads may run calls meanwhile."""

    def __init__(self) -> None:
        self.active: tuple[Any, ...] = ()

    def add(self, observer: Observer | WaitObserver) -> None:
        """Begin to watch."""
        self.active = (*self.active, observer)

    def remove(self, observer: Observer | WaitObserver) -> None:
        """Stop watching; unknown observers are ignored."""
        self.active = tuple(o for o in self.active if o is not observer)


OBSERVERS = Observers()
WAITS = Observers()


def observe(observer: Observer | WaitObserver) -> Callable[[], None]:
    """Let `observer` hear of calls (methods of `Observer`), of waits (of `WaitObserver`), or of both.

    Returns:
        What ends it.
    """
    lists = [OBSERVERS] * hasattr(observer, "begin") + [WAITS] * hasattr(observer, "begin_wait")
    for each in lists:
        each.add(observer)

    def stop() -> None:
        for each in lists:
            each.remove(observer)

    return stop


def waiting(wait: Callable[[], Any]) -> Any:
    """Run something that blocks, and tell those who hear of waits."""
    watchers = WAITS.active
    if not watchers:
        return wait()
    tokens = [(watcher, watcher.begin_wait()) for watcher in watchers]
    try:
        return wait()
    finally:
        for watcher, token in tokens:
            watcher.end_wait(token)


class _WatchedWork:
    """A backend's own Work whose wait is heard; all else is the Work's. Our handles tell by themselves."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, *args: Any) -> Any:
        return waiting(lambda: self._work.wait(*args))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _issue(issue: Callable[[], Any], is_async: bool) -> Any:
    if not is_async:
        return waiting(issue)
    result = issue()
    return _WatchedWork(result) if WAITS.active and isinstance(result, torch.distributed.Work) else result


def run(call: Call, issue: Callable[[], Any], is_async: bool = False) -> Any:
    """Issue the call and tell the observers and the hang explainer."""
    if call.size > 1 and not isinstance(call.group, ShmProcessGroup):  # that one tells by itself, whoever calls it
        issue = _watched(call, issue, is_async)
    with torch.no_grad():  # communication is no part of a graph
        if not OBSERVERS.active:
            return _issue(issue, is_async)
        tokens = [(o, o.begin(call)) for o in OBSERVERS.active]
        result = _issue(issue, is_async)
    for observer, token in tokens:
        if token is not None:
            observer.end(token, call, result, is_async)
    return result


def guarded(call: Call, issue: Callable[[], Any]) -> Any:
    """Issue a part of a call that observers are yet to hear of: the hang explainer watches it, nobody counts it."""
    if call.size > 1 and not isinstance(call.group, ShmProcessGroup):
        issue = _watched(call, issue, False)
    return issue()


def _watched(call: Call, issue: Callable[[], Any], is_async: bool) -> Callable[[], Any]:
    def watched() -> Any:
        compare = AGREEMENT.post(call)
        if not is_async:
            compare()
        note = WATCH.enter(call.group, f"{call.op} of {call.message} bytes", call.labels.get("log_name", ""))
        try:
            result = issue()
        except RuntimeError as error:
            explained = WATCH.verdict(note, error)
            raise explained from (None if explained is error else error)
        finally:
            WATCH.leave(note)
        if result is not None and hasattr(result, "note"):
            result.note, result.compare = note, compare  # its wait may hang, too
        return result

    return watched


def check_labels(labels: Labels) -> Labels:
    """Reject keyword arguments that no function has."""
    if not labels:
        return labels
    unknown = set(labels) - {"prof", "log_name", "debug"}
    if unknown:
        raise TypeError(
            f"unexpected keyword argument(s) {sorted(unknown)}; besides torch's there are prof, log_name, debug"
        )
    return labels


# - volume formulas: bytes this rank sends, N ranks


def all_reduce_volume(nbytes: int, size: int) -> int:
    """2 S (N-1)/N, a reduce-scatter and an all-gather, in units of 1/N bytes (`Call.per`)."""
    return 2 * nbytes * (size - 1)


def share_volume(share: int, size: int) -> int:
    """share (N-1) with share = S/N: all-gather of output S, reduce-scatter of input S."""
    return share * (size - 1)
