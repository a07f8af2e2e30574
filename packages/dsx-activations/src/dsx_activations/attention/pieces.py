"""Exact attention by pieces of at most `ROWS` queries and the keys they can see, in fp32 for 16-bit inputs.

Softmax is put together exactly: for each query the sum of exponentials is kept as a logarithm, and results of blocks
of keys are weighted with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .cutting import Segments
from .visible import Dropout, Visible

__all__ = ["Backward", "Forward", "Work"]

ROWS = 512
"""Queries whose scores are held at a time."""

Range = tuple[int, int]


@dataclass(frozen=True)
class Work:
    """The attention to compute: visible keys, the factor of the scores, dropout, and `softcap * tanh(score /
    softcap)` in the place of scores. `kernel` is the choice of `sequence_attention`: "pieces" and "flex" are taken, any
    other name leaves the choice to `fused`.
    """

    visible: Visible
    scale: float
    dropout: Dropout | None = None
    softcap: float | None = None
    kernel: str = "auto"


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return dtype if dtype.itemsize >= 4 else torch.float32


@dataclass(frozen=True)
class _Piece:
    """Some queries and some keys: where they are in their tensors, and in the whole sequence."""

    rows: slice
    columns: slice
    at_rows: Range
    at_keys: Range


def _pieces(queries: Segments, keys: Segments, visible: Visible) -> Iterator[_Piece]:
    begin = 0
    for first, behind in queries:
        for start in range(first, behind, ROWS):
            at_rows, column = (start, min(start + ROWS, behind)), 0
            for key, last in keys:
                seen, end = visible.keys_of(at_rows, (key, last))
                if end > seen:
                    rows = slice(begin + start - first, begin + at_rows[1] - first)
                    yield _Piece(rows, slice(column + seen - key, column + end - key), at_rows, (seen, end))
                column += last - key
        begin += behind - first


class _Scores:
    """Scores of queries (batch, heads, tokens, features) with blocks of keys (batch, key heads, tokens, features)."""

    def __init__(self, q: torch.Tensor, key_heads: int, segments: Segments, work: Work) -> None:
        self.q = q.unflatten(1, (key_heads, -1))
        self.segments, self.work, self.dtype = segments, work, wide(q.dtype)

    def of(self, piece: _Piece, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(batch, key heads, rows of all queries of a key head, keys), and the slope of the soft cap there."""
        rows = self.q[:, :, :, piece.rows]
        scores = rows.flatten(2, 3).to(self.dtype) @ k[:, :, piece.columns].to(self.dtype).mT * self.work.scale
        cap, slope = self.work.softcap, None
        if cap is not None:
            bounded = (scores / cap).tanh()
            scores, slope = bounded * cap, 1 - bounded * bounded
        hidden = self.work.visible.hidden(piece.at_rows, piece.at_keys, k.device)
        if hidden is None:
            return scores, slope
        scores = scores.view(*rows.shape[:-1], -1).masked_fill(hidden[:, None, None], float("-inf"))
        return scores.flatten(2, 3), slope

    def factors(self, piece: _Piece, weights: torch.Tensor) -> torch.Tensor | None:
        """Dropout's factors of weights; None without dropout."""
        if self.work.dropout is None:
            return None
        found = self.work.dropout.factors(self.q.shape[:3], piece.at_rows, piece.at_keys, weights)
        return found.flatten(2, 3)


class Forward:
    """Attention of some queries over blocks of keys and values that are added one after the other."""

    def __init__(self, q: torch.Tensor, key_heads: int, features: int, segments: Segments, work: Work) -> None:
        self._scores = _Scores(q, key_heads, segments, work)
        grouped, dtype = self._scores.q, self._scores.dtype
        self._out = grouped.new_zeros((*grouped.shape[:-1], features), dtype=dtype)
        self._logs = grouped.new_full(grouped.shape[:-1], float("-inf"), dtype=dtype)

    def add(self, k: torch.Tensor, v: torch.Tensor, keys: Segments) -> None:
        """Add a block of keys and values, which are at the positions `keys`."""
        of, out, logs = self._scores, self._out, self._logs
        for piece in _pieces(of.segments, keys, of.work.visible):
            (scores, _), rows = of.of(piece, k), piece.rows
            before = logs[:, :, :, rows]
            now = torch.logaddexp(before, scores.logsumexp(-1).view_as(before))
            safe = now.masked_fill(now == float("-inf"), 0.0)  # a query that has seen no key yet
            weights = (scores - safe.flatten(2, 3)[..., None]).exp()
            factors = of.factors(piece, weights)
            weights = weights if factors is None else weights * factors
            added = (weights @ v[:, :, piece.columns].to(of.dtype)).view(*before.shape, -1)
            out[:, :, :, rows] = out[:, :, :, rows] * (before - safe).exp()[..., None] + added
            logs[:, :, :, rows] = now

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, heads, tokens, value features), and the logarithms (batch, key heads, queries of one, tokens)."""
        return self._out.flatten(1, 2), self._logs


class Backward:
    """The gradients of the same, block by block."""

    def __init__(
        self,
        q: torch.Tensor,
        key_heads: int,
        saved: tuple[Any, Any],
        grad: torch.Tensor,
        segments: Segments,
        work: Work,
    ) -> None:
        out, logs = saved
        self._scores = _Scores(q, key_heads, segments, work)
        dtype = self._scores.dtype
        self._given = grad.to(dtype).unflatten(1, (key_heads, -1))
        self._logs = logs.masked_fill(logs == float("-inf"), 0.0)  # a query that sees nothing has no weights
        self._delta = (self._given * out.to(dtype).unflatten(1, (key_heads, -1))).sum(-1)
        self._grad_q = torch.zeros_like(self._scores.q, dtype=dtype, memory_format=torch.contiguous_format)

    def add(self, k: torch.Tensor, v: torch.Tensor, keys: Segments) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of a block of keys and values from these queries."""
        of, scale = self._scores, self._scores.work.scale
        grad_k, grad_v = (torch.zeros_like(t, dtype=of.dtype) for t in (k, v))
        for piece in _pieces(of.segments, keys, of.work.visible):
            rows, columns = piece.rows, piece.columns
            some, given = of.q[:, :, :, rows], self._given[:, :, :, rows].flatten(2, 3)
            scores, slope = of.of(piece, k)
            weights = (scores - _flat(self._logs, rows)).exp()
            factors = of.factors(piece, weights)
            of_weights = given @ v[:, :, columns].to(of.dtype).mT
            if factors is not None:
                of_weights *= factors
            grad_v[:, :, columns] += (weights if factors is None else weights * factors).mT @ given
            of_scores = weights * (of_weights - _flat(self._delta, rows)) * scale
            of_scores = of_scores if slope is None else of_scores * slope
            self._grad_q[:, :, :, rows] += (of_scores @ k[:, :, columns].to(of.dtype)).view_as(some)
            grad_k[:, :, columns] += of_scores.mT @ some.flatten(2, 3).to(of.dtype)
        return grad_k, grad_v

    def grad_q(self) -> torch.Tensor:
        """(batch, heads, tokens, features), when all blocks were added."""
        return self._grad_q.flatten(1, 2)


def _flat(of_queries: torch.Tensor, rows: slice) -> torch.Tensor:
    """(batch, key heads, rows of all queries of a key head, 1)."""
    return of_queries[:, :, :, rows].flatten(2, 3)[..., None]
