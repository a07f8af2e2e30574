"""Checks of a parameter group and of the arguments of the compressed optimizers; errors name the argument."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from dsx_core import with_code

from ..collectives import all_gather
from ..errors import CommArgumentError, CommError
from ..fingerprint import fingerprint
from ..groups import get_rank, get_world_size, is_initialized, member

_log = logging.getLogger(__name__)

Compression = Literal["on", "off"]


def check_compression(value: Any) -> Compression:
    """`value` if it is one of the two.

    Raises:
        CommArgumentError: it is not.
    """
    if value not in ("on", "off"):
        raise CommArgumentError(
            f'compression: got {value!r}, expected "on" or "off"; whether it saves time on your links is said by `dsx'
            " plan`"
        )
    return value


BACKENDS = ("nccl", "mpi", "hccl", "compressed", "gloo", "dsx")


def masks_of(group: dict[str, Any]) -> list[torch.Tensor | None]:
    """One mask (or None) per parameter of a group, each of a shape that broadcasts to the parameter's.

    A flattened mask, of as many elements as the parameter, gets the parameter's shape: scripts for BERT flatten theirs.

    Raises:
        CommArgumentError: there is not one mask per parameter, or a mask fits in neither way.
    """
    given, count = group.get("exp_avg_mask"), len(group["params"])
    masks = list(given) if isinstance(given, (list, tuple)) else [given] * count
    if len(masks) != count:
        raise CommArgumentError(f"exp_avg_mask: got {len(masks)} masks for a group of {count} parameters")
    return [_fitted(mask, parameter) for mask, parameter in zip(masks, group["params"])]


def find_masks(
    groups: Iterable[dict[str, Any]], states: Mapping[torch.Tensor, dict[str, Any]]
) -> dict[int, torch.Tensor]:
    """The fp32 mask of each parameter that has one, by the parameter's id: 0 where its group masks it, and where its
    variance is 0, because it never had a gradient.
    """
    found: dict[int, torch.Tensor] = {}
    for group in groups:
        for parameter, given in zip(group["params"], masks_of(group)):
            mask = None
            if given is not None:
                mask = given.to(parameter.device, torch.float32).expand(parameter.shape).clone()
            never = states[parameter]["exp_avg_sq"] == 0
            if never.any():
                alive = (~never).to(torch.float32)
                mask = alive if mask is None else mask * alive
            if mask is not None:
                found[id(parameter)] = mask
    return found


def _fitted(mask: Any, parameter: torch.Tensor) -> torch.Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor):
        raise CommArgumentError(
            f"exp_avg_mask: got {type(mask).__name__}, expected a tensor, a list of tensors, or None"
        )
    try:
        if torch.broadcast_shapes(mask.shape, parameter.shape) == parameter.shape:
            return mask
    except RuntimeError:  # the shapes do not broadcast; it may be flattened
        pass
    if mask.dim() == 1 and mask.numel() == parameter.numel():
        return mask.reshape(parameter.shape)
    raise CommArgumentError(
        f"exp_avg_mask: got shape {tuple(mask.shape)} for a parameter of shape {tuple(parameter.shape)}; "
        "expected a shape that "
        f"broadcasts to it, or ({parameter.numel()},), the parameter flattened"
    )


def check_group(group: dict[str, Any], index: int, may_skip_freezing: bool) -> None:
    """Refuse a group whose values cannot be.

    Raises:
        CommArgumentError: with the place of the value.
    """
    where = f"param_groups[{index}]"
    checks = {
        "lr": (group["lr"] >= 0, "a number of at least 0"),
        "eps": (group["eps"] > 0, "a number above 0"),
        "weight_decay": (group["weight_decay"] >= 0, "a number of at least 0"),
        "betas": (len(group["betas"]) == 2 and all(0 <= b < 1 for b in group["betas"]), "two numbers in [0, 1)"),
    }
    for name, (fine, expected) in checks.items():
        if not fine:
            raise CommArgumentError(f"{where}.{name}: got {group[name]!r}, expected {expected}")
    if group.get("amsgrad"):
        raise CommArgumentError(
            f"{where}.amsgrad: got True; a frozen variance has no maximum to keep, leave amsgrad out"
        )
    if group.get("max_grad_norm"):
        raise CommArgumentError(
            f"{where}.max_grad_norm: got {group['max_grad_norm']!r}, expected 0: the optimizer does not "
            "clip; dsx clips where its configuration "
            "says so, in a plain loop clip each rank's gradients before step()"
        )
    if group.get("non_freeze") and not may_skip_freezing:
        raise CommArgumentError(f"{where}.non_freeze: only OneBitAdam has groups that are never frozen")
    for parameter in group["params"]:
        if not parameter.is_floating_point():
            raise CommArgumentError(f"{where}: got a parameter of {parameter.dtype}, expected a real floating dtype")
    masks_of(group)


def check_floor(value: float) -> float:
    """`value` if it is a share.

    Raises:
        CommArgumentError: it is not in [0, 1].
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise CommArgumentError(f"variance_floor: got {value!r}, expected a number from 0 to 1")
    return float(value)


