"""Transfers tensors whose bytes the kernel cannot access directly: on a GPU, or not contiguous in memory.

They go through page-locked host buffers, piece by piece, so that the copy of one piece overlaps with the I/O of the
piece before it. One thread per engine does this, in the order of the calls. Device copies run on a separate stream,
after the work that the caller's stream had queued.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from dsx_core.device import Device

from .errors import TensorError
from .memory import empty

PIECE = 8 << 20  # bytes
PIECES = 4


def check(tensor: torch.Tensor) -> None:
    """Raise TensorError for anything that is not a dense tensor with its own storage."""
    if not isinstance(tensor, torch.Tensor):
        raise TensorError(f"got {type(tensor).__name__}, expected a torch.Tensor")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise TensorError(
            f"got {type(tensor).__name__}, a tensor subclass that may not own its bytes; pass the plain tensor in it"
        )
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise TensorError(f"got layout {tensor.layout} on {tensor.device}, expected a dense tensor with storage")
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise TensorError("got a quantized or lazily conjugated/negated tensor; resolve it into a plain one first")


def on_device(tensor: torch.Tensor) -> bool:
    """Whether the bytes are in a device's memory."""
    return tensor.device.type != "cpu"


def device_guard(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Inside the context `device` is the calling thread's current accelerator; does nothing for the CPU.

    A new thread begins with device 0. Without this, a call for a tensor on another GPU would run in the wrong context,
    or make a context on GPU 0.
    """
    return Device.of(device).as_current()


def needed(tensor: torch.Tensor) -> bool:
    """Whether a transfer must go through host buffers."""
    return on_device(tensor) or not tensor.is_contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, 1-D uint8, sharing its memory."""
    return (
        tensor.detach().view(-1).view(torch.uint8)
        if tensor.numel()
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


class Stager:
    """Moves tensors that the kernel cannot access directly, piece by piece through page-locked host buffers.

    `engine` is the `Engine` whose transfers it makes.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dsx-nvme-staging")
        self._buffers: list[torch.Tensor] = []
        self._streams = threading.local()

    def start(self, op: str, tensor: torch.Tensor, file: Any, offset: int) -> Future[int]:
        """Queue a transfer; the result is the number of bytes."""
        ready = Device.of(tensor).event()
        return self._pool.submit(self._run, op, tensor.detach(), file, offset, ready)

    def close(self) -> None:
        """End the thread after everything that is queued."""
        self._pool.shutdown(wait=True)

    def _run(self, op: str, tensor: torch.Tensor, file: Any, offset: int, ready: Any) -> int:
        with self._stream(tensor, ready):
            if op == "write":
                return self._write(as_bytes(tensor.contiguous()), file, offset)
            if tensor.is_contiguous():
                return self._read(as_bytes(tensor), file, offset)
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            moved = self._read(as_bytes(whole), file, offset)
            tensor.copy_(whole)
            return moved

    @contextlib.contextmanager
    def _stream(self, tensor: torch.Tensor, ready: Any) -> Iterator[None]:
        if ready is None:
            yield
            return
        stream = getattr(self._streams, str(tensor.device), None) or torch.Stream(tensor.device)
        setattr(self._streams, str(tensor.device), stream)
        with stream:
            stream.wait_event(ready)
            yield
            stream.synchronize()

    def _write(self, source: torch.Tensor, file: Any, offset: int) -> int:
        moving: list[Any] = []
        try:
            for number, start in enumerate(range(0, source.numel(), PIECE)):
                if number >= PIECES:
                    moving[number - PIECES].wait()
                piece = source[start : start + PIECE]
                buffer = self._buffer(number)[: piece.numel()]
                buffer.copy_(piece)  # returns after the bytes have arrived
                moving.append(self._engine.write(buffer, file, offset + start))
        finally:
            _end(moving)
        for ticket in moving[-PIECES:]:
            ticket.wait()
        return source.numel()

    def _read(self, target: torch.Tensor, file: Any, offset: int) -> int:
        starts = list(range(0, target.numel(), PIECE))
        moving: list[Any] = []
        try:
            for number, start in enumerate(starts):
                if number >= PIECES:
                    self._deliver(target, moving[number - PIECES], number - PIECES)
                buffer = self._buffer(number)[: min(PIECE, target.numel() - start)]
                moving.append(self._engine.read(buffer, file, offset + start))
            for number in range(max(0, len(starts) - PIECES), len(starts)):
                self._deliver(target, moving[number], number)
        finally:
            _end(moving)
        return target.numel()

    def _deliver(self, target: torch.Tensor, ticket: Any, number: int) -> None:
        nbytes, start = ticket.wait(), number * PIECE
        target[start : start + nbytes].copy_(self._buffer(number)[:nbytes])

    def _buffer(self, number: int) -> torch.Tensor:
        """The host buffer for a piece. Buffers are made when they are first needed, and used in turn."""
        index = number % PIECES
        while len(self._buffers) <= index:
            self._buffers.append(empty(PIECE, dtype=torch.uint8, pin="auto"))
        return self._buffers[index]


def _end(tickets: list[Any]) -> None:
    """Wait for every ticket, also for failed ones: no buffer may be used again while a transfer is in flight."""
    for ticket in tickets:
        ticket.exception()
