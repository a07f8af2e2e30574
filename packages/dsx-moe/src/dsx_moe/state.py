"""Checkpoints without an engine: one state dict of all experts, which loads with any number of ranks.

    full = full_state_dict(model)                            # on every rank; names and shapes of a model on one rank
    optimizer_state = full_optimizer_state_dict(model, optimizer)
    ...
    model.load_state_dict(full)                              # with any expert-parallel size; ranks take their experts
    load_full_optimizer_state_dict(model, optimizer, optimizer_state)

Tensors of experts are gathered one at a time over the ranks among which they are divided, on their device, and are then
copied to the host. Left out: files (use any format), and models that ZeRO has sharded (its engine writes checkpoints).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import dsx_comm
import torch
from dsx_comm import parallel_groups
from dsx_comm.registry import AxisGroup
from torch import nn

from .errors import ExpertStateError
from .experts import Experts, ExpertShard
from .groups import ExpertGroups, groups_in


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict that the model would have on one rank, in host memory of every rank (collective)."""
    return _gathered(model, {name: value for name, value in model.state_dict().items()})


def full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state by parameter name, of all experts (collective).

    Returns:
        {"state": {name: {key: value}}, "param_groups": [{..., "params": names}]}; "param_groups" has the names of the
        experts of all ranks.

    Raises:
        ExpertStateError: a parameter of the optimizer is not in this model, or a tensor of an expert's state has
            neither the shape of the expert nor one element.
    """
    names = {id(p): name for name, p in _named_parameters(model)}
    by_key: dict[str, dict[str, torch.Tensor]] = {}
    state: dict[str, dict[str, Any]] = {}
    groups = []
    for group in optimizer.param_groups:
        members = []
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ExpertStateError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model lacks"
                )
            name = names[id(parameter)]
            members.append(name)
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim():
                    by_key.setdefault(key, {})[name] = value
                elif isinstance(value, torch.Tensor) and value.numel() != 1 and _shard_of(model, name) is not None:
                    raise ExpertStateError(
                        f"{name}: its optimizer state {key!r} has the shape {tuple(value.shape)}, expected "
                        f"{tuple(parameter.shape)} or one number"
                    )
                else:
                    for full_name in _names_on_all_ranks(model, name):
                        state.setdefault(full_name, {})[key] = value
        all_names = [full for name in members for full in _names_on_all_ranks(model, name)]
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": all_names})
    for key in sorted(by_key):
        for name, value in _gathered(model, by_key[key]).items():
            state.setdefault(name, {})[key] = value
    return {"state": state, "param_groups": groups}


def load_full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Load what `full_optimizer_state_dict` returned, with any number of ranks.

    The settings of parameter groups are matched by position.

    Args:
        model: the model, with its experts divided as they are now.
        optimizer: a plain optimizer over the model's parameters.
        state_dict: the states of all experts by parameter name, the same on every rank.

    Raises:
        ExpertStateError: the number of groups differs, a name is missing, or a shape differs. Nothing is changed then.
    """
    names = {id(p): name for name, p in _named_parameters(model)}
    groups = state_dict["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise ExpertStateError(f"got {len(groups)} parameter groups, expected {len(optimizer.param_groups)}")
    found: dict[nn.Parameter, dict[str, Any]] = {}
    listed = {name for group in groups for name in group["params"]}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None or name not in listed:
                raise ExpertStateError(f"{name or 'a parameter'}: the optimizer state has no such name")
            found[parameter] = {
                key: _part_of_this_rank(model, name, key, parameter, value)
                for key, value in state_dict["state"].get(name, {}).items()
            }
    for group, saved in zip(optimizer.param_groups, groups):
        group.update({k: v for k, v in saved.items() if k != "params"})
    for parameter, values in found.items():
        if values:
            optimizer.state[parameter] = values


@dataclass(frozen=True)
class ExpertSlice:
    """The part of a tensor of all experts that this rank holds.

    Attributes:
        name: name of the tensor in a model with all experts on one rank.
        shape: its shape in that model.
        offset, size: start and size, per dimension, of the box that this rank holds.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]


def expert_slices(model: nn.Module) -> dict[str, ExpertSlice]:
    """Name on this rank -> slice, for all parameters and buffers of experts that are divided among ranks."""
    found: dict[str, ExpertSlice] = {}
    for prefix, shard in _shards(model):
        if shard.count == shard.num_experts and not shard.slices.cuts:
            continue
        for tail, tensor in [*shard.named_parameters(), *shard.named_buffers()]:
            here, size = prefix + tail, tuple(tensor.shape)
            start = (0,) * len(size)
            if isinstance(shard, Experts):
                number, _, rest = tail.partition(".")
                found[here] = ExpertSlice(f"{prefix}{int(number) + shard.first}.{rest}", size, start, size)
            elif size and size[0] == shard.count:
                found |= _packed_slice(here, tail, size, shard)
    return found


def _packed_slice(here: str, tail: str, size: tuple[int, ...], shard: ExpertShard) -> dict[str, ExpertSlice]:
    """The slice of a packed weight; none if the weight is cut in several parts, because that is not one box."""
    dim, parts = shard.slices.cuts.get(tail, (0, 1))
    if parts > 1:
        return {}
    shape, offset = [shard.num_experts, *size[1:]], [shard.first, *[0] * (len(size) - 1)]
    if dim:
        shape[dim], offset[dim] = size[dim] * shard.slices.size, size[dim] * shard.slices.rank
    return {here: ExpertSlice(here, tuple(shape), tuple(offset), size)}


def has_expert_layers(model: nn.Module) -> bool:
    """Whether a model has experts of this package: in `MoE` layers, or converted ones."""
    return next(_shards(model), None) is not None


def gather_rows_of_experts(own: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """Concatenate [L, ...] of all expert-parallel ranks along the first dimension (collective)."""
    return _gather(own, groups.expert)


def gather_numbered(shard: Experts, groups: ExpertGroups) -> list[dict[str, torch.Tensor]]:
    """The state dicts of all experts of all ranks, by global number (collective)."""
    states: list[dict[str, torch.Tensor]] = [{} for _ in range(shard.num_experts)]
    for i in range(shard.count):
        for key, value in shard[shard.first + i].state_dict().items():
            rows = gather_rows_of_experts(value.detach().reshape(1, -1), groups)
            for rank, row in enumerate(rows):
                states[rank * shard.count + i][key] = row.view(value.shape)
    return states


def _gather(own: torch.Tensor, where: AxisGroup) -> torch.Tensor:
    if where.size == 1:
        return own.clone()
    full = own.new_empty(where.size * own.shape[0], *own.shape[1:])
    dsx_comm.all_gather_into_tensor(full, own.contiguous(), group=where.group)
    return full


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name in the state dict, parameter). The state dict has the global numbers of experts."""
    shards = list(_shards(model))
    for name, parameter in model.named_parameters():
        at = next(((prefix, shard) for prefix, shard in shards if name.startswith(prefix)), None)
        if at is not None and isinstance(at[1], Experts):
            number, _, rest = name[len(at[0]) :].partition(".")
            name = f"{at[0]}{int(number) + at[1].first}.{rest}"
        yield name, parameter


def _shards(model: nn.Module) -> Iterator[tuple[str, ExpertShard]]:
    for name, module in model.named_modules():
        if isinstance(module, ExpertShard):
            yield f"{name}." if name else "", module


def _shard_of(model: nn.Module, name: str) -> tuple[str, ExpertShard] | None:
    return next(((prefix, shard) for prefix, shard in _shards(model) if name.startswith(prefix)), None)


def _gathered(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gather tensors by their names on this rank into tensors by their global names, on the host (collective)."""
    shards = list(_shards(model))
    full: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        at = next(((prefix, shard) for prefix, shard in shards if name.startswith(prefix)), None)
        if at is not None:
            value = at[1].slices.whole(name[len(at[0]) :], value.detach())
        if at is None or at[1].count == at[1].num_experts:
            full[name] = value.detach().to("cpu", copy=True)
            continue
        prefix, shard = at
        layer = groups_in(model).get(shard.group_name)
        where = parallel_groups.given().expert(shard.group_name) if layer is None else layer.expert
        if not isinstance(shard, Experts):
            full[name] = _gather(value.detach(), where).cpu()
            continue
        number, _, rest = name[len(prefix) :].partition(".")
        place = int(number) - shard.first
        for rank, row in enumerate(_gather(value.detach().reshape(1, -1), where)):
            full[f"{prefix}{rank * shard.count + place}.{rest}"] = row.view(value.shape).cpu()
    return full


def _names_on_all_ranks(model: nn.Module, name: str) -> list[str]:
    at = _shard_of(model, name)
    if at is None or not isinstance(at[1], Experts) or at[1].count == at[1].num_experts:
        return [name]
    prefix, shard = at
    number, _, rest = name[len(prefix) :].partition(".")
    place = int(number) - shard.first
    ranks = shard.num_experts // shard.count
    return [f"{prefix}{rank * shard.count + place}.{rest}" for rank in range(ranks)]


def _part_of_this_rank(model: nn.Module, name: str, key: str, parameter: torch.Tensor, value: Any) -> Any:
    """This rank's part of a value of the full optimizer state, on the parameter's device."""
    if not isinstance(value, torch.Tensor):
        return value
    at = _shard_of(model, name)
    if at is not None and not isinstance(at[1], Experts) and value.dim() and value.shape[0] == at[1].num_experts:
        value = value[at[1].first : at[1].first + at[1].count]
    if at is not None and value.numel() > 1:
        value = at[1].slices.piece_of(name, name[len(at[0]) :], value, parameter.shape)
    if value.numel() == 1 and parameter.numel() != 1:
        return value.clone()
    if value.shape != parameter.shape:
        raise ExpertStateError(
            f"{name}: got the state {key!r} of shape {tuple(value.shape)}, expected {tuple(parameter.shape)}"
        )
    return value.to(parameter.device, copy=True)
