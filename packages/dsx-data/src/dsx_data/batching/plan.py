"""Micro-batches by a budget of tokens: each batch takes as many samples as fit, in a chosen order.

A plan is a function of the lengths, the budget, the seed and the epoch; ranks take its batches in turn. Samples are
taken in order, and a batch ends before the sample that would exceed the budget. The cost of a batch is the sum of its
lengths ("sum", what packed and nested batches hold) or its number of samples times its greatest length ("padded", what
a rectangular batch holds).

Orders: "dataloader" is that of the dataset, "random" is another random order in each epoch, "seqlen" is from short to
long. "bucketed" is a random order that is sorted within windows of some batches, and then the batches are shuffled:
it needs nearly no padding and is still random.

Some samples may fit into no batch. Making a plan fails then, unless `too_long="drop"` allows to leave them out;
`BatchPlan.left_out` has their numbers.
"""

from __future__ import annotations

import logging
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from dsx_core import with_code

from ..errors import DataArgumentError
from ..index import open_index

__all__ = ["BatchPlan", "TokenBudget", "lengths_from"]

logger = logging.getLogger("dsx_data")
_ORDERS = ("dataloader", "random", "seqlen", "bucketed")
_BUCKET_BATCHES = 50
"""Batches per window of the bucketed order: the greatest lengths within a window differ little from batch to batch."""


@dataclass(frozen=True)
class BatchPlan:
    """Batches as lists of sample numbers; `plan[i]` is batch i.

    Attributes:
        samples: numbers of all samples, batch after batch, int64.
        starts: position in `samples` at which each batch begins, and at the end the count of samples, int64.
        left_out: numbers of the samples that are in no batch, int64.
    """

    samples: np.ndarray
    starts: np.ndarray
    left_out: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, batch: int) -> np.ndarray:
        return self.samples[self.starts[batch] : self.starts[batch + 1]]

    def fingerprint(self) -> int:
        """A checksum (CRC-32): equal for equal plans, and almost certainly different for different ones."""
        return zlib.crc32(np.ascontiguousarray(self.starts).data, zlib.crc32(np.ascontiguousarray(self.samples).data))


