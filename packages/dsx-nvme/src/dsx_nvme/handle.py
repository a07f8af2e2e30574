"""`aio_handle`: the interface of DeepNVMe's handle, on top of `Engine`.

It differs in three points. A failure raises an `OSError` with file, offset and errno, instead of returning -1 or
success. Any size, alignment and number of threads works. A tensor that is written without `file_offset` is the whole
content of the file afterwards: the tail of an older, longer file is cut.
"""

from __future__ import annotations

import errno
import os
from typing import Any

import torch
from dsx_core.device import accelerator_kind

from . import memory, staging
from .engine import Engine
from .errors import OptionError, TensorError, TransferError
from .ticket import Ticket

PathOrFd = str | os.PathLike | int
SECTOR = 512


class aio_handle:
    """Reads and writes of tensors with fixed settings.

    `block_size`: bytes per submission; `queue_depth`: submissions in flight per thread; `single_submit`: one system
    call per submission; `overlap_events`: take completions one by one instead of several at a time;
    `intra_op_parallelism`: threads that share one transfer. `engine`: as for `Engine`. Raises OptionError.
    """

    def __init__(
        self, block_size: int = 1 << 20, queue_depth: int = 128, single_submit: bool = False,
        overlap_events: bool = False, intra_op_parallelism: int = 1, *, engine: str = "auto",
    ) -> None:  # fmt: skip
        self.engine = Engine(
            engine, block_size=block_size, queue_depth=queue_depth, threads=intra_op_parallelism,
            single_submit=single_submit, overlap_events=overlap_events,
        )  # fmt: skip
        self._pending: list[Ticket] = []
        self._locked: dict[int, torch.Tensor] = {}

    def __enter__(self) -> aio_handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for all transfers and end the threads. Call `wait()` before to see errors."""
        self.engine.close()

    def get_block_size(self) -> int:
        """Bytes per submission, as given."""
        return self.engine.options.block_size

    def get_queue_depth(self) -> int:
        """Submissions in flight per thread."""
        return self.engine.options.queue_depth

    def get_single_submit(self) -> bool:
        """Whether each submission is a separate system call."""
        return self.engine.options.single_submit

    def get_overlap_events(self) -> bool:
        """Whether completions are taken one by one."""
        return self.engine.options.overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Threads that share one transfer."""
        return self.engine.options.threads

    def get_alignment(self) -> int:
        """512 bytes per thread: DeepNVMe needs sizes that are multiples of this. Here every size works."""
        return SECTOR * self.engine.options.threads

    def async_pread(self, buffer: torch.Tensor, filename: PathOrFd, file_offset: int | None = None) -> int:
        """Start filling `buffer` from a file; returns 0. `wait()` raises if it failed. A missing file raises at
        once.
        """
        self._pending.append(self._start("read", buffer, filename, file_offset))
        return 0

    def async_pwrite(self, buffer: torch.Tensor, filename: PathOrFd, file_offset: int | None = None) -> int:
        """Start writing `buffer` to a file (or open descriptor); returns 0.

        Without `file_offset` the tensor becomes the whole content of the file.
        """
        self._pending.append(self._start("write", buffer, filename, file_offset))
        return 0

    def sync_pread(self, buffer: torch.Tensor, filename: PathOrFd, file_offset: int | None = None) -> int:
        """Fill `buffer` from a file; returns 1."""
        self._start("read", buffer, filename, file_offset).wait()
        return 1

    def sync_pwrite(self, buffer: torch.Tensor, filename: PathOrFd, file_offset: int | None = None) -> int:
        """Write `buffer` to a file; returns 1."""
        self._start("write", buffer, filename, file_offset).wait()
        return 1

    def pread(
        self, buffer: torch.Tensor, filename: PathOrFd, validate: bool, is_async: bool, file_offset: int | None = None
    ) -> int:
        """`async_pread` (returns 0) or `sync_pread` (returns 1).

        `validate` compares the tensor with an ordinary read of the file.
        """
        return self._general("read", buffer, filename, validate, is_async, file_offset)

    def pwrite(
        self, buffer: torch.Tensor, filename: PathOrFd, validate: bool, is_async: bool, file_offset: int | None = None
    ) -> int:
        """`async_pwrite` (returns 0) or `sync_pwrite` (returns 1).

        `validate` compares the tensor with an ordinary read of the file.
        """
        return self._general("write", buffer, filename, validate, is_async, file_offset)

    def read(
        self, buffer: torch.Tensor, filename: PathOrFd, validate: bool = False, file_offset: int | None = None
    ) -> int:
        """`sync_pread`, optionally validated; returns 1."""
        return self._general("read", buffer, filename, validate, False, file_offset)

    def write(
        self, buffer: torch.Tensor, filename: PathOrFd, validate: bool = False, file_offset: int | None = None
    ) -> int:
        """`sync_pwrite`, optionally validated; returns 1."""
        return self._general("write", buffer, filename, validate, False, file_offset)

    def wait(self) -> int:
        """Wait for all asynchronous transfers since the last `wait`; returns how many there were.

        Raises the first error (with file, offset and errno) after all of them have ended.
        """
        pending, self._pending = self._pending, []
        for ticket in pending:
            ticket.exception()
            ticket.reported = True  # the first error of this call stands for it
        for ticket in pending:
            ticket.wait()
        return len(pending)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """A 1-D CPU tensor of the example's dtype on page-aligned memory that is registered with the ring.

        Its pages are locked if the system allows it. Raises TensorError if `num_elem` is not a size.
        """
        if isinstance(num_elem, bool) or not isinstance(num_elem, int) or num_elem < 0:
            raise TensorError(f"num_elem={num_elem!r}: expected a whole number of at least 0")
        tensor = memory.empty(num_elem, dtype=example_tensor.dtype, pin="auto")
        if num_elem:
            self._locked[tensor.data_ptr()] = tensor
            self.engine.register(tensor)
        return tensor

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Forget a tensor of `new_cpu_locked_tensor` after its transfers have ended.

        Its memory is freed with the last reference. Returns False if this handle did not make the tensor.
        """
        known = self._locked.pop(tensor.data_ptr(), None)
        if known is None:
            return False
        for ticket in self._pending:
            if ticket.guard.tensor.untyped_storage().data_ptr() == known.untyped_storage().data_ptr():
                ticket.exception()
        self.engine.unregister(known)
        return True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether transfers of this CPU tensor need no copy through a bounce buffer: this handle made it, or torch has
        page-locked it.
        """
        storage = tensor.untyped_storage().data_ptr()
        if any(t.untyped_storage().data_ptr() == storage for t in self._locked.values()):
            return True
        return tensor.device.type == "cpu" and accelerator_kind() is not None and tensor.is_pinned()

    def _start(self, op: str, buffer: torch.Tensor, filename: PathOrFd, offset: int | None) -> Ticket:
        move = self.engine.write if op == "write" else self.engine.read
        return move(buffer, filename, offset)

    def _general(
        self, op: str, buffer: torch.Tensor, filename: PathOrFd, validate: bool, is_async: bool, offset: int | None
    ) -> int:
        if validate and is_async:
            raise OptionError("validate compares after the transfer: use it with the synchronous form")
        ticket = self._start(op, buffer, filename, offset)
        if is_async:
            self._pending.append(ticket)
            return 0
        ticket.wait()
        if validate:
            _validate(op, buffer, filename, offset or 0)
        return 1


