"""Statistics of a layer's last forward, for monitors, pictures and tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .routing import Routing


@dataclass(frozen=True)
class LayerStats:
    """Statistics of the last forward of one layer on this rank. All tensors are detached.

    Attributes:
        requested: int64 [E], number of routes to each expert before dropping.
        kept: int64 [E], number of routes that each expert computed.
        l_aux: 0-D, the loss that the layer returned; None for converted models, whose own router computes the loss.
    """

    requested: torch.Tensor
    kept: torch.Tensor
    l_aux: torch.Tensor | None

    @property
    def dropped_share(self) -> float:
        """Number of dropped routes divided by that of requested ones, from 0 to 1; 0 if none was requested."""
        requested = int(self.requested.sum())
        return (requested - int(self.kept.sum())) / requested if requested else 0.0

    @property
    def load(self) -> torch.Tensor:
        """float32 [E]: each expert's share of the requests, times E. 1 is an even load."""
        requested = self.requested.float()
        return requested * requested.numel() / requested.sum().clamp(min=1)


def stats_of(routing: Routing, l_aux: torch.Tensor | None) -> LayerStats:
    """The statistics of a routing."""
    return LayerStats(routing.requested, routing.counts, None if l_aux is None else l_aux.detach())
