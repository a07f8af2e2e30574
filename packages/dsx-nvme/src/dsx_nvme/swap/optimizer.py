"""Optimizer states that live on disk and are brought into memory in pieces: read ahead, updated, written behind.

A fixed pool of buffers holds the pieces that are in memory. All states of a piece are next to each other in one file,
so that a piece is one read and one write. The file belongs to this job alone and keeps its size. If the optimizer's
rule is elementwise, its states may be cut anywhere (the results have the same bits); otherwise set `divisible=False`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..engine import Engine
from ..errors import NvmeError, OptionError, TensorError
from ..memory import Pin, empty
from ..pool import BufferPool
from .moving import Moving, OnTransfer, no_listener
from .plan import DEPTH, Piece, SwapPlan, make_plan

SLOTS = 1 + 2 * DEPTH  # at most


@dataclass(frozen=True)
class Visit:
    """A piece in memory: elements [start, stop) of group `key`; change the 1-D tensors in `states` in place."""

    key: str
    start: int
    stop: int
    states: Mapping[str, torch.Tensor]


@dataclass
class SwapTimes:
    """The seconds that passes spent waiting, and the bytes that they moved."""

    reading: float = 0.0  # waiting for reads
    writing: float = 0.0  # waiting for writes
    updating: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0
    passes: int = 0


@dataclass
class _Slot:
    memory: torch.Tensor  # uint8
    ticket: Moving | None = field(default=None)


class OptimizerSwapper:
    """States of an optimizer on disk.

    `sizes`: elements per group; `states`: their names, all of `dtype`; `read_only`: those that a pass does not write
    back (gradients). It uses `buffer_count` buffers of `buffer_size` elements; in addition, groups with together at
    most `max_in_cpu` elements stay in memory. `pipeline_read`, `pipeline_write`: read the next piece, write the last
    one, while one is updated. `fast_init`: `initialize` writes complete pieces in one pass; without it, it writes one
    state after the other. States are zeros at first.

    The file is `<folder>/optimizer-rank<rank>.swp`; `keep=False` removes it at `close`. `on_transfer` is called for
    every read and write (see `moving`).
    """

    def __init__(
        self, folder: str | os.PathLike, sizes: Mapping[str, int], *,
        states: Sequence[str] = ("master", "exp_avg", "exp_avg_sq"), read_only: Sequence[str] = (),
        dtype: torch.dtype = torch.float32, buffer_count: int = 4, buffer_size: int = 100_000_000, max_in_cpu: int = 0,
        pipeline_read: bool = False, pipeline_write: bool = False, fast_init: bool = False, divisible: bool = True,
        rank: int = 0, pin: Pin = "auto", engine: Engine | None = None, keep: bool = False,
        on_transfer: OnTransfer = no_listener,
    ) -> None:  # fmt: skip
        if not states or set(read_only) - set(states) or len(set(states)) != len(states):
            raise OptionError(
                f"states={tuple(states)}, read_only={tuple(read_only)}: expected distinct names, and some of them"
            )
        if buffer_count < len(states):
            raise OptionError(f"buffer_count={buffer_count}: expected at least one for each of {len(states)} states")
        # States that are only read come first, so that those that are written back are one run of bytes.
        self.states = (*[s for s in states if s in read_only], *[s for s in states if s not in read_only])
        self.dtype, self.fast_init, self.keep = dtype, fast_init, keep
        self._skipped = len(read_only)
        total = sum(sizes.values())
        wanted = -(-total * dtype.itemsize // 4096 + len(sizes)) * 4096 * len(states) * SLOTS  # more would lie idle
        budget = min(buffer_count * buffer_size * dtype.itemsize, max(wanted, 4096 * len(states) * SLOTS))
        self.plan: SwapPlan = make_plan(
            sizes, states=len(states), itemsize=dtype.itemsize, buffer_bytes=budget, read_ahead=pipeline_read,
            write_behind=pipeline_write, resident_elements=max_in_cpu, divisible=divisible,
        )  # fmt: skip
        self._pieces_of: dict[str, list[Piece]] = {key: [] for key in sizes}
        for piece in self.plan.pieces:
            self._pieces_of[piece.key].append(piece)
        self.times = SwapTimes()
        self._own_engine = engine is None
        self.engine = engine if engine is not None else Engine(block_size=4 << 20, queue_depth=16)
        self._broken, self._on_transfer = "", on_transfer
        os.makedirs(folder, exist_ok=True)
        self.path = os.path.join(os.fspath(folder), f"optimizer-rank{rank}.swp")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._file = self.engine.open(self.path, write=True)
        try:
            self._reserve()
            self._make_memory(pin)
        except BaseException:
            self.close()
            raise

    def _reserve(self) -> None:
        nbytes = self.plan.file_bytes
        if hasattr(os, "posix_fallocate") and nbytes:
            os.posix_fallocate(self._file.plain_fd, 0, nbytes)  # a full disk shows now, not in the middle of training
        else:
            os.ftruncate(self._file.plain_fd, nbytes)

    def _make_memory(self, pin: Pin) -> None:
        largest = max((p.room for p in self.plan.pieces if not p.resident), default=0)
        slot_bytes = max(4096, largest * len(self.states))
        count = min(self.plan.slots, sum(not p.resident for p in self.plan.pieces)) or 1
        self.pool = BufferPool(slot_bytes * count, pin=pin)
        self._slots = [_Slot(self.pool.acquire(slot_bytes).tensor()) for _ in range(count)]
        for slot in self._slots:  # one by one: the kernel takes at most 1 GiB in one piece
            self.engine.register(slot.memory)
        self._resident = {
            p.index: empty(len(self.states), p.numel, dtype=self.dtype) for p in self.plan.pieces if p.resident
        }

    def __enter__(self) -> OptimizerSwapper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def initialize(self, value: Callable[[str, str, int, int], torch.Tensor | None]) -> None:
        """Give the states their first values: `value(key, state, start, stop)` returns elements, or None for zeros."""
        if self.fast_init:
            for visit in self._sweep(fresh=True):
                for name, tensor in visit.states.items():
                    given = value(visit.key, name, visit.start, visit.stop)
                    tensor.zero_() if given is None else tensor.copy_(given.view(-1))
            return
        for piece in self.plan.pieces:
            for name in self.states:
                given = value(piece.key, name, piece.start, piece.stop)
                if given is not None:
                    self._move_state("write", piece, name, given.detach().contiguous().view(-1).to(self.dtype))

    def sweep(self) -> Iterator[Visit]:
        """One pass: every piece is in memory once, in order.

        Changes that the loop's body makes to the states are written to disk.

        The tensors of a visit are valid until the next visit. Raises TransferError. After that the states on disk are a
        mixture of two passes, and the swapper refuses to go on.
        """
        return self._sweep(fresh=False)

    def step(self, update: Callable[[Visit], None]) -> SwapTimes:
        """A pass that calls `update` with every piece. Returns the times so far."""
        for visit in self.sweep():
            update(visit)
        return self.times

    def get_state(self, key: str, state: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """A state of a group, all elements, from disk or memory. Raises KeyError."""
        pieces = self._pieces(key, state)
        numel = pieces[-1].stop if pieces else 0
        out = empty(numel, dtype=self.dtype) if out is None else out
        self._check(out, numel)
        for piece in pieces:
            self._move_state("read", piece, state, out.view(-1)[piece.start : piece.stop])
        return out

    def set_state(self, key: str, state: str, tensor: torch.Tensor) -> None:
        """Replace all elements of a state of a group (from a checkpoint, or the gradients of a step). Raises
        KeyError.
        """
        pieces = self._pieces(key, state)
        self._check(tensor, pieces[-1].stop if pieces else 0)
        flat = tensor.detach().contiguous().view(-1)
        for piece in pieces:
            self._move_state("write", piece, state, flat[piece.start : piece.stop])

    def close(self) -> None:
        """Wait for all transfers and close the file; remove it unless `keep` is set."""
        if self._file.users < 1:
            return
        for slot in getattr(self, "_slots", ()):
            if slot.ticket is not None:
                slot.ticket.exception()
        for slot in getattr(self, "_slots", ()):
            self.engine.unregister(slot.memory)
        self.engine.close_file(self._file)
        if self._own_engine:
            self.engine.close()
        if not self.keep:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def _sweep(self, *, fresh: bool) -> Iterator[Visit]:
        if self._broken:
            raise NvmeError(f"{self.path}: an earlier pass failed half-way ({self._broken}); its states cannot be used")
        self._broken = "the pass was not finished"
        doers: dict[str, Any] = {
            "read": self._read,
            "wait_read": self._wait_read,
            "write": self._write,
            "wait_write": self._wait_write,
        }
        try:
            for action in self.plan.actions:
                piece = self.plan.pieces[action.piece]
                if action.kind != "update":
                    if not (fresh and "read" in action.kind):
                        doers[action.kind](piece, self._slots[action.slot])
                    continue
                begun = time.perf_counter()
                yield Visit(piece.key, piece.start, piece.stop, self._views(piece, action.slot))
                self.times.updating += time.perf_counter() - begun
        except BaseException as error:
            self._broken = self._broken if isinstance(error, GeneratorExit) else repr(error)
            for slot in self._slots:
                if slot.ticket is not None:
                    slot.ticket.exception()
                    slot.ticket = None
            raise
        self._broken = ""
        self.times.passes += 1

    def _views(self, piece: Piece, slot: int) -> dict[str, torch.Tensor]:
        if piece.resident:
            return dict(zip(self.states, self._resident[piece.index].unbind(0)))
        memory, nbytes = self._slots[slot].memory, piece.numel * self.dtype.itemsize
        return {
            name: memory[n * piece.room : n * piece.room + nbytes].view(self.dtype)
            for n, name in enumerate(self.states)
        }

    def _read(self, piece: Piece, slot: _Slot) -> None:
        nbytes = piece.room * len(self.states)
        slot.ticket = self._begin("read", piece, slot.memory[:nbytes], piece.offset)
        self.times.bytes_read += nbytes

    def _write(self, piece: Piece, slot: _Slot) -> None:
        begin, end = piece.room * self._skipped, piece.room * len(self.states)
        slot.ticket = self._begin("write", piece, slot.memory[begin:end], piece.offset + begin)
        self.times.bytes_written += end - begin

    def _begin(self, op: str, piece: Piece, memory: torch.Tensor, offset: int) -> Moving:
        move = self.engine.write if op == "write" else self.engine.read
        name = f"{piece.key}[{piece.start}:{piece.stop}]"
        return Moving.begin(self._on_transfer, op, name, memory, lambda: move(memory, self._file, offset))

    def _wait_read(self, _: Piece, slot: _Slot) -> None:
        self.times.reading += self._wait(slot)

    def _wait_write(self, _: Piece, slot: _Slot) -> None:
        self.times.writing += self._wait(slot)

    def _wait(self, slot: _Slot) -> float:
        begun, ticket = time.perf_counter(), slot.ticket
        slot.ticket = None
        if ticket is not None:
            ticket.wait()
        return time.perf_counter() - begun

    def _pieces(self, key: str, state: str) -> list[Piece]:
        if state not in self.states:
            raise KeyError(f"no state {state!r}; there are {', '.join(self.states)}")
        if key not in self._pieces_of:
            raise KeyError(f"no group {key!r}; there are {len(self._pieces_of)} others")
        return self._pieces_of[key]

    def _check(self, tensor: torch.Tensor, numel: int) -> None:
        if tensor.numel() != numel or tensor.dtype != self.dtype:
            raise TensorError(f"got {tensor.numel()} elements of {tensor.dtype}, the state has {numel} of {self.dtype}")

    def _move_state(self, op: str, piece: Piece, state: str, flat: torch.Tensor) -> None:
        number = self.states.index(state)
        if piece.resident:
            kept = self._resident[piece.index][number]
            kept.copy_(flat) if op == "write" else flat.copy_(kept)
            return
        self._begin(op, piece, flat, piece.offset + number * piece.room).wait()
