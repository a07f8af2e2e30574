"""One record per communication call, handed to observers: byte counters and the communication log.

Every public function of this package describes what it is about to do as a `Call` and runs it through `run`. The hang
explainer notes every call on groups that do not tell it by themselves. Observers cost nothing where there are none. A
`Call` holds sizes, never tensors.

Two sizes are told apart. `message` is the size S the bandwidth formulas use (`bandwidth.py`). `sent` is what this rank
puts on the wire by the volume formulas below, in the dtype that travels; algorithms that send more (a tree broadcast
forwards) are counted as if they did not, so that numbers compare across backends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypedDict

import torch

from .agreement import AGREEMENT
from .hang import WATCH
from .hang_notes import Waiting
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


class Call(NamedTuple):
    """A call of a collective: operation, group and the sizes in bytes on this rank.

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
    """The registered observers. The tuple is replaced, not changed, so that threads may run calls meanwhile."""

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
HOST = torch.device("cpu")


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


def waiting(wait: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that blocks, and tell the observers of waits."""
    watchers = WAITS.active
    if not watchers:
        return wait(*arguments)
    tokens = [(watcher, watcher.begin_wait()) for watcher in watchers]
    try:
        return wait(*arguments)
    finally:
        for watcher, token in tokens:
            watcher.end_wait(token)


def run(call: Call, issue: Callable[[], Any], is_async: bool = False) -> Any:
    """Issue the call and tell the observers and the hang explainer."""
    graph = torch.is_grad_enabled()
    if graph:  # communication is no part of a graph; `torch.no_grad` says the same in ten times the time
        torch._C._set_grad_enabled(False)
    try:
        if OBSERVERS.active or WAITS.active:
            return _observed(call, issue, is_async)
        return _watched(call, issue, is_async)
    finally:
        if graph:
            torch._C._set_grad_enabled(True)


def _observed(call: Call, issue: Callable[[], Any], is_async: bool) -> Any:
    tokens = [(observer, observer.begin(call)) for observer in OBSERVERS.active]
    result = _watched(call, issue, is_async) if is_async else waiting(_watched, call, issue, False)
    for observer, token in tokens:
        if token is not None:
            observer.end(token, call, result, is_async)
    return result


def guarded(call: Call, issue: Callable[[], Any]) -> Any:
    """Issue a part of a call that observers are yet to hear of: the hang explainer watches it, it is not counted."""
    return _watched(call, issue, False)


def _watched(call: Call, issue: Callable[[], Any], is_async: bool) -> Any:
    """Issue the call so that a hang in it is explained. Groups in shared memory tell the explainer by themselves."""
    group = call.group
    if call.size == 1 or type(group) is ShmProcessGroup:
        result = issue()
        return _handed_out(result) if is_async else result
    compare = AGREEMENT.post(call)
    if compare is not None and not is_async:
        compare()
    labels = call.labels
    label = labels.get("log_name", "") if labels else ""
    note = WATCH.enter(group, call.op, call.message, label, on_device=call.device != HOST)
    try:
        result = issue()
    except RuntimeError as error:
        explained = WATCH.verdict(note, error)
        raise explained from (None if explained is error else error)
    finally:
        WATCH.leave(note)
    return _handed_out(result, note, compare) if is_async else result  # the wait for it may hang, too


def _handed_out(result: Any, note: Waiting | None = None, compare: Callable[[], None] | None = None) -> Any:
    for handle in result if isinstance(result, list) else (result,):
        handle.hand_out(note, compare)
    return result


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
