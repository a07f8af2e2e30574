"""Training without an engine: equal initial values, averaged gradients, one norm, for dense and expert parameters.

    broadcast_parameters(model)
    for batch in loader:
        loss(model(batch)).backward()
        average_gradients(model)
        clip_grad_norm_(model, 1.0)
        optimizer.step(); optimizer.zero_grad()

With D data-parallel ranks, each with the mean loss of its own tokens, the loss is the mean over the ranks. A dense
gradient is the sum over the D ranks divided by D. An expert's gradient already contains the tokens of all ranks of
its expert-parallel group; it is summed over the ranks that hold the same expert, and also divided by D.
A parameter without a gradient counts as zeros, so a rank that skipped a layer does not stop the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import dsx_comm
import torch
from dsx_comm import AxisGroup, parallel_groups
from torch import nn

from .errors import MoEConfigError
from .marks import is_moe_param

_BUCKET = 1 << 24
"""Elements that are sent in one collective: 64 MiB of float32."""


def broadcast_parameters(model: nn.Module) -> None:
    """Give every rank the same parameters and buffers (collective).

    Dense ones come from the first data-parallel rank, experts from the first rank that holds them.
    """
    if not dsx_comm.is_initialized():
        return
    data = parallel_groups.current().axis("sequence_data")
    expert_buffers = {id(b) for m in model.modules() for b in _expert_buffers(m)}
    with torch.no_grad():
        for parameter in model.parameters():
            _broadcast(parameter, _holders(parameter) if is_moe_param(parameter) else data)
        for buffer in model.buffers():
            if id(buffer) not in expert_buffers:
                _broadcast(buffer, data)


def average_gradients(model: nn.Module) -> None:
    """Replace every gradient by that of the mean loss of all data-parallel ranks (collective).

    Raises:
        MoEConfigError: an expert parameter of a group that does not exist.
    """
    if not dsx_comm.is_initialized():
        return
    data = parallel_groups.current().axis("sequence_data")
    by_group: dict[str | None, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        if parameter.requires_grad:
            by_group[getattr(parameter, "group_name", None) if is_moe_param(parameter) else None].append(parameter)
    for name in sorted(by_group, key=str):
        where = data if name is None else _expert_data(name)
        _reduce(by_group[name], where, data.size)


def clip_grad_norm_(model: nn.Module, max_norm: float, eps: float = 1e-6) -> torch.Tensor:
    """Scale all gradients so that their 2-norm is at most `max_norm`, and return the norm before (0-D; collective).

    The norm is the true one: each dense gradient counts once, and each expert once, wherever it is. Call it after
    `average_gradients`. With a norm that is not finite the gradients are left alone. `eps` is added to the norm before
    the division.
    """
    dense = torch.zeros((), dtype=torch.float64)
    by_group: dict[str, torch.Tensor] = {}
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        square = torch.zeros((), dtype=torch.float64)
        if parameter.grad is not None:
            square = parameter.grad.detach().double().square().sum().cpu()
        if is_moe_param(parameter):
            name = str(getattr(parameter, "group_name", ""))
            by_group[name] = by_group.get(name, torch.zeros((), dtype=torch.float64)) + square
        else:
            dense = dense + square
    device = parameters[0].device if parameters else torch.device("cpu")
    for name in sorted(by_group):
        total = by_group[name].to(device)
        if dsx_comm.is_initialized():
            dsx_comm.all_reduce(total, group=parallel_groups.current().expert(name).group)
        dense = dense + total.cpu()
    norm = dense.sqrt()
    if math.isfinite(float(norm)):
        scale = min(1.0, max_norm / (float(norm) + eps))
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
    return norm


def _reduce(parameters: list[nn.Parameter], where: AxisGroup, divisor: int) -> None:
    kinds: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        kinds[parameter.grad.dtype, parameter.grad.device].append(parameter)
    for same in kinds.values():
        for bucket in dsx_comm.in_buckets(same, _BUCKET):
            grads = [p.grad for p in bucket if p.grad is not None]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            if where.size > 1:
                dsx_comm.all_reduce(flat, group=where.group)
            flat.div_(divisor)
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
                grad.copy_(part.view_as(grad))


def _holders(parameter: torch.Tensor) -> AxisGroup:
    return _expert_data(str(getattr(parameter, "group_name", "")))


def _expert_data(name: str) -> AxisGroup:
    groups = parallel_groups.current()
    if name not in groups.expert_names():
        raise MoEConfigError(
            f"group_name: got {name!r}, expected one of {groups.expert_names()}; the layer was built before "
            "dsx_comm.init_distributed(), or the topology was changed since"
        )
    return groups.expert_data(name)


def _expert_buffers(module: nn.Module) -> Iterable[torch.Tensor]:
    return module.buffers() if any(map(is_moe_param, module.parameters(recurse=False))) else ()


def _broadcast(tensor: torch.Tensor, where: AxisGroup) -> None:
    if where.size > 1:
        data = tensor.detach()
        whole = data.contiguous()
        dsx_comm.broadcast(whole, where.ranks[0], group=where.group)
        if whole is not data:
            data.copy_(whole)
