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

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import dsx_comm
import dsx_comm.buckets
import torch
from dsx_comm import parallel_groups
from dsx_comm.registry import AxisGroup
from torch import nn

from .errors import MoEConfigError
from .experts import ExpertShard
from .groups import data_ranks, groups_in
from .marks import is_moe_param

_BUCKET = 1 << 24
"""Number of elements in one collective: 64 MiB of float32."""


def broadcast_parameters(model: nn.Module) -> None:
    """Give every rank the same parameters and buffers (collective).

    Dense parameters come from the first data-parallel rank, experts from the first rank that holds them.

    Raises:
        MoEConfigError: experts are sliced over ranks that are not the model axis of the topology.
    """
    if not dsx_comm.is_initialized():
        return
    _check_slices(model)
    data = data_ranks(model)
    expert_buffers = {id(b) for m in model.modules() for b in _expert_buffers(m)}
    with torch.no_grad():
        for parameter in model.parameters():
            _broadcast(parameter, _holders(model, parameter) if is_moe_param(parameter) else data)
        for buffer in model.buffers():
            if id(buffer) not in expert_buffers:
                _broadcast(buffer, data)


def average_gradients(model: nn.Module, *, experts_only: bool = False) -> None:
    """Replace every gradient by the gradient of the mean loss of all data-parallel ranks (collective).

    Args:
        model: after its backward.
        experts_only: leave the dense gradients alone, which DistributedDataParallel or FSDP2 averages.

    Raises:
        MoEConfigError: an expert parameter belongs to a group that does not exist, or experts are sliced over ranks
            that are not the model axis of the topology.
    """
    if not dsx_comm.is_initialized():
        return
    _check_slices(model)
    data = data_ranks(model)
    by_group: dict[str | None, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        if parameter.requires_grad and (is_moe_param(parameter) or not experts_only):
            by_group[getattr(parameter, "group_name", None) if is_moe_param(parameter) else None].append(parameter)
    for name in sorted(by_group, key=str):
        where = data if name is None else _expert_groups(model, name)[1]
        _reduce(by_group[name], where, data.size)


def clip_grad_norm_(model: nn.Module, max_norm: float, eps: float = 1e-6) -> torch.Tensor:
    """Scale all gradients so that their 2-norm is at most `max_norm`, and return the norm before (0-D; collective).

    The norm is that of the whole model: each dense parameter counts once, and so does each expert, whichever rank holds
    it. Slices (Megatron's `tensor_model_parallel`) are summed over the model axis of the topology. Call it after
    `average_gradients`. If the norm is not finite, the gradients are not changed. `eps` is added to the norm before the
    division. The norm is float64 on the device of the parameters, and the host does not wait for it.

    Raises:
        MoEConfigError: experts are sliced over ranks that are not the model axis of the topology.
    """
    if dsx_comm.is_initialized():
        _check_slices(model)
    # gradients by (name of the expert group or None for dense parameters, whether the parameters are slices)
    kinds: dict[tuple[str | None, bool], list[torch.Tensor]] = defaultdict(list)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        name = str(getattr(parameter, "group_name", "")) if is_moe_param(parameter) else None
        held = kinds[name, bool(getattr(parameter, "tensor_model_parallel", False))]
        if parameter.grad is not None:
            held.append(parameter.grad.detach())
    device = parameters[0].device if parameters else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name, is_sliced in sorted(kinds, key=str):
        square = _sum_of_squares(kinds[name, is_sliced], device)
        total += _sum_over_holders(model, square, name, is_sliced)
    norm = total.sqrt()
    scale = torch.where(norm.isfinite(), (max_norm / (norm + eps)).clamp(max=1.0), 1.0)
    for grads in kinds.values():
        for grad in grads:
            grad.mul_(scale.to(grad.device))
    return norm


def _sum_of_squares(grads: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum of squares of all elements, float64 on the device; nothing is read on the host."""
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64).to(device) for grad in grads]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)


def _sum_over_holders(model: nn.Module, square: torch.Tensor, name: str | None, is_sliced: bool) -> torch.Tensor:
    """Sum over the ranks that hold different slices, and those that hold different experts (collective)."""
    if dsx_comm.is_initialized():
        groups = parallel_groups.given()
        if is_sliced and groups.size("tensor") > 1:
            dsx_comm.all_reduce(square, group=groups.axis("tensor").group)
        if name is not None:
            dsx_comm.all_reduce(square, group=_expert_groups(model, name)[0].group)
    return square


def _check_slices(model: nn.Module) -> None:
    """Raise an error if the topology does not know over which ranks experts are sliced.

    It would take the ranks of a tensor-parallel group for data-parallel ones, and mix different slices.
    """
    ranks = parallel_groups.given().size("tensor")
    for name, module in model.named_modules():
        if isinstance(module, ExpertShard) and module.slices.cuts and module.slices.size != ranks:
            raise MoEConfigError(
                f"{name or 'the model'}: its experts are sliced over {module.slices.size} ranks, but the model axis of "
                f"the topology has {ranks}; name the axis with dsx_comm.parallel_groups.use(GroupRegistry("
                'ProcessTopology(("data", "model"), ...)))'
            )


def _reduce(parameters: list[nn.Parameter], where: AxisGroup, divisor: int) -> None:
    kinds: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        kinds[parameter.grad.dtype, parameter.grad.device].append(parameter)
    for same in kinds.values():
        for bucket in dsx_comm.buckets.in_buckets(same, _BUCKET):
            grads = [p.grad for p in bucket if p.grad is not None]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            if where.size > 1:
                dsx_comm.all_reduce(flat, group=where.group)
            flat.div_(divisor)
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
                grad.copy_(part.view_as(grad))


def _holders(model: nn.Module, parameter: torch.Tensor) -> AxisGroup:
    return _expert_groups(model, str(getattr(parameter, "group_name", "")))[1]


def _expert_groups(model: nn.Module, name: str) -> tuple[AxisGroup, AxisGroup]:
    """(the ranks that divide the experts of a group name, the ranks that hold the same ones): those that the model's
    layers were built for, else those of `parallel_groups`.
    """
    if (layer := groups_in(model).get(name)) is not None:
        return layer.expert, layer.expert_data
    groups = parallel_groups.given()
    if name not in groups.expert_names():
        raise MoEConfigError(
            f"group_name: got {name!r}, expected one of {groups.expert_names()}; the layer was built before "
            "dsx_comm.init_distributed(), or the topology was changed since"
        )
    return groups.expert(name), groups.expert_data(name)


def _expert_buffers(module: nn.Module) -> Iterable[torch.Tensor]:
    return module.buffers() if any(map(is_moe_param, module.parameters(recurse=False))) else ()


def _broadcast(tensor: torch.Tensor, where: AxisGroup) -> None:
    if where.size > 1:
        data = tensor.detach()
        whole = data.contiguous()
        dsx_comm.broadcast(whole, where.ranks[0], group=where.group)
        if whole is not data:
            data.copy_(whole)
