"""The settings of one call of `shard`: its arguments as a `ZeroConfig`, sizes of pieces that fit the model, and what
has to be equal on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dsx_comm
import torch
from dsx_core import with_code
from torch import nn

from ._version import __version__
from .errors import ZeroConfigError
from .grads.reduction import Reduction
from .homes.chosen import (
    may_step_during_backward,
    offload_ratio,
    steps_during_backward,
)
from .homes.tiers import Placement
from .plan.units import ParameterInfo
from .precision import Precision

if TYPE_CHECKING:
    from .config import ZeroConfig

__all__ = ["bucket_size", "setting_facts", "settings_of", "without_tiny_pieces"]

_log = logging.getLogger(__name__)


def settings_of(stage: int | None, config: ZeroConfig | dict[str, Any] | None) -> ZeroConfig:
    from pydantic import ValidationError  # lazy import: pydantic costs import time

    from .config import PATH, ZeroConfig

    try:
        settings = config if isinstance(config, ZeroConfig) else ZeroConfig.model_validate(config or {})
        if stage is not None:
            if settings.stage != stage and "stage" in settings.model_fields_set:
                raise ZeroConfigError(
                    f"{PATH}.stage", f"got {settings.stage} in the config and stage={stage}; give one"
                )
            settings = ZeroConfig.model_validate({**settings.model_dump(exclude_unset=True), "stage": stage})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in (PATH, *first["loc"]))
        raise ZeroConfigError(path, f"{first['msg']} (got {first['input']!r})") from error
    settings.check_available()
    return settings


def setting_facts(settings: ZeroConfig, precision: Precision, reduction: Reduction) -> dict[str, str]:
    """The settings, as facts that must be equal on all ranks. Names of folders may differ."""
    given = settings.model_dump(mode="json", exclude={"offload_param", "offload_optimizer"})
    return {
        **{f"zero_optimization.{key}": repr(value) for key, value in given.items()},
        **{f"precision.{key}": str(value) for key, value in vars(precision).items()},
        **{f"reduction.{key}": str(value) for key, value in vars(reduction).items()},
        "torch": torch.__version__.split("+")[0],
        "dsx-zero": __version__,
    }


_MOST_PIECES = 1 << 10
_TINY_PIECE = 1 << 16
"""Elements: a piece of this size or more is accepted, however many there are."""


def without_tiny_pieces(settings: ZeroConfig, model: nn.Module, data: dsx_comm.RankSet) -> ZeroConfig:
    """The settings with sizes of pieces raised that would cut the model into more than `_MOST_PIECES` tiny ones: each
    costs the host a call or the ranks a message, so that a step would hardly end. Warns of them.
    """
    numel = sum(parameter.numel() for parameter in model.parameters())
    whole = {"reduce_bucket_size": numel, "allgather_bucket_size": numel, "sub_group_size": numel // data.size}
    raised = {}
    for name, elements in whole.items():
        least = min(_TINY_PIECE, elements // _MOST_PIECES)
        if settings.size(name) < least:
            raised[name] = least
            if data.rank == 0:
                text = (
                    "zero_optimization.%s: got %d, which would cut %d elements into %d pieces; uses %d. Set it to at"
                    " least that, or remove it"
                )
                pieces = -(-elements // settings.size(name))
                _log.warning(with_code(text, "DSX350"), name, settings.size(name), elements, pieces, least)
    return settings.model_copy(update=raised) if raised else settings


_RATIO_UNITS = 16
"""Units that a ratio of offload divides, at least: at stages 1 and 2 a unit is as large as a message."""

_EARLY_UNITS = 64
"""Units that are stepped while backward goes on, at least: the last one or two are stepped when it has ended."""

_EARLY_UNIT = 1 << 20
"""Elements of a unit that is stepped while backward goes on: smaller ones would cost more than they hide."""


def bucket_size(settings: ZeroConfig, infos: Sequence[ParameterInfo], placement: Placement) -> int:
    """Elements of a unit at stages 1 and 2, and of a reduction."""
    size, ratio = settings.size("reduce_bucket_size"), offload_ratio(settings)
    total = sum(info.numel for info in infos if info.trainable)
    if ratio not in (0.0, 1.0):
        return max(1, min(size, total // _RATIO_UNITS))
    if may_step_during_backward(placement) and steps_during_backward(settings):
        return min(size, max(_EARLY_UNIT, total // _EARLY_UNITS))
    return size
