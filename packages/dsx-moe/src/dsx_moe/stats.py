"""What a layer did with the tokens of its last forward: what monitors, pictures and tests read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .routing import Routing


@dataclass(frozen=True)
class LayerStats:
    """The last forward of one layer on this rank; all tensors are detached.

    Attributes:
        requested: int64 [E], routes per expert before dropping.
        kept: int64 [E], routes per expert that the experts computed.
        l_aux: 0-D, the loss that the layer returned; None where the model's own router gives none.
    """

    requested: torch.Tensor
    kept: torch.Tensor
    l_aux: torch.Tensor | None

    @property
    def dropped_share(self) -> float:
        """Dropped routes over requested ones; 0 where nothing was requested."""
        asked = int(self.requested.sum())
        return (asked - int(self.kept.sum())) / asked if asked else 0.0

    @property
    def load(self) -> torch.Tensor:
        """float32 [E]: each expert's share of the requests, times E. 1 is even."""
        asked = self.requested.float()
        return asked * asked.numel() / asked.sum().clamp(min=1)


def stats_of(routing: Routing, l_aux: torch.Tensor | None) -> LayerStats:
    """The statistics of a routing."""
    return LayerStats(routing.requested, routing.counts, None if l_aux is None else l_aux.detach())
