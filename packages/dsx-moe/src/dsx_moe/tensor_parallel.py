"""Experts with tensor parallelism: ranks that hold the same tokens, or slices of the same experts.

In a tensor-parallel group all ranks hold the same activations. If each sent all of them, every token would be sent once
per rank of the group. So each rank dispatches only its own share of the tokens, and the results are added at the end:

    copy_to_group      the same values on all ranks; its backward sums the ranks' gradients   (before the dispatch)
    sum_over_group     sums the ranks' values; its backward returns the gradient unchanged    (after the combine)

Experts that are themselves sliced over the group need the rows of all its ranks: `GatheredExperts` gathers them before
the experts and keeps this rank's rows after them. A group is any `torch.distributed` process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import dsx_comm
import torch

from .dispatch import LocalExperts
from .routing import Routing


def copy_to_group(values: torch.Tensor, group: Any) -> torch.Tensor:
    """`values` unchanged; its gradient is the sum of the group's gradients (the backward is collective)."""
    return _Copy.apply(values, group)  # type: ignore[no-any-return]


def sum_over_group(values: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of the group's `values` (collective). The gradient is returned unchanged."""
    return _Sum.apply(values, group)  # type: ignore[no-any-return]


def own_share(routing: Routing, group: Any) -> Routing:
    """The routes of this rank's share of the tokens. The tokens are divided evenly among the ranks, in order."""
    size, rank = dsx_comm.get_world_size(group), dsx_comm.get_rank(group)
    low, high = routing.num_tokens * rank // size, routing.num_tokens * (rank + 1) // size
    kept = ((routing.token >= low) & (routing.token < high)).nonzero().view(-1)
    place = torch.full((routing.token.numel() + 1,), kept.numel(), dtype=torch.int64, device=kept.device)
    place[kept] = torch.arange(kept.numel(), device=kept.device)
    expert = routing.expert[kept]
    return replace(
        routing,
        token=routing.token[kept],
        expert=expert,
        weight=routing.weight[kept],
        slot=place[routing.slot],
        counts=torch.bincount(expert, minlength=routing.counts.numel()),
    )


class GatheredExperts:
    """Experts that are sliced over a tensor-parallel group, called with each rank's own rows.

    Args:
        experts: the slices. Called with equal rows on all ranks of the group, they return equal, complete outputs.
        group: the tensor-parallel group.
    """

    def __init__(self, experts: LocalExperts, group: Any) -> None:
        self.experts, self.group = experts, group

    def __call__(self, rows: torch.Tensor, counts: Sequence[int], first: int = 0) -> torch.Tensor:
        """See `LocalExperts` (collective)."""
        size, rank = dsx_comm.get_world_size(self.group), dsx_comm.get_rank(self.group)
        own = torch.tensor(list(counts), device=rows.device)
        gathered = own.new_empty(size * own.numel())
        dsx_comm.all_gather_into_tensor(gathered, own, group=self.group)
        sizes = gathered.view(size, -1).cpu()
        per_rank = sizes.sum(1).tolist()
        everything = _Gather.apply(rows, tuple(per_rank), rank, self.group)
        # the rows are sorted by rank, then by expert; the experts need them sorted by expert
        expert_of_row = torch.arange(sizes.shape[1], device="cpu").repeat(size).repeat_interleave(sizes.reshape(-1))
        order = expert_of_row.sort(stable=True).indices.to(rows.device)
        out = self.experts(everything.index_select(0, order), sizes.sum(0).tolist(), first)
        start = sum(per_rank[:rank])
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        kept: Any = _Keep.apply(out.index_select(0, inverse), tuple(per_rank), start, rank, self.group)
        return kept


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:  # type: ignore[override]
        return _Sum.apply(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        total = values.clone(memory_format=torch.contiguous_format)
        dsx_comm.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:  # type: ignore[override]
        return _Copy.apply(grad, ctx.group), None


def _all_gather_rows(rows: torch.Tensor, per_rank: tuple[int, ...], group: Any) -> torch.Tensor:
    """An all-gather of rows, of which each rank may have a different number (collective)."""
    size = len(per_rank)
    copies = rows.contiguous().repeat(size, *[1] * (rows.dim() - 1))
    out = rows.new_empty(sum(per_rank), *rows.shape[1:])
    dsx_comm.all_to_all_single(out, copies, list(per_rank), [rows.shape[0]] * size, group=group)
    return out


class _Gather(torch.autograd.Function):
    """All rows of the group. The experts give every rank the complete gradient, of which each rank keeps its part."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, per_rank: tuple[int, ...], rank: int, group: Any) -> torch.Tensor:
        ctx.where = (per_rank, sum(per_rank[:rank]), rank, group)
        return _all_gather_rows(rows, per_rank, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None, None, None]:  # type: ignore[override]
        return _Keep.apply(grad, *ctx.where), None, None, None


class _Keep(torch.autograd.Function):
    """This rank's part of rows that all ranks hold. The gradients of the parts are gathered in the backward."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, per_rank: tuple[int, ...], start: int, rank: int, group: Any
    ) -> torch.Tensor:
        ctx.where = (per_rank, rank, group)
        return rows[start : start + per_rank[rank]].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None, None, None, None]:  # type: ignore[override]
        return _Gather.apply(grad, *ctx.where), None, None, None, None
