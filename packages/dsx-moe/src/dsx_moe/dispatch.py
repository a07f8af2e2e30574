"""Tokens to experts and back: permute by expert, send, compute segments, return, combine.

    rows  = tokens of the routes, sorted by expert          [R, h]
    sent  -> experts' ranks, exact splits, chunk by chunk
    out[t] = sum over t's routes of weight * expert(row), added up in float32 (float64 for float64)

The same code is used for dropping and dropless routings, for one rank and many. Every rank takes part in every
transfer, in forward and backward, also with zero rows, and experts that received no rows run on zero rows: their
parameters then get zero gradients, and no rank waits for another one that skipped its part.
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


class LocalExperts(Protocol):
    """What computes the segments of this rank's experts."""

    def __call__(self, rows: torch.Tensor, counts: Sequence[int], first: int = 0) -> torch.Tensor:
        """[R, h]: `counts[i]` rows each for the experts first, first + 1, ...; as many rows come back."""
        ...


class RankReport:
    """What the ranks of a group tell each other before they exchange rows, beside the counts of their routes."""

    def __init__(self, gathered: torch.Tensor) -> None:
        self.counts = gathered[:, :-2].contiguous()
        """int64 [P, E]: rows per expert, of every rank."""
        self.bad_ranks: list[int] = gathered[:, -2].nonzero().view(-1).tolist()
        """Places in the group of ranks whose logits are not finite."""
        self.needs_grad = bool(gathered[:, -1].any())
        """Whether the gradient of the rows is needed on any rank."""


def exchange_counts(tokens: torch.Tensor, routing: Routing, bad: torch.Tensor, exchange: Exchange) -> RankReport:
    """Tell the ranks of the group this rank's counts (collective).

    Args:
        tokens: what will be dispatched.
        routing: where to.
        bad: 0-D bool, whether this rank has to give up.
        exchange: of the group.
    """
    needs = torch.tensor([tokens.requires_grad and torch.is_grad_enabled()], device=bad.device)
    flags = torch.cat([bad.view(1), needs]).to(routing.counts.dtype)
    return RankReport(exchange.gather_counts(torch.cat([routing.counts, flags])))


def run_local(tokens: torch.Tensor, routing: Routing, experts: LocalExperts) -> torch.Tensor:
    """[T, h] to [T, h] with all experts on this rank."""
    out = experts(gather_rows(tokens, routing), routing.counts.tolist())
    return combine(out, routing).to(tokens.dtype)


def run_exchanged(
    tokens: torch.Tensor,
    routing: Routing,
    experts: LocalExperts,
    exchange: Exchange,
    report: RankReport,
    chunks: int = 1,
    beside: Callable[[], object] | None = None,
) -> torch.Tensor:
    """[T, h] to [T, h] with the experts spread over the ranks of `exchange` (collective).

    Args:
        report: from `exchange_counts`.
        chunks: parts in which rows are sent; the transfer of one part and the experts' work on another overlap.
        beside: called once while the first rows are under way: work that does not need them.
    """
    plan = plan_experts(report.counts, exchange.rank, chunks)
    if plan.order is not None:
        routing = _in_order(routing, plan.order.to(routing.token.device))
    rows = gather_rows(tokens, routing)
    if report.needs_grad and torch.is_grad_enabled() and not rows.requires_grad:
        rows.requires_grad_()  # another rank waits for the gradients of what it sent here
    out = _pipeline(rows, plan, experts, exchange, beside)
    return combine(out, routing).to(tokens.dtype)


def combine(rows: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[R, h] to [T, h]: the weighted sum of each token's rows, in float32 or wider."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    return sum_rows(rows.to(wide) * routing.weight.to(wide).unsqueeze(1), routing)


def _pipeline(
    rows: torch.Tensor,
    plan: ExpertPlan,
    experts: LocalExperts,
    exchange: Exchange,
    beside: Callable[[], object] | None,
) -> torch.Tensor:
    """Chunk c + 1 is sent to the experts and chunk c - 1 back while the experts work on chunk c."""
    parts = rows.split(list(plan.sizes))
    there = [Link(exchange, chunk.traffic) for chunk in plan.chunks]
    back = [Link(exchange, chunk.traffic.t()) for chunk in plan.chunks]
    tickets = [send_rows(parts[0], there[0])]
    if beside is not None:
        beside()
    returning = []
    for c, chunk in enumerate(plan.chunks):
        if c + 1 < len(parts):
            tickets.append(send_rows(parts[c + 1], there[c + 1]))
        received = receive_rows(tickets[c], there[c])
        order = chunk.order_by_expert()
        if order is None:
            done = experts(received, chunk.counts, chunk.first)
        else:
            order = order.to(received.device)
            by_expert = _permute(received, order)
            done = _unpermute(experts(by_expert, chunk.counts, chunk.first), order)
        returning.append(send_rows(done, back[c]))
    finished = [receive_rows(ticket, link) for ticket, link in zip(returning, back)]
    return finished[0] if len(finished) == 1 else torch.cat(finished)


def _in_order(routing: Routing, order: torch.Tensor) -> Routing:
    """The same routes in another order. The `counts` are then no longer the sizes of consecutive segments."""
    place = torch.empty(order.numel() + 1, dtype=order.dtype, device=order.device)
    place[order] = torch.arange(order.numel(), device=order.device)
    place[-1] = order.numel()  # where the slots of dropped routes point
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
    """A routing of one route per row: what `gather_rows` takes to permute without a scatter in backward."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    empty = order.new_zeros(0)
    return Routing(order, order, empty, inverse.unsqueeze(1), empty, empty)
