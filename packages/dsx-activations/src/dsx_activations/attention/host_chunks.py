"""Attention whose queries, keys, values and results wait for the backward in host memory, in chunks of the sequence.

    out = sequence_attention(q, k, v, group, causal=True, host_chunks=8)

What leaves the device does so while the next chunk is computed, and it comes back one step before it is needed, so that
two chunks of a kind are on the device at a time. `fused` and `pieces` have the arithmetic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from dsx_comm.lanes import HostLane, Lane, make_lane
from torch.autograd.function import once_differentiable

from ..places import HostCopy, host_memory
from .cutting import Segments, even_parts
from .fused import backward_of, forward_of
from .pieces import Work

__all__ = ["Shelf", "attend_from_host", "in_turn", "lane_for", "sees"]

Tensors = tuple[torch.Tensor, ...]


class Shelf:
    """Tensors of chunks in host memory. Those of a CPU are there already and are kept as they are."""

    def __init__(self, lane: Lane | None) -> None:
        self._lane = lane
        self._kept: dict[int, list[Any]] = {}
        self._shapes: dict[int, list[torch.Size]] = {}
        self._leaving: deque[list[HostCopy]] = deque()

    def put(self, index: int, *tensors: torch.Tensor) -> None:
        """Keep a chunk. The device's memory is free when the chunk behind it is put."""
        if self._lane is None:
            self._kept[index] = list(tensors)
            return
        before = self._kept.get(index)
        made = []
        for place, tensor in enumerate(tensors):
            flat = tensor.contiguous().view(-1)
            host = before[place].host if before else host_memory(flat.numel(), flat.dtype, flat.device)
            made.append(HostCopy(flat, host, self._lane))
        self._kept[index], self._shapes[index] = made, [t.shape for t in tensors]
        self._leaving.append(made)
        self.let_go(but=1)

    def let_go(self, but: int = 0) -> None:
        """Free the device's memory of chunks that were put."""
        while len(self._leaving) > but:
            for one in self._leaving.popleft():
                one.let_go()

    def start(self, index: int) -> None:
        """Begin to fetch a chunk, if it is there."""
        if self._lane is not None:
            for one in self._kept.get(index, ()):
                one.start()

    def take(self, index: int) -> Tensors:
        """A chunk on the device; empty where there is none."""
        found = self._kept.get(index, ())
        if self._lane is None:
            return tuple(found)
        return tuple(one.take().view(shape) for one, shape in zip(found, self._shapes.get(index, ())))

    def add(self, index: int, *tensors: torch.Tensor) -> None:
        """Add to a chunk that is there, or put it."""
        there = self.take(index)
        self.put(index, *(a + b for a, b in zip(there, tensors)) if there else tensors)


def in_turn(plan: Sequence[tuple[tuple[Shelf, int], ...]]) -> Iterator[list[Tensors]]:
    """Yield the tensors that each step needs, while those of the next step are in flight."""
    for number, step in enumerate(plan):
        for shelf, index in step:
            shelf.start(index)
        found = [shelf.take(index) for shelf, index in step]
        for shelf, index in plan[number + 1] if number + 1 < len(plan) else ():
            shelf.start(index)
        yield found


def lane_for(device: torch.device) -> Lane | None:
    """The lane of copies; None where the device's memory is the host's."""
    lane = make_lane(device)
    return None if isinstance(lane, HostLane) else lane


def sees(work: Work, queries: Segments, keys: Segments) -> bool:
    """Whether some query of these places sees some key of those, without a look at documents."""
    of = work.visible.keys_of
    return any(of(one, other)[1] > of(one, other)[0] for one in queries for other in keys)


# - attention


def attend_from_host(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Work, chunks: int, lane: Lane
) -> torch.Tensor:
    """Attention over a whole sequence, of which the backward fetches queries, keys, values and results by chunks.

    Args:
        q, k, v: (batch, heads, length, features), as `attend_around` takes them.
        work: what is computed.
        chunks: number of them; fewer for shorter sequences.
        lane: where copies run.
    """
    return _FromHost.apply(q, k, v, work, chunks, lane)  # type: ignore[no-any-return]


class _FromHost(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Work, chunks: int, lane: Lane
    ) -> torch.Tensor:
        parts = _parts(q.shape[2], chunks)
        queries, keys = Shelf(lane), Shelf(lane)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        with torch.autocast(q.device.type, enabled=False):
            for number, part in enumerate(parts):
                mine = slice(*part)
                sums = forward_of(q[:, :, mine], k.shape[1], v.shape[3], (part,), work)
                for one in parts:
                    if sees(work, (part,), (one,)):
                        sums.add(k[:, :, slice(*one)], v[:, :, slice(*one)], (one,))
                found, logs = sums.result()
                out[:, :, mine] = found
                queries.put(number, q[:, :, mine], out[:, :, mine], logs)
                keys.put(number, k[:, :, mine], v[:, :, mine])
        queries.let_go()
        keys.let_go()
        ctx.given = parts, work, queries, keys, (q.shape, k.shape, v.shape)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        parts, work, queries, keys, shapes = ctx.given
        pairs = [(i, j) for i, one in enumerate(parts) for j, other in enumerate(parts) if sees(work, (one,), (other,))]
        sums_in = torch.promote_types(grad.dtype, torch.float32)
        grads = [grad.new_zeros(shape, dtype=sums_in if n else grad.dtype) for n, shape in enumerate(shapes)]
        begun, sums = -1, None
        with torch.autocast(grad.device.type, enabled=False):
            for (i, j), found in zip(pairs, in_turn(_steps(pairs, queries, keys))):
                mine, theirs = slice(*parts[i]), slice(*parts[j])
                if i != begun:
                    if sums is not None:
                        grads[0][:, :, slice(*parts[begun])] = sums.grad_q()
                    q, out, logs = found[1]
                    sums = backward_of(
                        q, shapes[1][1], shapes[2][3], (out, logs), grad[:, :, mine], (parts[i],), work
                    )  # fmt: skip
                    begun = i
                of_keys, of_values = sums.add(*found[0], (parts[j],))  # type: ignore[union-attr]
                grads[1][:, :, theirs] += of_keys
                grads[2][:, :, theirs] += of_values
            if sums is not None:
                grads[0][:, :, slice(*parts[begun])] = sums.grad_q()
        return *(g.to(grad.dtype) for g in grads), None, None, None


def _parts(length: int, chunks: int) -> Segments:
    return tuple(one for one in even_parts(length, chunks) if one[1] > one[0])


def _steps(
    pairs: Sequence[tuple[int, int]], queries: Shelf, keys: Shelf
) -> list[tuple[tuple[Shelf, int], ...]]:  # fmt: skip
    """The chunks to fetch for every pair: its keys, and its queries if it is the first pair of them."""
    return [
        ((keys, j), (queries, i)) if not place or pairs[place - 1][0] != i else ((keys, j),)
        for place, (i, j) in enumerate(pairs)
    ]
