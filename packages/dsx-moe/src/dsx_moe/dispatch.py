"""Brings tokens to experts and back: permute by expert, send, compute segments, return, combine.

    rows  = tokens of the routes, sorted by expert          [R, h]
    sent  = rows, on the ranks of their experts; exact splits, chunk by chunk
    out[t] = sum over t's routes of weight * expert(row), added up in float32 (float64 for float64)

The same code is used for dropping and dropless routings, for one rank and many. Every rank takes part in every
transfer, in forward and backward, even with zero rows. Experts that received no rows run on zero rows, so their
parameters get zero gradients. So no rank waits for another one that skipped its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from .exchange import Exchange, Link, receive_rows, send_rows
from .plan import ExpertPlan, plan_experts
from .routing import Routing
from .rows import gather_rows, sum_rows
from .segments import to_device


class LocalExperts(Protocol):
    """A function that computes the segments of this rank's experts."""

    def __call__(self, rows: torch.Tensor, counts: Sequence[int], first: int = 0) -> torch.Tensor:
        """rows [R, h] -> [R, h]. The rows are sorted by expert: `counts[i]` rows for the local expert `first + i`."""
        ...


class RankReport:
    """The counts and errors that the ranks of a group report to each other before they exchange rows."""

    def __init__(self, gathered: torch.Tensor) -> None:
        self.counts = gathered[:, :-2].contiguous()
        """int64 [P, E]: number of rows of each rank for each expert."""
        self.bad_ranks: list[int] = gathered[:, -2].nonzero().view(-1).tolist()
        """Indices in the group of the ranks whose logits are not finite."""
        self.needs_grad = bool(gathered[:, -1].any())
        """Whether a rank of the group needs the gradient of its rows."""

    def routes_of(self, rank: int) -> int:
        """Number of rows that a rank of the group sends."""
        return int(self.counts[rank].sum())


def exchange_counts(tokens: torch.Tensor, routing: Routing, bad: torch.Tensor, exchange: Exchange) -> RankReport:
    """Exchange the counts and flags of all ranks of the group (collective).

    Args:
        tokens: [T, h], the tokens that will be dispatched.
        routing: the routes of these tokens.
        bad: 0-D bool, whether this rank's logits are not finite.
        exchange: the exchange of the group.
    """
    needs = bad.new_full((1,), tokens.requires_grad and torch.is_grad_enabled())
    flags = torch.cat([bad.view(1), needs]).to(routing.counts.dtype)
    return RankReport(exchange.gather_counts(torch.cat([routing.counts, flags])))


def counts_and_flag(routing: Routing, bad: torch.Tensor) -> tuple[list[int], bool]:
    """(number of rows for each expert, whether the logits are not finite), read with one wait for the device."""
    *counts, flag = torch.cat([routing.counts, bad.view(1).to(routing.counts.dtype)]).tolist()
    return counts, bool(flag)


def run_local(tokens: torch.Tensor, routing: Routing, experts: LocalExperts, counts: list[int]) -> torch.Tensor:
    """tokens [T, h] -> [T, h], with all experts on this rank. `counts`: number of rows for each expert."""
    out = experts(gather_rows(tokens, routing), counts)
    return combine(out, routing).to(tokens.dtype)


def run_exchanged(
    tokens: torch.Tensor,
    routing: Routing,
    experts: LocalExperts,
    exchange: Exchange,
    report: RankReport,
    chunks: int = 1,
    during_transfer: Callable[[], object] | None = None,
) -> torch.Tensor:
    """tokens [T, h] -> [T, h], with the experts divided among the ranks of `exchange` (collective).

    Args:
        tokens: [T, h].
        routing: the routes of these tokens.
        experts: this rank's experts.
        exchange: the exchange of the group.
        report: from `exchange_counts`.
        chunks: number of parts in which rows are sent; the transfer of one part overlaps with the experts' work on
            another.
        during_transfer: called once while the first rows are sent, for work that does not need them.
    """
    plan = plan_experts(report.counts, exchange.rank, chunks)
    if plan.order is not None:
        routing = _reordered(routing, to_device(plan.order, routing.token.device))
    rows = gather_rows(tokens, routing)
    if report.needs_grad and torch.is_grad_enabled() and not rows.requires_grad:
        rows.requires_grad_()  # the backward must run here too: another rank waits for gradients of rows it sent here
    out = _pipeline(rows, plan, experts, exchange, during_transfer)
    return combine(out, routing).to(tokens.dtype)


def combine(rows: torch.Tensor, routing: Routing) -> torch.Tensor:
    """rows [R, h] -> [T, h]: the weighted sum of each token's rows, in float32 or float64."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    return sum_rows(rows.to(wide) * routing.weight.to(wide).unsqueeze(1), routing)


def _pipeline(
    rows: torch.Tensor,
    plan: ExpertPlan,
    experts: LocalExperts,
    exchange: Exchange,
    during_transfer: Callable[[], object] | None,
) -> torch.Tensor:
    """While the experts work on chunk c, chunk c + 1 is sent to the experts and chunk c - 1 is sent back.

    Chunk c - 1 is received once chunk c is on its way back, and not behind the loop. Autograd goes through these calls
    from the last one to the first, so that a backward has the same order: one chunk of gradients is on the link ahead
    of the one that the experts work on. Received behind the loop, all gradients would be sent at once, and the first
    result of the experts' backward would wait on the link behind all of them.
    """
    parts = rows.split(list(plan.sizes))
    to_experts = [Link(exchange, chunk.traffic) for chunk in plan.chunks]
    from_experts = [Link(exchange, chunk.traffic.t()) for chunk in plan.chunks]
    tickets = [send_rows(parts[0], to_experts[0])]
    if during_transfer is not None:
        during_transfer()
    returning: list[torch.Tensor] = []
    finished: list[torch.Tensor] = []
    for c, chunk in enumerate(plan.chunks):
        if c + 1 < len(parts):
            tickets.append(send_rows(parts[c + 1], to_experts[c + 1]))
        received = receive_rows(tickets[c], to_experts[c])
        order = chunk.order_by_expert()
        if order is None:
            done = experts(received, chunk.counts, chunk.first)
        else:
            order = to_device(order, received.device)
            by_expert = _permute(received, order)
            done = _unpermute(experts(by_expert, chunk.counts, chunk.first), order)
        returning.append(send_rows(done, from_experts[c]))
        if c:
            finished.append(receive_rows(returning[c - 1], from_experts[c - 1]))
    finished.append(receive_rows(returning[-1], from_experts[-1]))
    return finished[0] if len(finished) == 1 else torch.cat(finished)


def _reordered(routing: Routing, order: torch.Tensor) -> Routing:
    """The same routes in another order. `counts` is kept, but the routes of an expert need not be consecutive then."""
    place = torch.empty(order.numel() + 1, dtype=order.dtype, device=order.device)
    place[order] = torch.arange(order.numel(), device=order.device)
    place[-1] = order.numel()  # the slots of dropped routes have this index
    return replace(
        routing,
        token=routing.token[order],
        expert=routing.expert[order],
        weight=routing.weight[order],
        slot=place[routing.slot],
    )


def _permute(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return gather_rows(rows, _permutation(order))


def _unpermute(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return sum_rows(rows, _permutation(order))


def _permutation(order: torch.Tensor) -> Routing:
    """A routing with one route per row. With it `gather_rows` permutes rows without a scatter in the backward."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    empty = order.new_zeros(0)
    return Routing(order, order, empty, inverse.unsqueeze(1), empty, empty)
