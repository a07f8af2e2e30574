"""Starts transfers between tensors and files, and keeps track of those in flight.

One `Engine` serves any number of files on any file systems: for each file it chooses a native engine (see `files.py`),
which is made when it is first needed. It keeps tensors and descriptors alive while the kernel works on them, refuses a
transfer that would race with another one, waits for all transfers before it is closed, and starts empty in a forked
child.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from dsx_core.host_memory import tell_read, tell_write

from . import files, staging
from .errors import DataRaceError, OptionError, TensorError, TransferError
from .files import OpenFile
from .options import Options, checked_offset
from .ticket import Description, EngineJob, FutureJob, Guard, Job, Ticket

THREADS = "dsx-nvme"  # how the names of all threads of this package begin
PRUNE_ABOVE = 64  # tickets; so many finished tickets may be kept before they are removed
Begin = Callable[[str, torch.Tensor, OpenFile, int], Job]  # (op, tensor, file, offset)


class _State:
    """Native engines, tickets and open files. They must outlive the `Engine` object while transfers are in flight."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.reset()

    def reset(self) -> None:
        """Start empty. In a forked child this drops the parent's engines, which then do nothing."""
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.engines: dict[str, Any] = {}
        self.tickets: dict[int, Ticket] = {}
        self.failed: list[Ticket] = []
        self.files: dict[tuple, OpenFile] = {}
        self.buffers: dict[int, tuple[int, int, dict[str, int]]] = {}
        self.stager: staging.Stager | None = None
        self.closed = False
        self.next_ticket = 0
        self.prune_at = PRUNE_ABOVE

    def engine(self, kind: str) -> Any:
        with self.lock:
            if self.closed:
                raise OptionError("this Engine is closed; make a new one")
            if kind not in self.engines:
                self.engines[kind] = self.options.make(kind)
                for address, nbytes, slots in self.buffers.values():
                    slots[kind] = self.engines[kind].add_buffer(address, nbytes)
            return self.engines[kind]

    def prune(self) -> None:
        """Remove finished tickets; failed ones are kept for `wait_all`."""
        for ticket in list(self.tickets.values()):
            ticket.settle_if_done()

    def over(self, number: int, file: OpenFile | None) -> None:
        """The transfer of a ticket has ended."""
        with self.lock:
            ticket = self.tickets.pop(number, None)
            if ticket is not None and ticket.failed:
                self.failed = [*(t for t in self.failed if not t.reported), ticket]
            if file is not None and file.release():
                for key in [k for k, f in self.files.items() if f is file]:
                    del self.files[key]

    def drain(self) -> None:
        """Wait for all transfers, then end the threads."""
        for ticket in list(self.tickets.values()):
            ticket.exception()
        if self.stager is not None:
            self.stager.close()
        with self.lock:
            self.closed, self.stager = True, None
            engines, self.engines = self.engines, {}
        for engine in engines.values():
            engine.close()


_states: weakref.WeakSet[_State] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [state.reset() for state in list(_states)])


def _drain(state: _State) -> None:
    if os.getpid() != state.pid:
        return
    if threading.current_thread().name.startswith(THREADS):
        # The garbage collector ran in one of our threads, which cannot wait for its own work.
        threading.Thread(target=state.drain, name=f"{THREADS}-end").start()
    else:
        state.drain()


