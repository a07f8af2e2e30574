"""Asynchronous saves: pieces are copied, and a separate thread writes them while training goes on.

    behind = WriteBehind(max_in_flight=1)
    behind.submit(planned)      # waits for a free slot, copies, returns
    behind.wait()               # until everything is on disk; raises what went wrong

A slot is one block of host memory for all pieces of one save; it is kept and used again (page-locked if the tensors are
on a CUDA device). There are as many slots as saves may be in flight: a program that saves faster than the disk writes
waits for a slot. State on disk (`offload_optimizer` to nvme) is copied on disk, part by part, into a file without a
name next to the checkpoint. That file disappears with the save, also if the process is killed. Only one part is in
memory while it is copied, and one piece while it is written. On CUDA the copies run on a separate stream of each
device, whose current stream waits for them on the device, so that later work cannot overwrite values that are being
copied; the host goes on.

The thread communicates with other ranks over a separate process group, so that its messages cannot mix with the
collectives of training. An error is the same on all ranks; the next `submit` or `wait` raises it. If no call has raised
an error when the program ends, the process ends with exit code 1 (`failures.py`).

Left out: copying while training goes on. A save has the values that the tensors had when `submit` was called, also if
they are changed right afterwards (`test_checkpoint_behind.py`); on a CPU that needs a copy first.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from dsx_core.device import Device

from .errors import CheckpointError
from .failures import Failures
from .files import write_all
from .ranks import Ranks
from .regions import raw_bytes
from .snapshot import Piece
from .writing import PlannedSave

logger = logging.getLogger("dsx.checkpoint")

_ALIGNMENT = 64  # bytes
_AT_ONCE = 1 << 24
"""Elements of state on disk that are in memory while it is copied: as many as one piece on disk has."""


class DiskCopy:
    """Copies of values that are not in memory, in a file without a name in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  closed by `close`
        self._end = 0

    def add(self, piece: Piece, parts: Iterator[torch.Tensor]) -> Piece:
        """The piece, which reads its copy from now on."""
        start, dtype = self._end, torch.uint8
        for part in parts:
            dtype = part.dtype
            data = raw_bytes(part.detach().cpu().contiguous())
            write_all(self._file.fileno(), data, self._end)
            self._end += len(data)
        nbytes = self._end - start
        return Piece(piece.family, piece.spec, piece.region, lambda: self._read(start, nbytes, dtype), in_memory=False)

    def _read(self, start: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        view, got = raw_bytes(data), 0
        while got < nbytes and (count := os.preadv(self._file.fileno(), [view[got:]], start + got)):
            got += count
        if got < nbytes:
            raise CheckpointError(
                f"got {got} of {nbytes} bytes of a copy on disk of what is to be saved, expected all: the disk has lost"
                " them; save again, to another disk"
            )
        return data.view(dtype)

    def close(self) -> None:
        """Free the space on disk."""
        self._file.close()


class HostSlot:
    """The memory for the copies of one save: a block of host memory, which is made when it is first needed and replaced
    only if it is too small, and a file for state on disk.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._disk: DiskCopy | None = None

    def copy(self, pieces: list[Piece], folder: Path) -> tuple[list[Piece], Callable[[], None]]:
        """Copy the pieces. Returns the copies in the same order, and a function that waits until they are complete.
        State on disk is copied to a file in `folder`, at once.

        Returns at once on a CUDA device; the current stream does nothing further before the copies are done.
        """
        in_memory = [piece for piece in pieces if piece.parts is None]
        copies, wait = self._copy_memory(in_memory)
        if len(in_memory) == len(pieces):
            return copies, wait
        self._disk, left = DiskCopy(folder), iter(copies)
        try:
            return [
                next(left) if piece.parts is None else self._disk.add(piece, piece.parts(_AT_ONCE)) for piece in pieces
            ], wait
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """The save has ended: free the file on disk. The memory is kept for the next save."""
        disk, self._disk = self._disk, None
        if disk is not None:
            disk.close()

    def _copy_memory(self, pieces: list[Piece]) -> tuple[list[Piece], Callable[[], None]]:
        values = [piece.fetch().detach().reshape(-1) for piece in pieces]
        places, size = [], 0
        for value in values:
            places.append(size)
            size += -(-value.numel() * value.element_size() // _ALIGNMENT) * _ALIGNMENT
        pinned = any(value.is_cuda for value in values)
        if self._memory is None or self._memory.numel() < size or (pinned and not self._memory.is_pinned()):
            self._memory = None  # freed before the new block is made
            self._memory = _page_locked(size) if pinned else torch.empty(size, dtype=torch.uint8, device="cpu")
        room = self._memory
        copies = [
            room[at : at + value.numel() * value.element_size()].view(value.dtype) for at, value in zip(places, values)
        ]
        wait = _copy_on_device(copies, values) if pinned else _copy_now(copies, values)
        return [_with_values(piece, copy) for piece, copy in zip(pieces, copies)], wait


def _with_values(piece: Piece, values: torch.Tensor) -> Piece:
    return Piece(piece.family, piece.spec, piece.region, lambda: values)


def _page_locked(nbytes: int) -> torch.Tensor:
    """Memory of this size. torch's own allocator of page-locked memory would round it up to a power of two."""
    from dsx_nvme.memory import empty  # lazy import: only devices need it

    return empty(nbytes, dtype=torch.uint8, pin=True)


def _copy_now(copies: list[torch.Tensor], values: list[torch.Tensor]) -> Callable[[], None]:
    for copy, value in zip(copies, values):
        copy.copy_(value)
    return lambda: None


def _copy_on_device(copies: list[torch.Tensor], values: list[torch.Tensor]) -> Callable[[], None]:
    """Copy on a stream of its own for each device that holds values: a rank may have its model on several devices, and
    on others than the current one.
    """
    ends = [
        _copy_from(Device.of(device), [(copy, value) for copy, value in zip(copies, values) if value.device == device])
        for device in dict.fromkeys(value.device for value in values if value.is_cuda)
    ]
    for copy, value in zip(copies, values):
        if not value.is_cuda:
            copy.copy_(value)

    def wait() -> None:
        for end in ends:
            end.synchronize()

    return wait


def _copy_from(device: Device, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Event:
    """Start copies from an accelerator. The current stream of the device goes on behind them."""
    stream, ready = torch.Stream(device.torch_device), device.event()
    with device.on(stream):
        device.wait_for(ready)
        for copy, value in pairs:
            copy.copy_(value, non_blocking=True)
            value.record_stream(stream)
    device.wait_for_stream(stream)
    return stream.record_event()


class WriteBehind:
    """Writes planned saves on one thread, in the order in which they are submitted.

    Args:
        max_in_flight: the most saves that are not on disk yet; the next one waits.
        ranks: makes the ranks for the thread, in the thread that submits first; collective.
        report: is called in the thread with an error, which is the same on all ranks, and the thread's ranks.
    """

    def __init__(
        self,
        max_in_flight: int = 1,
        *,
        ranks: Callable[[], Ranks],
        report: Callable[[Exception, Ranks], None] = lambda error, ranks: None,
    ) -> None:
        self._free = [HostSlot() for _ in range(max_in_flight)]
        self._make_ranks, self._report = ranks, report
        self._ranks: Ranks | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._running: list[Future[Path]] = []
        self._failures = Failures()

    @property
    def in_flight(self) -> int:
        """Saves that are not on disk yet."""
        return sum(not job.done() for job in self._running)

    def submit(self, planned: PlannedSave, together: Ranks) -> Future[Path]:
        """Copy the pieces and let the thread write them. Collective over `together`.

        Waits while too many saves are in flight.

        Raises:
            CheckpointError: an earlier save has failed and its error was not raised yet, or a rank has no memory for
                the copies.
        """
        if self._pool is None:
            self._ranks = self._make_ranks()
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="dsx-checkpoint")
        ranks, pool = self._ranks, self._pool
        self._wait_for_slot()
        self.raise_failures()
        slot = self._free.pop()
        try:
            pieces, wait = together.keep(
                "copying what to save", lambda: slot.copy(planned.pieces, planned.target.parent)
            )
        except BaseException:
            slot.end()
            self._free.append(slot)
            raise
        job = pool.submit(self._write, planned.copied(pieces), slot, wait, ranks)
        self._running.append(job)
        return job

    def _wait_for_slot(self) -> None:
        while not self._free:
            self._running[0].exception()
            self._running.pop(0)

    def _write(self, planned: PlannedSave, slot: HostSlot, wait: Callable[[], None], ranks: Any) -> Path:
        try:
            wait()
            return planned.run(ranks)
        except Exception as error:
            logger.error("saving %s behind training: %s", planned.target, error)
            self._failures.add(error, planned.target)
            self._report(error, ranks)
            raise
        finally:
            slot.end()
            self._free.append(slot)

    def raise_failures(self) -> None:
        """Raise the first error that was not raised yet. Later errors are dropped; they have been logged."""
        self._failures.raise_first()

    def wait(self) -> None:
        """Wait until all submitted saves are on disk. Raises `CheckpointError` if one failed."""
        for job in self._running:
            job.exception()
        self._running.clear()
        self.raise_failures()

    def close(self) -> None:
        """`wait`, then end the thread."""
        try:
            self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None
