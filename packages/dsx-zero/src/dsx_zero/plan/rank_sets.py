"""The ranks that share the buffers of a model: the choice, its check, and what follows from it for module buffers.

The choice is `dsx_comm.RankSets`, or a function of the caller's. The only communication here is to make process groups
that a topology has not made yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dsx_comm
import torch
from dsx_comm import RankSet, RankSets
from torch import nn

from ..errors import ZeroModelError
from .units import RanksOf, UnitPlan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["check_rank_sets", "choose_rank_sets", "is_plain", "ranks_of_buffers", "ranks_of_mesh"]


def choose_rank_sets(process_group: Any, mpu: Any, ranks_of: RankSets | RanksOf | None) -> RankSets:
    """The rank sets that the arguments of `shard` name; those of `parallel_groups` where they name none.

    Raises:
        ZeroModelError: they contradict each other.
    """
    given = {
        "process_group": process_group is not None,
        "mpu": mpu is not None,
        "ranks_of (a RankSets)": isinstance(ranks_of, RankSets),
    }
    if sum(given.values()) > 1:
        raise ZeroModelError(
            f"got {' and '.join(name for name, there in given.items() if there)}, and each of them says which ranks are"
            " data-parallel; give one"
        )
    if isinstance(ranks_of, RankSets):
        return ranks_of
    if mpu is not None:
        return RankSets.of_mpu(mpu)
    return RankSets.current() if process_group is None else RankSets.over(process_group)


def ranks_of_mesh(mesh: DeviceMesh | None, process_group: Any) -> tuple[Any, int]:
    """(process group, ranks that share a buffer) of a device mesh; (the process group given, 0) without one. Collective
    for a mesh of two dimensions over some ranks only.

    Raises:
        ZeroModelError: a process group is given too, or the mesh is not what `shard` can divide along.
    """
    if mesh is None:
        return process_group, 0
    if process_group is not None:
        raise ZeroModelError("got a process_group and a mesh, and each says which ranks are data-parallel; give one")
    ranks = mesh.mesh.reshape(-1).tolist()
    if mesh.ndim > 2:
        raise ZeroModelError(
            f"mesh: got {mesh.ndim} dimensions {mesh.mesh_dim_names or ''}, expected one (shards) or two (copies,"
            " shards); take a part of it, such as mesh['replicate', 'shard']"
        )
    if ranks != sorted(ranks):
        raise ZeroModelError(f"mesh: got the ranks {ranks}, expected them in ascending order, row by row")
    if mesh.ndim == 1:
        return mesh.get_group(), 0
    is_world = len(ranks) == dsx_comm.get_world_size()
    return None if is_world else dsx_comm.new_group(ranks, local=True), mesh.size(1)


def is_plain(plans: Sequence[UnitPlan], data: RankSet) -> bool:
    """Whether all parameters are held by the same ranks, the data-parallel ones.

    This holds for a pipeline stage too, unless it has a copy of weights that stages share: that does not count in the
    norm.
    """
    sets = {group.key.ranks for plan in plans for group in plan.groups}
    return sets <= {data} and data.counts_in_norm


def check_rank_sets(plans: Sequence[UnitPlan], data: RankSet) -> None:
    """Refuse rank sets that are not what their process groups are.

    Raises:
        ZeroModelError: names a parameter, what its rank set says and what was expected.
    """
    names: dict[RankSet, str] = {}
    for plan in plans:
        for group in plan.groups:
            names.setdefault(group.key.ranks, group.layout.names[0])
    allowed = {0} if data.size == 1 else set(dsx_comm.get_all_ranks_from_group(data.group))
    for ranks, name in names.items():
        if ranks == data or ranks.size == 1:
            continue
        members = dsx_comm.get_all_ranks_from_group(ranks.group)
        if len(members) != ranks.size or members[ranks.rank] != dsx_comm.get_rank():
            raise ZeroModelError(
                f"{name}: its rank set says rank {ranks.rank} of {ranks.size}, and its process group has the ranks"
                f" {members}, among them this rank {dsx_comm.get_rank()}; make rank sets with dsx_comm.RankSets or"
                " RankSet.over(group)"
            )
        if not set(members) <= allowed:
            raise ZeroModelError(
                f"{name}: its rank set has the ranks {members}, of which some are not data-parallel ranks of this model"
                f" ({sorted(allowed)}); the order of collectives is agreed among those"
            )


def ranks_of_buffers(
    model: nn.Module, held: Mapping[str, RankSet], data: RankSet
) -> Iterator[tuple[torch.Tensor, RankSet]]:
    """Each buffer of a model with the ranks that hold its module: those that share all parameters of the innermost
    module around it that has any. `held`: who shares each parameter, by every name of it.
    """
    inside: dict[str, set[RankSet]] = {"": set()}
    for name, ranks in held.items():
        parts = name.split(".")[:-1]
        for end in range(len(parts) + 1):
            inside.setdefault(".".join(parts[:end]), set()).add(ranks)
    for name, buffer in model.named_buffers():
        path = name.rpartition(".")[0]
        while path and path not in inside:
            path = path.rpartition(".")[0]
        found = inside[path]
        yield buffer, next(iter(found)) if len(found) == 1 else data