@dataclass(frozen=True)
class TokenBudget:
    """A limit on the tokens of a micro-batch, and the choice of its samples.

    Args:
        lengths: tokens of each sample.
        max_tokens: greatest cost of a batch, in tokens.
        min_batch_size: fewest samples of a batch.
        max_batch_size: most samples of a batch; None: as many as fit.
        order: see the module.
        cost: "sum" or "padded"; see the module.
        too_long: "error" refuses samples that fit into no batch, "drop" leaves them out with a warning.

    Raises:
        DataArgumentError: a number is out of range.
    """

    lengths: np.ndarray = field(repr=False)
    max_tokens: int
    min_batch_size: int = 1
    max_batch_size: int | None = None
    order: Literal["dataloader", "random", "seqlen", "bucketed"] = "dataloader"
    cost: Literal["sum", "padded"] = "sum"
    too_long: Literal["error", "drop"] = "error"

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", np.asarray(self.lengths).reshape(-1))
        if self.order not in _ORDERS:
            raise DataArgumentError(f"order: got {self.order!r}, expected one of {', '.join(_ORDERS)}")
        if self.cost not in ("sum", "padded"):
            raise DataArgumentError(f"cost: got {self.cost!r}, expected 'sum' or 'padded'")
        if self.max_tokens < 1 or self.min_batch_size < 1:
            raise DataArgumentError(
                f"got max_tokens {self.max_tokens} and min_batch_size {self.min_batch_size}, expected at least 1 of"
                " both"
            )
        if self.max_batch_size is not None and self.max_batch_size < self.min_batch_size:
            raise DataArgumentError(
                f"max_batch_size: got {self.max_batch_size}, expected at least min_batch_size, {self.min_batch_size}"
            )

    @property
    def size(self) -> int:
        """Number of samples of the dataset."""
        return len(self.lengths)

    def plan(self, *, seed: int = 0, epoch: int = 0) -> BatchPlan:
        """The batches of an epoch.

        Raises:
            DataArgumentError: a sample fits into no batch and `too_long` is "error"; or no batch can be made at all.
        """
        order = self._order(seed, epoch)
        fits = self.lengths[order] <= self.max_tokens
        order, left_out = order[fits], [order[~fits]]
        batches = self._cut(order)
        kept = [batch for batch in batches if len(batch) >= self.min_batch_size]
        left_out += [batch for batch in batches if len(batch) < self.min_batch_size]
        if self.order == "bucketed":
            turn = np.random.default_rng((seed, epoch, 1)).permutation(len(kept))
            kept = [kept[i] for i in turn]
        return self._to_plan(kept, np.concatenate(left_out), warn=epoch == 0)

    def _to_plan(self, kept: list[np.ndarray], left_out: np.ndarray, *, warn: bool) -> BatchPlan:
        if left_out.size:
            text = (
                f"{left_out.size} of {self.size} samples fit into no batch of at most {self.max_tokens} tokens and at"
                f" least {self.min_batch_size} samples (sample {left_out[0]} has {self.lengths[left_out[0]]} tokens)"
            )
            if self.too_long == "error" or not kept:
                raise DataArgumentError(f"token budget: {text}; raise max_tokens, or pass too_long='drop'")
            if warn:
                logger.warning(with_code("token budget: %s; they are left out", "DSX753"), text)
        if not kept:
            raise DataArgumentError("token budget: got a dataset without samples")
        starts = np.zeros(len(kept) + 1, np.int64)
        np.cumsum([len(batch) for batch in kept], out=starts[1:])
        return BatchPlan(np.concatenate(kept), starts, left_out)

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        if self.order == "dataloader":
            return np.arange(self.size)
        if self.order == "seqlen":
            return np.argsort(self.lengths, kind="stable")
        order = np.random.default_rng((seed, epoch)).permutation(self.size)
        if self.order == "random":
            return order
        mean = max(1.0, float(self.lengths.mean())) if self.size else 1.0
        window = max(1, int(_BUCKET_BATCHES * self.max_tokens / mean))
        parts = [order[first : first + window] for first in range(0, self.size, window)]
        return np.concatenate([part[np.argsort(self.lengths[part], kind="stable")] for part in parts] or [order])

    def _cut(self, order: np.ndarray) -> list[np.ndarray]:
        """Batches in order, each as long as the budget and `max_batch_size` allow."""
        lengths = self.lengths[order].astype(np.int64)
        most = len(order) if self.max_batch_size is None else self.max_batch_size
        batches, first, window = [], 0, 16
        while first < len(order):
            # If all of the window is within the budget, the batch may continue behind it: take a longer window.
            part = lengths[first : first + min(window, most)]
            count = int(np.searchsorted(self._costs(part), self.max_tokens, side="right"))
            if count == len(part) and count < min(most, len(order) - first):
                window *= 2
                continue
            batches.append(order[first : first + count])
            first, window = first + count, max(16, 2 * count)
        return batches

    def _costs(self, lengths: np.ndarray) -> np.ndarray:
        """The costs, in tokens, of the batches that hold the first 1, 2, 3, ... of these samples."""
        if self.cost == "sum":
            return np.cumsum(lengths)
        return np.maximum.accumulate(lengths) * np.arange(1, len(lengths) + 1)


def lengths_from(path: str | os.PathLike[str]) -> np.ndarray:
    """Read the tokens of each sample from the results of an analysis.

    Args:
        path: the folder of a `DataAnalyzer` with the metric ``seqlen``, or the index of the lengths itself.

    Raises:
        IndexFileError: there is no index, or it is damaged.
    """
    folder = Path(path)
    inside = folder / "seqlen" / "seqlen_sample_to_metric"
    return np.asarray(open_index(inside if folder.is_dir() else folder).values)
