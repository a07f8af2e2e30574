"""DeepSpeed's attributes that distinguish expert parameters from dense ones.

`allreduce = False` says that a parameter's gradient is not averaged over all data-parallel ranks. `group_name` is the
name of the expert groups to which it belongs. Optimizers, clipping and checkpoints of other packages read this public
convention.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .errors import MoEConfigError


def mark_expert_parameters(module: nn.Module, group_name: str) -> None:
    """Mark all parameters of a module as expert parameters of the groups `group_name`, such as "ep_size_4"."""
    for parameter in module.parameters():
        parameter.allreduce = False  # type: ignore[attr-defined]
        parameter.group_name = group_name  # type: ignore[attr-defined]


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether a parameter belongs to an expert."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """Whether an optimizer's parameter group has expert parameters."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(dense parameters, expert parameters), each in the given order."""
    found = list(params)
    return [p for p in found if not is_moe_param(p)], [p for p in found if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[nn.Parameter],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(gradients of dense parameters, gradients of expert parameters), each cast to its parameter's dtype.

    Parameters without a gradient are left out.
    """
    shared, expert = split_params_into_shared_and_expert_params(p for p in group if p.grad is not None)
    return _grads(shared), _grads(expert)


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float | None = 178956971
) -> list[dict[str, Any]]:
    """Split parameter groups so that none has both dense and expert parameters.

    This package and dsx do not need it, because they read the attributes of the parameters. It exists for scripts that
    call it, and for optimizers with different settings for experts.

    Args:
        param_groups: one group or several, each with "params", and with a "name" if it has expert parameters. They are
            not changed.
        max_group_size: largest number of elements of a group of expert parameters; larger ones are divided. None: no
            limit.

    Returns:
        The groups with their dense parameters, followed by the groups of expert parameters. There is at least one for
        each expert group name of each given group; it has the other settings of that group, the expert group's name as
        "name", and `moe=True`.

    Raises:
        MoEConfigError: a group is not a dict with "params", or has expert parameters and no "name".
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    dense, moe = [], []
    for i, group in enumerate(groups):
        if not isinstance(group, dict) or "params" not in group:
            raise MoEConfigError(f"param_groups[{i}]: got {type(group).__name__}, expected a dict with 'params'")
        params: list[Any] = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        shared, expert = split_params_into_shared_and_expert_params(params)
        if expert and "name" not in group:
            raise MoEConfigError(f"param_groups[{i}]: it holds expert parameters, so it needs a 'name'")
        dense.append({**group, "params": shared})
        by_name: dict[str, list[nn.Parameter]] = defaultdict(list)
        for parameter in expert:
            by_name[parameter.group_name].append(parameter)  # type: ignore[index]
        for name in sorted(by_name):
            for part in _parts(by_name[name], max_group_size):
                moe.append({**group, "name": name, "moe": True, "params": part})
    return dense + moe


def configure_moe_param_groups(model_parameters: Sequence[Any]) -> list[Any]:
    """`split_params_into_different_moe_groups_for_optimizer` for a list of parameters or of parameter groups.

    Groups that are split already are returned as they are.
    """
    given = list(model_parameters)
    if given and isinstance(given[0], dict):
        if any("moe" in group for group in given):
            return given
        return split_params_into_different_moe_groups_for_optimizer(given)
    return split_params_into_different_moe_groups_for_optimizer({"params": given, "name": "dense-params"})


def _grads(params: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad.to(p.dtype) for p in params if p.grad is not None]


def _parts(params: list[nn.Parameter], limit: float | None) -> list[list[nn.Parameter]]:
    parts: list[list[nn.Parameter]] = [[]]
    size = 0
    for parameter in params:
        if limit is not None and parts[-1] and size + parameter.numel() > limit:
            parts.append([])
            size = 0
        parts[-1].append(parameter)
        size += parameter.numel()
    return parts
