"""DistributedDataParallel and FSDP2 around a model with experts: they would average different experts as one.

Both take every parameter for the same on all ranks. DDP even overwrites the experts of all ranks by those of the first.
So a layer whose experts are on several ranks refuses to run inside them, unless its experts were left out:

    dsx_moe.ignore_experts_in_ddp(model); model = DistributedDataParallel(model)
    fully_shard(model, ignored_params={p for p in model.parameters() if dsx_moe.is_moe_param(p)})
    ...
    loss.backward(); dsx_moe.average_gradients(model, experts_only=True)
"""

from __future__ import annotations

from typing import Any

import dsx_comm
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .errors import MoEConfigError
from .experts import ExpertShard
from .groups import ExpertGroups
from .marks import is_moe_param

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # DDP reads it from the module that it wraps


def ignore_experts_in_ddp(model: nn.Module) -> list[str]:
    """Let DistributedDataParallel leave the experts of a model alone. Call it before the model is wrapped.

    Average their gradients with `average_gradients(model, experts_only=True)` after each backward.

    Args:
        model: the module that is given to DistributedDataParallel.

    Returns:
        The names of the experts' parameters and buffers. Names that are ignored already stay so.
    """
    found: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, ExpertShard):
            prefix = f"{path}." if path else ""
            found += [prefix + name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
    setattr(model, _IGNORED, [*getattr(model, _IGNORED, ()), *found])
    return found


def refuse_wrappers(shard: ExpertShard, groups: ExpertGroups, name: str) -> None:
    """Raise an error if the experts of a layer are averaged with those of other ranks, by DDP or FSDP2.

    Raises:
        MoEConfigError: names the layer and the remedy.
    """
    if groups.expert.size > 1:
        _look(shard, groups, name)


def _look(shard: ExpertShard, groups: ExpertGroups, name: str) -> None:
    first = next(shard.parameters(), None)
    if first is not None and not is_moe_param(first):
        raise MoEConfigError(
            f"{name}: its experts differ on {groups.expert.size} ranks and have lost the mark that says so: FSDP2, or"
            " code that sets parameters anew, has replaced them. With FSDP2 leave them out: fully_shard(model,"
            " ignored_params={p for p in model.parameters() if dsx_moe.is_moe_param(p)}), and after backward"
            " dsx_moe.average_gradients(model, experts_only=True); else dsx_moe.marks.mark_expert_parameters"
        )
    wrapper: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if wrapper is None or shard.__dict__.get("_seen_in") == id(wrapper):
        return
    ranks = set(dsx_comm.get_all_ranks_from_group(wrapper.process_group))
    if len(ranks & set(groups.expert.ranks)) > 1:
        own = {id(parameter) for parameter in shard.parameters()}
        ignored = set(wrapper.parameters_to_ignore)
        taken = [key for key, p in wrapper.module.named_parameters() if id(p) in own and key not in ignored]
        if taken:
            raise MoEConfigError(
                f"{name}: DistributedDataParallel has overwritten its experts by those of the first rank, and would"
                f" average the gradients of different experts ({taken[0]}, ...); call"
                " dsx_moe.ignore_experts_in_ddp(model) before DistributedDataParallel(model), and after backward"
                " dsx_moe.average_gradients(model, experts_only=True)"
            )
    shard.__dict__["_seen_in"] = id(wrapper)
