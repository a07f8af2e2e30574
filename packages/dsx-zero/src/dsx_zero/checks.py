"""Checks of `shard` before it changes anything: models and optimizers that it cannot divide are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from dsx_core.errors import first_few
from torch import nn

from .errors import ZeroModelError, ZeroOptimizerError
from .optimizer import ZeroOptimizer
from .params.init import InitParameter
from .params.partitioned import PartitionedParameter
from .plan.units import ParameterInfo, RanksOf, find_parameters
from .step.masters import check_optimizer
from .view import OWNERS

__all__ = ["check_given", "check_marked_in_time", "check_model", "check_not_wrapped", "check_values"]

_WRAPPERS: Mapping[str, str] = {
    "DistributedDataParallel": "averages gradients itself",
    "FullyShardedDataParallel": "divides the parameters itself",
    "FSDPModule": "divides the parameters itself",
    "DataParallel": "copies the model in every forward",
}


_LINES: Mapping[str, str] = {"FSDPModule": "fully_shard(...), one for each block and one for the model"}
"""The calls that make a wrapper, where they are not its name."""


def check_not_wrapped(model: nn.Module) -> None:
    """Refuse a model that torch distributes already. Raises ZeroModelError, which names the wrapper."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__module__.startswith("torch.") and (does := _WRAPPERS.get(kind.__name__)) is not None:
                place = f"the model's {name!r}" if name else "the model"
                lines = _LINES.get(kind.__name__, f"{kind.__name__}(model)")
                raise ZeroModelError(
                    f"{place} is wrapped by torch's {kind.__name__}, which {does}; dsx_zero does that in its place."
                    f" Build the model again and give it to dsx_zero.shard without the wrapper: remove the lines that"
                    f" call {lines} and that make an optimizer of its parameters; shard takes the callable that makes"
                    " one"
                )


def check_given(optimizer: Any, *, stage: int) -> None:
    """Refuse an optimizer that cannot be used, before anything is changed."""
    if isinstance(optimizer, ZeroOptimizer):
        raise ZeroOptimizerError("the optimizer is sharded already; give dsx_zero.shard the plain one")
    if isinstance(optimizer, torch.optim.Optimizer):
        check_optimizer(optimizer, stage=stage)
    elif optimizer is not None and not callable(optimizer):
        raise ZeroOptimizerError(
            f"optimizer: got {type(optimizer).__name__}, expected a torch.optim.Optimizer, a callable that makes one of"
            " parameters, or None"
        )


def check_model(model: nn.Module, infos: Sequence[ParameterInfo]) -> None:
    for info in infos:
        if info.device.type == "meta":
            raise ZeroModelError(
                f"{info.name}: is on the meta device and has no values; materialise the model (model.to_empty and"
                " initialise) first"
            )
        if info.trainable and not info.dtype.is_floating_point:
            raise ZeroModelError(
                f"{info.name}: trainable parameters must be of a real floating-point dtype, got {info.dtype}"
            )
    trainable = {info.name: info.trainable for info in infos}
    for name, parameter in model.named_parameters():
        partitioned = isinstance(parameter, PartitionedParameter) and not isinstance(parameter.source, InitParameter)
        if partitioned or _is_taken(parameter, trainable[name]):
            raise ZeroModelError(
                f"{name}: is sharded already, as part of another model whose optimizer is in use; two optimizers cannot"
                " share a parameter. Give one optimizer all groups at once, or call release() of the other one"
                " (destroy() of its engine) before"
            )


def check_marked_in_time(model: nn.Module, ranks_of: RanksOf) -> None:
    """Refuse experts that `Init` has divided among all ranks: it has given every rank the values of the first rank."""
    for info in find_parameters(model):
        parameter = model.get_parameter(info.name)
        if info.marks.expert is None or not isinstance(parameter, PartitionedParameter):
            continue
        source, holders = parameter.source, ranks_of(info).size
        if isinstance(source, InitParameter) and source.ranks.size != holders:
            raise ZeroModelError(
                f"{info.name}: is an expert's (allreduce=False), but dsx_zero.Init divided it among {source.ranks.size}"
                f" ranks before it was marked, and only {holders} hold it: all experts have the values of one. Build"
                " and mark experts inside `with dsx_zero.Init.paused():`, which may lie in a constructor"
            )


def check_values(model: nn.Module) -> None:
    """Refuse parameters that `Init` made on the meta device and that have no values yet."""
    empty = [
        name
        for name, parameter in model.named_parameters()
        if isinstance(parameter, PartitionedParameter)
        and isinstance(parameter.source, InitParameter)
        and not parameter.source.has_values
    ]
    if empty:
        raise ZeroModelError(
            f"{first_few(empty)}: made on the meta device under dsx_zero.Init, and without values; fill the"
            " model with dsx_zero.load_weights(model, path) first, or write these parameters on every rank"
            " (p.data.normal_())"
        )


def _is_taken(parameter: torch.Tensor, trainable: bool) -> bool:
    """Whether sharding would take a parameter's memory from another optimizer that steps it, or give it a second one
    that does. What both leave frozen may be shared.
    """
    owner = OWNERS.find(parameter)
    if owner is None or owner[0].released:
        return False
    return trainable or owner[0].layout.group_of(owner[1]).trainable
