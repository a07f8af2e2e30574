"""A group of the shared-memory transport without its operations: its names and ranks, its end, how a call is issued.

A Python class (`PythonGroup`), because a C++ backend would tie the package to one torch version.
torch calls it from Python and (through its trampolines) from C++: DDP, functional collectives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..dropped import DROPPED
from ..errors import CommArgumentError
from ..hang import WATCH
from ..hang_notes import Waiting
from ..on_demand import gloo_group
from ..python_group import PythonGroup
from . import native
from .codes import wire_code
from .memory import Memories
from .segment import MAILBOX, ShmOptions, cores, world_size
from .storages import words_of
from .tensors import nbytes
from .work import DONE, Futures, ShmWork, translated

NOWHERE: tuple[int, int, list[int]] = (-1, 0, [])
"""The place of a tensor that is not in symmetric memory."""

# microseconds of waiting that keeps the core, and that gives way to others, before a waiting rank sleeps
_FREE, _CROWDED = (20.0, 300.0), (0.0, 50.0)


class ShmGroup(PythonGroup):
    """The base of a group whose ranks share memory: memory, sizes, waiting and numbering for every operation."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, fd: int, ranks: Sequence[int], options: ShmOptions
    ) -> None:
        super().__init__(rank, size, "dsx")
        self._store, self._fd, self._timeout = store, fd, timeout.total_seconds()
        self._ranks = list(ranks)
        module = native.module()
        in_bytes, piece, _ = module.layout(fd)
        total, eager = module.sizes(size, in_bytes, piece, MAILBOX)
        crowded = max(size, world_size()) > cores()
        spin, give_way = _CROWDED if crowded else _FREE
        if options.spin_us is not None:
            spin, give_way = min(spin, options.spin_us), options.spin_us
        one_shot = options.one_shot_bytes or max(4096, 65536 // size)
        self._native = module.Group(
            fd,
            total,
            eager,
            rank,
            self._ranks,
            fd,
            spin,
            give_way,
            options.look_seconds,
            min(one_shot, in_bytes),
            options.stores,
        )
        self._owner = os.getpid()
        self._futures = Futures()
        self.memories = Memories()
        self._gloo: Any = None

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time limit of the calls that follow."""
        self._timeout = timeout.total_seconds()

    def get_group_store(self) -> Any:
        """The group's store."""
        return self._store

    def supports_tensor_alloc(self, device: Any) -> bool:
        """False: symmetric memory has to be asked for by all ranks together (`dsx_comm.empty`)."""
        return False

    # - ending

    def gone(self) -> list[int]:
        """Global ranks, of this group and of the whole job where that shares memory, whose process has ended or that
        have left the group.
        """
        world = dist.group.WORLD
        groups = (self, world) if isinstance(world, ShmGroup) else (self,)
        return sorted({g._ranks[r] for g in groups if g._fd >= 0 for r in g._native.lost()})

    def abort(self, reason: str = "the group was aborted") -> None:
        """Make every rank's present and future calls on this group fail with `reason`."""
        self._native.poison(reason, False)

    def _give_up(self, explanation: str) -> None:
        self._native.poison(explanation, True)

    def shutdown(self) -> None:
        """Release the threads and the descriptor; memory goes when the last tensor of it does."""
        if self._fd >= 0 and os.getpid() == self._owner:
            self._futures.close()
            self._native.close()
            os.close(self._fd)
            self._fd = -1

    # - helpers

    def _issue(
        self,
        call: Callable[..., Any],
        arguments: tuple[Any, ...],
        opts: Any,
        kept: Any,
        finish: Callable[[], Any] | None = None,
    ) -> Any:
        """Run or queue `call(*arguments, words, timeout, asynchronous)`; `finish` puts the result in place.

        `kept`: the tensors whose memory the call uses, in lists if need be; the first entry is what a future yields.
        """
        wanted = opts.timeout.total_seconds()
        timeout = wanted if wanted > 0 else self._timeout
        asynchronous = getattr(opts, "asyncOp", True)
        storages, words = words_of(kept) if asynchronous else ((), [])
        note = WATCH.enter(self, call.__name__, abort=self._give_up, timeout=timeout)
        try:
            pending = call(*arguments, words, timeout, asynchronous)
        except RuntimeError as error:
            raise WATCH.verdict(note, translated(error, self.gone)) from None
        finally:
            WATCH.leave(note)
        if pending is None:
            if finish is not None:
                finish()
            return DONE
        return self._work(pending, (kept, storages), kept[0], finish, timeout, note)

    def _work(
        self, pending: Any, kept: Any, value: Any, finish: Callable[[], Any] | None, timeout: float, note: Waiting
    ) -> ShmWork:
        DROPPED.start()  # its memory is held until it is done, also if no caller waits for it
        return ShmWork(pending, kept, value, finish, timeout, note, self._futures, self.gone)

    def _where(self, tensor: torch.Tensor) -> tuple[int, int, list[int]]:
        return self.memories.find(tensor) if self.memories else NOWHERE

    def _fallback(self) -> Any:
        if self._gloo is None:
            self._gloo = gloo_group(self._store, self._rank, self._size, timedelta(seconds=self._timeout))
        return self._gloo

    # - what reductions and gathers share

    def gather_all(
        self, outputs: list[int], source: torch.Tensor, opts: Any, kept: Any, finish: Callable[[], Any] | None
    ) -> Any:
        """Rank p's `source` to the address outputs[p], bytes as they are; `kept` holds the memory there."""
        arguments = (source.data_ptr(), outputs, nbytes(source), wire_code(source.dtype), *self._where(source))
        return self._issue(self._native.all_gather, arguments, opts, (*kept, source), finish)


def options_of(opts: Any, kind: Any) -> Any:
    """torch's options of `kind`, made from what its overloads pass in their place."""
    if opts is None:
        return kind()
    if hasattr(opts, "timeout"):
        return opts
    made = kind()  # torch's overloads take the operator or the root in this place
    if hasattr(made, "reduceOp") and not isinstance(opts, int):
        made.reduceOp = opts
    elif hasattr(made, "rootRank"):
        made.rootRank = opts
    return made


def single_tensor(tensors: Any) -> Any:
    """The list that holds the one tensor. Raises CommArgumentError for several."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    if len(tensors) != 1:
        raise CommArgumentError(f"got {len(tensors)} tensors, expected one")
    return tensors