class Engine:
    """Asynchronous transfers between tensors and files.

    `block_size`: bytes per submission; `queue_depth`: submissions in flight per ring; `threads`: rings;
    `single_submit`: one system call per submission; `overlap_events`: take each completion as it comes instead of
    several at a time; `engine`: "auto" (by file), "io_uring", "libaio", "threads" or "python" (the environment's
    DSX_NVME_ENGINE overrides it); `direct`: bypass the page cache (O_DIRECT) where that is possible. Raises
    OptionError.
    """

    def __init__(
        self, engine: str = "auto", *, block_size: int = 1 << 20, queue_depth: int = 32, threads: int = 1,
        single_submit: bool = False, overlap_events: bool = True, direct: bool = True,
    ) -> None:  # fmt: skip
        self.options = Options(engine, block_size, queue_depth, threads, single_submit, overlap_events, direct)
        self._state = _State(self.options)
        _states.add(self._state)
        self._finalizer = weakref.finalize(self, _drain, self._state)

    @classmethod
    def _over(cls, state: _State) -> Engine:
        """A second object on the same state, for the staging thread, which goes on after the caller dropped the
        first.
        """
        made = cls.__new__(cls)
        made.options, made._state = state.options, state
        return made

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for all transfers and end the threads. Errors of tickets that were never waited for are not raised."""
        self._finalizer()

    def open(self, path: str | os.PathLike | int, *, write: bool) -> OpenFile:
        """Open a file for several transfers; it is registered with the ring. `close_file` closes it."""
        file = files.open_file(path, write=write, engine=self.options.engine, direct=self.options.direct)
        if file.direct_fd >= 0:
            kind = file.access.engine
            slot = self._state.engine(kind).add_file(file.direct_fd)
            if slot >= 0:
                file.slots[self._state.pid, kind] = slot
        return file

    def close_file(self, file: OpenFile) -> None:
        """Close a file of `open`. Transfers in flight keep it open until they end. Also works after `close`."""
        state = self._state
        with state.lock:
            for (pid, kind), slot in file.slots.items():
                if pid == state.pid and kind in state.engines:
                    state.engines[kind].drop_file(slot)
            file.slots.clear()
            file.release()

    def register(self, tensor: torch.Tensor) -> None:
        """Register memory that will be used often (at most 1 GiB in one piece), so that its pages are pinned only once.

        If the kernel refuses, transfers work as before; `stats()` says why. Call `unregister` before it is freed.
        """
        address, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        state = self._state
        with state.lock:
            slots = {kind: engine.add_buffer(address, nbytes) for kind, engine in state.engines.items()}
            state.buffers[address] = (address, nbytes, slots)

    def unregister(self, tensor: torch.Tensor) -> None:
        """Undo `register`."""
        state = self._state
        with state.lock:
            _, _, slots = state.buffers.pop(tensor.data_ptr(), (0, 0, {}))
            for kind, slot in slots.items():
                if slot >= 0 and kind in state.engines:
                    state.engines[kind].drop_buffer(slot)

    def write(
        self, tensor: torch.Tensor, file: str | os.PathLike | int | OpenFile, offset: int | None = None, *,
        after: Callable[[], None] | None = None,
    ) -> Ticket:  # fmt: skip
        """Start writing a tensor's bytes to `file`, at `offset` bytes.

        With `offset=None` the tensor becomes the whole content of the file: it begins at 0, and a longer file is cut.
        If such a write fails half-way, the file is left empty. Do not write to the tensor before `wait`. `after` runs
        once, in the waiting thread, after success.
        """
        return self.start("write", tensor, file, offset, after=after)

    def read(
        self, tensor: torch.Tensor, file: str | os.PathLike | int | OpenFile, offset: int | None = 0, *,
        after: Callable[[], None] | None = None,
    ) -> Ticket:  # fmt: skip
        """Start filling a tensor from `file`, from `offset` bytes on. Do not use the tensor before `wait`."""
        return self.start("read", tensor, file, offset, after=after)

    def wait_all(self) -> int:
        """Wait for all transfers in flight; returns how many there were.

        Raises the first error of these, or of an earlier transfer whose ticket was never waited for.
        """
        state = self._state
        tickets = list(state.tickets.values())
        for ticket in tickets:
            ticket.exception()
        with state.lock:
            failed, state.failed = state.failed, []
        for ticket in failed:
            if not ticket.reported:
                ticket.wait()
        return len(tickets)

    def in_flight(self) -> int:
        """The number of transfers that have not ended."""
        self._state.prune()
        return len(self._state.tickets)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Counters by native engine in use; see README."""
        with self._state.lock:
            return {kind: engine.statistics() for kind, engine in self._state.engines.items()}

    def explain(self, path: str | os.PathLike) -> str:
        """A text that says which engine serves a file or folder, and why."""
        return files.explain(path, engine=self.options.engine)

    def start(
        self, op: str, tensor: torch.Tensor, target: Any, offset: int | None, *, begin: Begin | None = None,
        after: Callable[[], None] | None = None,
    ) -> Ticket:  # fmt: skip
        """Start a transfer like `read` and `write`, but with another way of moving the bytes.

        `begin(op, tensor, file, offset)` starts it and returns its job.
        """
        staging.check(tensor)
        if offset is not None:
            offset = checked_offset(offset, tensor)
        state = self._state
        if len(state.tickets) > state.prune_at:
            state.prune()
            state.prune_at = max(PRUNE_ABOVE, 2 * len(state.tickets))
        guard = Guard.of(tensor)
        self._refuse_race(op, guard)
        file = self._acquire(target, op == "write")
        what = Description(op, file.path, offset or 0, guard.end - guard.start)
        undo: Callable[[], None] | None = None
        try:
            if op == "write":
                exact = offset is None
                size = files.reserve(file, what.offset, what.nbytes, exact=exact)
                undo = functools.partial(files.undo_growth, file, what.offset, what.nbytes, exact=exact, size=size)
            if begin is None:
                begin = self._begin_staged if staging.needed(tensor) else self._begin_plain
            return self._keep(begin, what, guard, file, after, undo)
        except BaseException:
            state.over(-1, file)
            raise

    def _keep(
        self, begin: Begin, what: Description, guard: Guard, file: OpenFile, after: Any, undo: Callable[[], None] | None
    ) -> Ticket:
        state = self._state
        with state.lock:
            job = begin(what.op, guard.tensor, file, what.offset)
            if isinstance(job, FutureJob) and job.through_torch and what.op == "read":
                guard.version = None  # copying the pieces into the tensor raises its version
            state.next_ticket += 1
            number = state.next_ticket
            steps = (after,) if after is not None else ()
            ticket = Ticket(job, what, guard, over=lambda: state.over(number, file), after=steps)
            ticket.end_before = file.end_before
            if undo is not None:
                ticket.failed_write = undo
            state.tickets[number] = ticket
        return ticket

    def _begin_plain(self, op: str, tensor: torch.Tensor, file: OpenFile, offset: int) -> Job:
        access, state = file.access, self._state
        (tell_read if op == "write" else tell_write)(tensor, f"{op} of {os.path.basename(file.path)}")
        engine, slot = state.engine(access.engine), file.slots.get((state.pid, access.engine), -1)
        nbytes = tensor.numel() * tensor.element_size()
        try:
            number = engine.submit(
                op == "write", file.direct_fd, file.plain_fd, slot, tensor.data_ptr(),
                nbytes, offset, access.memory_align, access.offset_align,
            )  # fmt: skip
        except OSError as error:  # of the compiled engine, when its ring has failed
            text = f"{error.strerror}; close this Engine and make a new one"
            raise TransferError(error.errno or 0, text, file.path, op=op, offset=offset, nbytes=nbytes) from error
        return EngineJob(engine, number)

    def _begin_staged(self, op: str, tensor: torch.Tensor, file: OpenFile, offset: int) -> Job:
        state = self._state
        if state.stager is None:
            state.stager = staging.Stager(Engine._over(state))
        return FutureJob([state.stager.start(op, tensor, file, offset)], through_torch=True)

    def _refuse_race(self, op: str, guard: Guard) -> None:
        """Refuse a race: two transfers of the same memory, unless both only read the memory (that is: write files)."""
        for other in list(self._state.tickets.values()):
            g = other.guard
            if op == "write" and other.what.op == "write":
                continue
            if guard.start < g.end and g.start < guard.end and not other.settle_if_done():
                raise DataRaceError(
                    f"the memory of this {op} takes part in a {other.what.op} of {other.what.path} that is in flight; "
                    "wait for that one first"
                )

    def _acquire(self, target: Any, write: bool) -> OpenFile:
        """An open file with one more user: the caller's, one that is open already, or a new one."""
        state = self._state
        if isinstance(target, OpenFile):
            if target.users < 1:
                raise TensorError(f"{target.path} is closed")
            if write and not target.write:
                raise OptionError(f"{target.path} is open for reading; open it with write=True")
            with state.lock:
                target.users += 1
            return target
        key = (target if isinstance(target, int) else os.fspath(target), write)
        with state.lock:
            known = state.files.get(key)
            if known is not None and known.is_named(known.path):
                known.users += 1
                return known
        while True:
            try:
                file = files.open_file(target, write=write, engine=self.options.engine, direct=self.options.direct)
                break
            except OSError as error:
                waiting = next(iter(state.tickets.values()), None)
                if error.errno not in (errno.EMFILE, errno.ENFILE) or waiting is None:
                    raise
                waiting.exception()  # waits for it, which closes its descriptors
        if not isinstance(target, int):
            with state.lock:
                state.files[key] = file
        return file