def check_freezing(freeze_step: Any, window: Any) -> None:
    """Refuse a variance that is frozen before it has come from a step, or averaged over more steps than there are.

    Raises:
        CommArgumentError: with the name of the argument.
    """
    if isinstance(freeze_step, bool) or not isinstance(freeze_step, int) or freeze_step < 1:
        raise CommArgumentError(
            f"freeze_step: got {freeze_step!r}, expected a whole number of at least 1 (the variance needs "
            "a step to come from)"
        )
    if isinstance(window, bool) or not isinstance(window, int) or not 0 <= window <= freeze_step:
        raise CommArgumentError(
            f"variance_window: got {window!r}, expected a whole number from 0 to freeze_step, {freeze_step}"
        )


def check_backend(name: str | None, cuda_aware: bool) -> None:
    """Refuse unknown backend names; say what means nothing.

    Raises:
        CommArgumentError: the name is not one of `BACKENDS`.
    """
    if name is not None and name not in BACKENDS:
        raise CommArgumentError(
            f"comm_backend_name: got {name!r}, expected one of {', '.join(BACKENDS)} (or None); the "
            "optimizer communicates over "
            "its process group's backend, whatever this says"
        )
    if cuda_aware:
        _log.warning("cuda_aware means nothing here: tensors go to the process group's backend as they are")


def say_unused_backend(name: str, group: Any, device_type: str) -> None:
    """One line where `comm_backend_name` is not the backend that the process group has for tensors of a device."""
    if not is_initialized() or get_world_size(group) == 1:
        return
    backend = member(group).backends.get(device_type)
    if name not in (backend, "compressed") and get_rank(group) == 0:  # "compressed" means any backend
        _log.warning(
            "comm_backend_name %r is not used: messages go over the process group's backend, %s", name, backend
        )


def check_start(parameters: Sequence[torch.Tensor], group: Any) -> None:
    """Compare parameters before their first step with those of the other ranks. Collective; 16 bytes per parameter.

    Ranks that start apart stay apart, because a step gives all of them the same change. Gradients are compared too:
    where all ranks have the same, something has averaged them already, and the optimizer saves no communication.

    Raises:
        CommError: the ranks have different values; on all ranks.
    """
    gradients = [p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse]
    numbers = [*map(fingerprint, parameters), *map(fingerprint, gradients)]
    numbers += [0] * (2 * len(parameters) - len(numbers))  # ranks may have different numbers of gradients
    mine = torch.tensor(numbers, dtype=torch.int64, device=parameters[0].device)
    gathered = [torch.empty_like(mine) for _ in range(get_world_size(group))]
    all_gather(gathered, mine, group)
    differ = (torch.stack(gathered) != gathered[0]).cpu()
    apart = differ[:, : len(parameters)]
    if apart.any():
        index = int(apart.any(dim=0).nonzero()[0])
        ranks = ", ".join(str(int(rank)) for rank in apart[:, index].nonzero())
        raise CommError(
            f"the ranks start with different parameters: {int(apart.any(dim=0).sum())} of {len(parameters)} differ (the"
            f" first is number {index}, of shape {tuple(parameters[index].shape)}, other on rank {ranks} than on rank"
            " 0), and no step would ever make them equal. Before training give all ranks those of rank 0: `for tensor"
            " in model.state_dict().values(): dsx_comm.broadcast(tensor, 0)`"
        )
    if any(g.any() for g in gradients) and not differ.any() and get_rank(group) == 0:
        text = (
            "1-bit optimizer: all %d ranks have the same gradients in the first step. Either DistributedDataParallel"
            " has averaged them (leave it out: the optimizer averages by itself, and sends less), or all ranks train on"
            " the same samples"
        )
        _log.warning(with_code(text, "DSX253"), get_world_size(group))
