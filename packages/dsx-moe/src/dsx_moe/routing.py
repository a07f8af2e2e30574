"""A routing: which tokens go to which experts with which weights, after routes above the capacity were dropped.

The idea: a *route* is one (token, expert, weight). Routes are kept as flat arrays sorted by expert, so that the rows of
one expert are consecutive; they are called a segment. No buffer of [experts, capacity] is ever made, so nothing is
padded, and the same arrays are used with and without dropping. Left out: how routes are chosen (`gating`) and how rows
are sent (`dispatch`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Routing:
    """The routes of one rank's tokens. There are R routes, T tokens, E experts, and at most K routes per token.

    Attributes:
        token: int64 [R], the token of each route; sorted by expert, then by the order of preference within the expert.
        expert: int64 [R], the expert of each route, ascending.
        weight: [R], floating point; the differentiable factor of the expert's output.
        slot: int64 [T, K], the index of each token's routes in the arrays above; R for a dropped route.
        counts: int64 [E], number of routes of each expert (the sizes of the segments).
        requested: int64 [E], number of routes to each expert before dropping.
        capacity: largest number of routes that an expert takes; None: no limit.
        uncut: dropped routes are still in the arrays, behind the others: R counts them, and `cut` removes them.
    """

    token: torch.Tensor
    expert: torch.Tensor
    weight: torch.Tensor
    slot: torch.Tensor
    counts: torch.Tensor
    requested: torch.Tensor
    capacity: int | None = None
    uncut: bool = False

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens that were routed."""
        return self.slot.shape[0]

    def cut(self, routes: int) -> Routing:
        """The same routing without its dropped routes. `routes`: the sum of `counts`, which the host has read."""
        if not self.uncut:
            return self
        return replace(
            self,
            token=self.token[:routes],
            expert=self.expert[:routes],
            weight=self.weight[:routes],
            slot=self.slot.clamp(max=routes),
            uncut=False,
        )

    def dropped_share(self) -> torch.Tensor:
        """The share of the requested routes that were dropped (0-D float32; 0 if none was requested)."""
        requested = self.requested.sum()
        return (requested - self.counts.sum()).float() / requested.clamp(min=1).float()

    def combine_weights(self, capacity: int | None = None) -> torch.Tensor:
        """The weights in the dense form [T, E, C] of published formulas.

        Entry [t, e, c] is the weight of token t if it is the c-th token of expert e, else 0.

        Args:
            capacity: C; None: the capacity of this routing, or the size of the largest segment if it has no limit.
        """
        if self.uncut:
            return self.cut(int(self.counts.sum())).combine_weights(capacity)
        limit = capacity or self.capacity or max(int(self.counts.max()), 1)
        starts = self.counts.cumsum(0) - self.counts
        place = torch.arange(self.token.numel(), device=self.token.device) - starts[self.expert]
        dense = self.weight.new_zeros(self.num_tokens, self.counts.numel(), limit)
        return dense.index_put((self.token, self.expert, place), self.weight)


def build_routing(
    experts: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    *,
    wanted: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    capacity: int | None = None,
    cut: bool = True,
) -> Routing:
    """Sort the choices of all tokens by expert.

    Args:
        experts: int64 [T, K], the chosen experts of each token, distinct within a row.
        weights: [T, K], the factor of each choice.
        num_experts: E.
        wanted: bool [T, K], the routes that were requested; None: all. Other routes are not counted.
        kept: bool [T, K], the routes that the capacity leaves; None: all that are wanted.
        capacity: recorded as `Routing.capacity`; it has no other effect.
        cut: False: dropped routes stay in the arrays (`Routing.uncut`). To remove them, the host has to wait for a
            device that knows their number.
    """
    choices = experts.shape[1]
    flat = experts.reshape(-1)
    wanted_flat = _flat_or_all(wanted, flat)
    kept_flat = wanted_flat if kept is None else kept.reshape(-1) & wanted_flat
    order = torch.where(kept_flat, flat, num_experts).sort(stable=True).indices
    requested = count_by_expert(flat, wanted_flat, num_experts)
    counts = requested if kept is None else count_by_expert(flat, kept_flat, num_experts)
    drops = wanted is not None or kept is not None
    routes = order[: int(counts.sum())] if drops and cut else order
    slot = torch.full_like(flat, routes.numel())
    slot[routes] = torch.arange(routes.numel(), device=flat.device)
    return Routing(
        token=routes.div(choices, rounding_mode="floor"),
        expert=flat[routes],
        weight=weights.reshape(-1)[routes],
        slot=slot.view(experts.shape),
        counts=counts,
        requested=requested,
        capacity=capacity,
        uncut=drops and not cut,
    )


def keep_most_preferred(
    experts: torch.Tensor, wanted: torch.Tensor, preference: torch.Tensor | None, num_experts: int, capacity: int
) -> torch.Tensor:
    """Choose for each expert the `capacity` routes with the largest preference; of equal ones the earlier route.

    Args:
        experts: int64 [R], the expert of each route, in the order of their priority.
        wanted: bool [R]; routes that are not wanted are not kept and take no capacity.
        preference: [R]; None: all are equal, so the earliest routes are kept.
        num_experts: E.
        capacity: largest number of routes per expert.

    Returns:
        bool [R], the routes that are kept.
    """
    order = torch.arange(experts.numel(), device=experts.device)
    if preference is not None:
        order = preference.sort(descending=True, stable=True).indices
    key = torch.where(wanted, experts, num_experts)[order]
    by_expert = key.sort(stable=True)
    order = order[by_expert.indices]
    sizes = count_by_expert(by_expert.values, torch.ones_like(wanted), num_experts + 1)
    starts = sizes.cumsum(0) - sizes
    place = torch.arange(order.numel(), device=order.device) - starts[by_expert.values]
    kept = torch.zeros_like(wanted)
    kept[order] = (place < capacity) & (by_expert.values < num_experts)
    return kept


def count_by_expert(experts: torch.Tensor, counted: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int64 [E]: how many of the routes to each expert are counted. `experts` int64 [R], `counted` bool [R].

    Unlike `torch.bincount` it does not make the host wait for a device.
    """
    return experts.new_zeros(num_experts).scatter_add_(0, experts, counted.to(experts.dtype))


def _flat_or_all(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(like, dtype=torch.bool) if mask is None else mask.reshape(-1)
