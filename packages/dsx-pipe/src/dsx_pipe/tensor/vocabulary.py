"""Embedding and cross-entropy over a vocabulary that is divided among ranks.

The logits of a large vocabulary are the largest tensor of a language model. With `vocab_parallel_cross_entropy` each
rank keeps its piece of them, and only three numbers per token are sent. The pieces may have unequal sizes.
"""

from __future__ import annotations

from typing import Any

import dsx_comm
import torch
from torch import nn

from ..errors import TensorSliceError
from .regions import all_reduced, reduce_from_slices
from .slices import bounds, mark, slice_of


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are cut over the ranks.

    Args:
        num_embeddings: number of rows of the whole table; at least one per rank.
        embedding_dim: number of columns.
        padding_idx: row that gets no gradient, as in `nn.Embedding`.
        group: process group that shares the table; None: the default group.
        whole: the whole table [num_embeddings, embedding_dim] to cut; default: a new one.
        dtype, device: dtype and device of a new table.

    Raises:
        TensorSliceError: there are fewer rows than ranks.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        group: Any = None,
        *,
        whole: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.group = num_embeddings, embedding_dim, group
        self.rank, self.size = dsx_comm.get_rank(group), dsx_comm.get_world_size(group)
        if num_embeddings < self.size:
            raise TensorSliceError(f"num_embeddings: got {num_embeddings}, expected at least the {self.size} ranks")
        if whole is None:
            whole = nn.Embedding(num_embeddings, embedding_dim, padding_idx, **options).weight.detach()
        cut = bounds(num_embeddings, self.size)
        self.first, self.end = cut[self.rank], cut[self.rank + 1]
        self.weight = mark(nn.Parameter(slice_of(whole, 0, self.rank, self.size)), 0)
        here = padding_idx is not None and self.first <= padding_idx < self.end
        self._padding = padding_idx - self.first if here and padding_idx is not None else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 ids [...] in the whole vocabulary -> [..., embedding_dim] on every rank (collective)."""
        mine = (ids >= self.first) & (ids < self.end)
        rows = nn.functional.embedding(torch.where(mine, ids - self.first, 0), self.weight, self._padding)
        return reduce_from_slices(rows * mine.unsqueeze(-1), self.group)

    def extra_repr(self) -> str:
        """Sizes, and which piece this is."""
        return f"{self.num_embeddings}, {self.embedding_dim}, rows {self.first}..{self.end - 1}"


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, first: int, group: Any) -> torch.Tensor:
        values = logits.float()
        largest = values.amax(-1)
        if dsx_comm.get_world_size(group) > 1:
            dsx_comm.all_reduce(largest, op=dsx_comm.ReduceOp.MAX, group=group)
        shifted = values - largest.unsqueeze(-1)
        mine = (labels >= first) & (labels < first + logits.shape[-1])
        place = torch.where(mine, labels - first, 0).unsqueeze(-1)
        target = shifted.gather(-1, place).squeeze(-1) * mine
        exponents = shifted.exp()
        both = all_reduced(torch.stack((exponents.sum(-1), target)), group)
        ctx.save_for_backward(exponents / both[0].unsqueeze(-1), place, mine)
        ctx.dtype = logits.dtype
        return both[0].log() - both[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        probabilities, place, mine = ctx.saved_tensors
        out = probabilities.clone()
        out.scatter_add_(-1, place, -mine.unsqueeze(-1).to(out.dtype))
        return (out * gradient.unsqueeze(-1)).to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    group: Any = None,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Cross-entropy of sliced logits, computed in float32.

    Args:
        logits: [..., this rank's piece of the vocabulary].
        labels: int64 [...] in the whole vocabulary, the same on every rank.
        group: process group that shares the vocabulary; None: the default group.
        vocab_size: size of the whole vocabulary; default: the size of this rank's piece times the number of ranks.
        ignore_index: label that does not count.
        reduction: "mean", "sum" or "none".

    Returns:
        The loss, the same on every rank: a float32 scalar, or [...] for "none".

    Raises:
        TensorSliceError: shapes do not fit, a label is outside the vocabulary, or the reduction is unknown.
    """
    rank, size = dsx_comm.get_rank(group), dsx_comm.get_world_size(group)
    total = logits.shape[-1] * size if vocab_size is None else vocab_size
    cut = bounds(total, size)
    if logits.shape[:-1] != labels.shape or logits.shape[-1] != cut[rank + 1] - cut[rank]:
        raise TensorSliceError(
            f"got logits {list(logits.shape)} and labels {list(labels.shape)}, expected logits [labels' shape, "
            f"{cut[rank + 1] - cut[rank]}] on rank {rank} of {size} for a vocabulary of {total}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise TensorSliceError(f"reduction: got {reduction!r}, expected 'mean', 'sum' or 'none'")
    counts = labels != ignore_index
    if labels.numel() and bool((counts & ((labels < 0) | (labels >= total))).any()):
        raise TensorSliceError(f"labels: expected 0 <= label < {total}, or {ignore_index}")
    losses: Any = _CrossEntropy.apply(logits, torch.where(counts, labels, 0), cut[rank], group)
    losses = losses * counts
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()
