"""Shards a model again that is sharded already: its optimizer is released, and its parameters are prepared to be
divided again.

Masters with more digits than the parameters, and optimizer states, are not kept; use a checkpoint for that.
"""

from __future__ import annotations

import logging

from dsx_core import with_code
from torch import nn

from .gather.registry import forget
from .homes.tiers import HostTier, Tier
from .params.init import InitParameter
from .params.partitioned import PartitionedParameter
from .params.partitioned_unit import UnitParameter
from .view import OWNERS

__all__ = ["release_model"]

_log = logging.getLogger(__name__)


def release_model(model: nn.Module) -> bool:
    """Release the optimizer that shards `model`, so that the model can be sharded again. Collective.

    That optimizer cannot step any more, and an engine around it is destroyed; a warning says so. Parameters that are
    partitioned stay so, under the same objects.

    Returns:
        Whether there was such an optimizer in use.
    """
    owners = {id(found[0]): found[0] for p in model.parameters() if (found := OWNERS.find(p)) is not None}
    mine = [owner for owner in owners.values() if owner.runtime.model is model and not owner.released]
    if mine:
        _save_from_stores(model)
    for owner in mine:
        if owner.runtime.ranks.rank == 0:
            text = (
                "the model is sharded already: the optimizer (and engine) that shards it at stage %d is released and"
                " cannot step any more"
            )
            _log.warning(with_code(text, "DSX355"), owner.runtime.stage)
        owner.release()
    forget(model)
    for parameter in model.parameters():
        if isinstance(parameter, PartitionedParameter) and isinstance(parameter.source, UnitParameter):
            owner = OWNERS.find(parameter)
            if owner is None or owner[0].released:
                parameter._source = _apart(parameter.source)
    return bool(mine)


def _save_from_stores(model: nn.Module) -> None:
    """Parts that lie in a store may go with their optimizer: bring them to host memory before it is released."""
    for parameter in model.parameters():
        source = parameter.source if isinstance(parameter, PartitionedParameter) else None
        if isinstance(source, UnitParameter) and source.group.shard.view() is None:
            parameter._source = _apart(source, HostTier(pin=False))  # type: ignore[union-attr]


def _apart(source: UnitParameter, tier: Tier | None = None) -> InitParameter:
    """The parameter outside of its unit, as `Init` would have made it."""
    return InitParameter.divide(source.name, source.full_tensor(), source.group.ranks, tier)
