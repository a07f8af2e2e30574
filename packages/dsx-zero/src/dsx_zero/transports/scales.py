"""The scales of weights that are sent in 8 bits, once per step: one message for the largest values of all of them.

A weight's own pre-hook finds its scale by an all-reduce for each weight and gather. torchao's float8 weights can be
told their scale beforehand. It is that of their hook: the largest number of the 8-bit dtype, divided by the largest
absolute value of the whole weight, in float64.

Left out: weights of other classes, and shards that are not in memory (on disk); their hooks find the scale.
"""

from __future__ import annotations

from collections.abc import Mapping

import dsx_comm
import torch

from ..params.flat import FlatGroup
from ..params.gather_hooks import GatherHooks

__all__ = ["Scales"]

_KIND, _SCALE, _DTYPE = "WeightWithDynamicFloat8CastTensor", "_precomputed_scale", "dtype"
_SMALLEST = 1e-12
"""The least absolute maximum, as in torchao's hook."""


class Scales:
    """The scales of one model's weights.

    Args:
        hooks: of each flat group with a weight that has them.
    """

    def __init__(self, hooks: Mapping[FlatGroup, GatherHooks]) -> None:
        self._hooks = {group: found for group, found in hooks.items() if found.kind == _KIND}
        self._known: dict[FlatGroup, int] = {}

    def update(self, group: FlatGroup) -> None:
        """Find the scales of all weights that share the ranks of `group`, unless its own is that of its present value
        (collective over these ranks, which all come here with the same gather).
        """
        if self._known.get(group) == group.generation or group not in self._hooks:
            return
        groups = [g for g in self._hooks if g.ranks == group.ranks and g.key.device == group.key.device]
        views = {g: view for g in groups if (view := g.shard.view()) is not None}
        for one in groups:
            self._hooks[one].attributes.pop(_SCALE, None)
            self._known[one] = one.generation
        if len(views) < len(groups):
            return  # the hooks find them
        largest = torch.stack([_largest(view).to(group.key.device) for view in views.values()])
        dsx_comm.all_reduce(largest, op=dsx_comm.ReduceOp.MAX, group=group.ranks.gather_group)
        for one, value in zip(views, largest):
            self._hooks[one].attributes[_SCALE] = _scale(value, self._hooks[one])


def _largest(shard: torch.Tensor) -> torch.Tensor:
    if not shard.numel():
        return torch.zeros((), device=shard.device)
    return torch.linalg.vector_norm(shard, float("inf"), dtype=torch.float32)


def _scale(largest: torch.Tensor, hooks: GatherHooks) -> torch.Tensor:
    scale = torch.finfo(hooks.context[_DTYPE]).max / largest.to(torch.float64).clamp(min=_SMALLEST)
    return scale.to(torch.float32)