def _validate(op: str, buffer: torch.Tensor, filename: PathOrFd, offset: int) -> None:
    """Compare a tensor with an ordinary read of the file; raises TransferError (EIO)."""
    expected = staging.as_bytes(buffer.detach().contiguous().cpu())
    with open(os.dup(filename) if isinstance(filename, int) else filename, "rb", buffering=0) as file:
        for start in range(0, expected.numel(), staging.PIECE):
            piece = expected[start : start + staging.PIECE]
            found = os.pread(file.fileno(), piece.numel(), offset + start)
            if len(found) != piece.numel() or not torch.equal(
                torch.frombuffer(bytearray(found), dtype=torch.uint8), piece
            ):
                text = "the file's bytes differ from the tensor's (validate=True)"
                nbytes = expected.numel()
                raise TransferError(errno.EIO, text, str(filename), op=op, offset=offset + start, nbytes=nbytes)


def aio_read(
    buffer: torch.Tensor, filename: PathOrFd, block_size: int, queue_depth: int, single_submit: bool,
    overlap_events: bool, validate: bool,
) -> int:  # fmt: skip
    """Fill `buffer` from a file, with settings for this call only; returns 1.

    Args:
        buffer: contiguous tensor on the CPU.
        filename: path or descriptor.
        block_size: bytes per request.
        queue_depth: requests in flight.
        single_submit, overlap_events: as in `aio_handle`.
        validate: compare file and tensor afterwards.

    Raises:
        TensorError, OptionError: what cannot be transferred, before anything is moved.
        TransferError: an `OSError` with file, offset and number.
    """
    with aio_handle(block_size, queue_depth, single_submit, overlap_events) as handle:
        return handle.read(buffer, filename, validate)


def aio_write(
    buffer: torch.Tensor, filename: PathOrFd, block_size: int, queue_depth: int, single_submit: bool,
    overlap_events: bool, validate: bool,
) -> int:  # fmt: skip
    """Write `buffer` to a file, with settings for this call only; returns 1.
    Arguments and errors as in `aio_read`.
    """
    with aio_handle(block_size, queue_depth, single_submit, overlap_events) as handle:
        return handle.write(buffer, filename, validate)


def deepspeed_memcpy(dst: torch.Tensor, src: torch.Tensor) -> int:
    """Copy `src` into `dst` (same number of bytes, both contiguous on the CPU); returns 1. Raises `TensorError` where
    the sizes differ.
    """
    if dst.numel() * dst.element_size() != src.numel() * src.element_size():
        raise TensorError(
            f"got {src.numel() * src.element_size()} bytes for a destination of {dst.numel() * dst.element_size()}"
        )
    staging.as_bytes(dst).copy_(staging.as_bytes(src))
    return 1


def settings(handle: aio_handle) -> dict[str, Any]:
    """The `aio` section of a configuration that describes this handle."""
    o = handle.engine.options
    return {
        "block_size": o.block_size, "queue_depth": o.queue_depth, "intra_op_parallelism": o.threads,
        "single_submit": o.single_submit, "overlap_events": o.overlap_events,
    }  # fmt: skip
