"""`watch`: says why a job hangs, and who is slow, for programs of any system.

A thread of each rank looks at torch's flight recorder. When a process group does not go on for a while, it raises an
alarm in the job's store; every rank, also one that waits for nothing, answers with its recorder's content and the place
where its main thread is. The rank that raised the alarm compares the answers (`flight.py`) and prints the report.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .errors import AuditError
from .flight import Hang, explain_dumps, lateness

__all__ = ["Watch", "watch"]

_BUFFER = "TORCH_FR_BUFFER_SIZE"
_ANSWERS = (
    3.0  # seconds that a rank has to answer an alarm, beside a period; the report does not wait longer than needed
)
_OURS = os.path.dirname(__file__)


class Watch:
    """A running watch on one rank; `watch` makes it.

    Attributes:
        hang: the report, once there is one.
        limit: seconds without progress after which a group is reported; may be changed at any time.
        ready: whether the recorder was read once with the places of its calls. The first such read costs torch more
            than a second of CPU time, so the watch makes it when the first call is there, and not when a job hangs.
    """

    def __init__(
        self,
        limit: float,
        on_hang: Callable[[Hang], None] | None,
        module_of: Callable[[], str],
        stop: Callable[[], None],
    ) -> None:
        self.hang: Hang | None = None
        self.ready = False
        self.limit = limit
        self._on_hang, self._module_of, self._remove = on_hang, module_of, stop
        self._main = threading.main_thread().ident or 0
        self._stop = threading.Event()
        self._progress: tuple[str, float] = ("", time.monotonic())
        self._alarms = 0
        self._thread = threading.Thread(target=self._run, daemon=True, name="dsx-verify-watch")
        self._thread.start()

    @property
    def _period(self) -> float:
        """Seconds between two looks."""
        return min(1.0, max(0.05, self.limit / 10))

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._remove()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def slow_ranks(self, *, least_ms: float = 5.0, ratio: float = 3.0) -> dict[int, float]:
        """The ranks that hold the others up, and by how many milliseconds they are late in the usual collective. Every
        rank must call it. Clocks of the ranks must agree.

        Args:
            least_ms: a rank is named if it is late by so much,
            ratio: and by this multiple of the median of the others.
        """
        dumps: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(dumps, _dump(stacks=False))
        late = lateness(dict(enumerate(dumps)))
        found = {}
        for rank, value in late.items():
            others = sorted(other for r, other in late.items() if r != rank) or [0.0]
            if value > least_ms and value > ratio * others[len(others) // 2]:
                found[rank] = value
        return found

    # - The thread

    def _run(self) -> None:
        store: Any = None
        while not self._stop.wait(self._period):
            try:
                if dist.is_initialized() and store is None:
                    store = _own_store()
                if store is not None:
                    self._look(store)
            except (RuntimeError, ValueError) as error:  # the store of a job that ends is gone
                if not dist.is_initialized():
                    return
                if self._stop.is_set() or "onnection" in str(error) or "Broken pipe" in str(error):
                    return
                raise

    def _look(self, store: Any) -> None:
        alarm = f"alarm/{self._alarms}"
        if self._stuck() and self.hang is None:
            store.compare_set(alarm, "", str(dist.get_rank()))
        if not store.check([alarm]):
            return
        self._alarms += 1
        rank, size = dist.get_rank(), dist.get_world_size()
        store.set(f"{alarm}/{rank}", json.dumps([_dump(stacks=True), self._place()]))
        if int(store.get(alarm)) == rank:
            self._make_report(store, alarm, size)
        deadline = time.monotonic() + 4 * _ANSWERS + 4 * self._period
        while not store.check([f"{alarm}/report"]) and time.monotonic() < deadline:
            if self._stop.wait(0.05):
                return
        if store.check([f"{alarm}/report"]):
            self._tell(json.loads(store.get(f"{alarm}/report")))

    def _make_report(self, store: Any, alarm: str, size: int) -> None:
        deadline = time.monotonic() + self._period + _ANSWERS
        keys = [f"{alarm}/{rank}" for rank in range(size)]
        while time.monotonic() < deadline and not all(store.check([key]) for key in keys):
            self._stop.wait(0.05)
        told = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}
        dumps, places = {r: dump for r, (dump, _) in told.items()}, {r: place for r, (_, place) in told.items()}
        hang = explain_dumps(dumps, places, world_size=size)
        fields = None if hang is None else [hang.kind, hang.group, hang.number, hang.operation, hang.ranks, hang.text]
        store.set(f"{alarm}/report", json.dumps(fields))
        if hang is not None:
            print(f"dsx-verify: {hang.text}", file=sys.stderr, flush=True)  # noqa: T201 - the point of it

    def _tell(self, fields: list[Any] | None) -> None:
        if fields is None:  # it went on meanwhile
            self._progress = ("", time.monotonic())
            return
        kind, group, number, operation, ranks, text = fields
        self.hang = Hang(kind, group, number, operation, tuple(ranks), text)
        if self._on_hang is not None:
            self._on_hang(self.hang)

    def _stuck(self) -> bool:
        """Whether a group has calls that are not completed, and nothing has changed for `limit` seconds."""
        status = _dump(stacks=False, entries=False).get("pg_status", {})
        now, text = time.monotonic(), json.dumps(status, sort_keys=True)
        if text != self._progress[0]:
            self._progress = (text, now)
        if status and not self.ready:
            _dump(stacks=True)
            self.ready = True
        open_calls = any(
            int(one["last_enqueued_collective"]) > max(0, int(one["last_completed_collective"]))
            for one in status.values()
        )
        return open_calls and now - self._progress[1] > self.limit

    def _place(self) -> str:
        frame = sys._current_frames().get(self._main)
        stack = traceback.extract_stack(frame) if frame is not None else []
        torch_folder = os.path.dirname(torch.__file__)
        theirs = [f for f in stack if not f.filename.startswith((_OURS, torch_folder))]
        place = f"{theirs[-1].filename}:{theirs[-1].lineno} in {theirs[-1].name}" if theirs else "an unknown place"
        module = self._module_of()
        return f"{place}, in forward of {module}" if module else place


def watch(
    model: nn.Module | None = None,
    *,
    limit: float = 60.0,
    on_hang: Callable[[Hang], None] | None = None,
    entries: int = 2000,
) -> Watch:
    """Explain hangs of this job, whichever system issues its collectives. Call it on every rank, before
    `init_process_group`: torch reads the size of its flight recorder then.

    The report goes to stderr, and is `Watch.hang`. It stops nothing: the backend's own limit ends the calls.

    Args:
        model: names the module in whose forward a rank is.
        limit: seconds without progress after which a group is reported.
        on_hang: called with the report on every rank that can answer, in the watching thread.
        entries: collectives that the recorder keeps.

    Returns:
        The watch; `close()` ends it.

    Raises:
        AuditError: a process group is there already and its calls are not recorded, or `limit` is not positive.
    """
    if not limit > 0:
        raise AuditError(f"limit: got {limit!r}, expected seconds above 0")
    if dist.is_initialized() and not os.environ.get(_BUFFER):
        raise AuditError(
            f"watch: the process group was made before, and torch records nothing; call watch() before"
            f" init_process_group, or set {_BUFFER}={entries} in the environment"
        )
    os.environ.setdefault(_BUFFER, str(entries))
    inside: list[str] = []
    hooks = [
        hook
        for name, module in (model.named_modules() if model is not None else ())
        for hook in _noting(module, name or "the model", inside)
    ]

    def remove() -> None:
        for hook in hooks:
            hook.remove()

    return Watch(limit, on_hang, lambda: inside[-1] if inside else "", remove)


def _noting(module: nn.Module, name: str, inside: list[str]) -> list[Any]:
    def enter(*_: Any) -> None:
        inside.append(name)

    def leave(*_: Any) -> None:
        if inside:
            inside.pop()

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]


def _own_store() -> Any:
    """A connection of the thread's own: another thread may be blocked inside the job's."""
    store: Any = dist.distributed_c10d._get_default_store()
    with contextlib.suppress(AttributeError, RuntimeError):  # not every kind of store can be cloned
        store = store.clone()
    return dist.PrefixStore("dsx_verify_watch", store)  # pyright: ignore[reportPrivateImportUsage]


def _dump(*, stacks: bool, entries: bool = True) -> dict[str, Any]:
    """The recorders' content, with JSON's types: torch keeps NCCL's calls apart, and numbers its groups again."""
    compiled: Any = getattr(torch._C, "_distributed_c10d", None)
    if not hasattr(compiled, "_dump_fr_trace"):
        raise AuditError("watch: this build of torch has no flight recorder; torch 2.9 or newer has")
    told: dict[str, Any] = {"entries": [], "pg_config": {}, "pg_status": {}}
    for name, prefix in (("_dump_fr_trace", ""), ("_dump_nccl_trace", "nccl ")):
        if not hasattr(compiled, name):
            continue
        found = pickle.loads(getattr(compiled, name)(entries, stacks, False))  # made by this process a moment ago
        told["entries"] += [{**entry, "pg_id": f"{prefix}{entry['pg_id']}"} for entry in found.get("entries", ())]
        told["pg_config"] |= found.get("pg_config", {})
        told["pg_status"] |= {f"{prefix}{group}": status for group, status in found.get("pg_status", {}).items()}
    # Over gloo the recorder knows the ranks of no group, and a rank outside of a group would be called missing.
    told["pg_config"] |= {name: {"ranks": str(ranks)} for name, ranks in _groups_of_this_rank().items()}
    return told


def _groups_of_this_rank() -> dict[str, list[int]]:
    """Global ranks of each group but the whole job's, by the name that the recorder gives it."""
    if not dist.is_initialized():
        return {}
    world: Any = dist.distributed_c10d._world
    # Another thread may be making or destroying a group: it has a name and no ranks then, and nobody waits in it.
    named, ranks = list(world.pg_names.items()), dict(world.pg_group_ranks)
    own = {str(name): list(ranks[group]) for group, name in named if group in ranks}
    return {name: members for name, members in own.items() if len(members) < dist.get_world_size()}
