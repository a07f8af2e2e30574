"""Takes over a model that torch has divided by tensor parallelism: its parameters are DTensors.

    model = parallelize_module(model, mesh["tp"], plan)
    model, optimizer = dsx_zero.shard(model, make_optimizer, stage=3, mesh=mesh["dp"])

Each DTensor is replaced by an ordinary parameter with this rank's part, marked as Megatron's slices are
(`tensor_model_parallel`, `partition_dim`), so that everything that works with slices works with it. While a forward
runs, modules hold DTensors over these parts: `Shown` puts them there. Gradients come back to the parts; where the ranks
of the mesh each have a share of one (`Partial`, such as that of a norm's weight under `SequenceParallel`), torch adds
the shares up in backward, before dsx-zero averages over the data-parallel ranks.

`model.state_dict()` gives DTensors as before, and `load_state_dict` takes them, or whole tensors.

Left out: meshes of several dimensions for one tensor, uneven and strided parts (refused by name).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dsx_comm
import torch
from dsx_comm import RankSets
from dsx_comm.registry import AxisGroup
from torch import nn

from .errors import ZeroModelError
from .gather.registry import stage3_of
from .params.dtensors import GLOBAL, GlobalTensor, global_of, is_dtensor
from .params.partitioned import PartitionedParameter
from .params.restored import note_replaced
from .params.shard_view import ShardView
from .showing import ShowsHook, show_in_forwards, show_in_loads

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["TensorRanks", "parts_of", "rank_sets_of"]


@dataclass(frozen=True)
class TensorRanks:
    """The ranks that hold parts of a model's DTensors, and the tensors by the first names of their parameters."""

    mesh: DeviceMesh
    tensors: Mapping[str, GlobalTensor]

    @classmethod
    def of(cls, model: nn.Module) -> TensorRanks | None:
        """The ranks of a model's DTensors, also of those that were taken over before; None where there are none.

        Raises:
            ZeroModelError: a DTensor is placed in a way that cannot be sharded further.
        """
        found = {name: tensor for name, p in model.named_parameters() if (tensor := _tensor_of(name, p)) is not None}
        if not found:
            return None
        first, mesh = next((name, tensor.mesh) for name, tensor in found.items())
        for name, tensor in found.items():
            if _ranks(tensor.mesh) != _ranks(mesh):
                raise ZeroModelError(
                    f"{name}: is a DTensor on the ranks {_ranks(tensor.mesh)}, and {first} on {_ranks(mesh)}; expected"
                    " one mesh of one dimension for all of them, such as mesh['tp']"
                )
        return cls(mesh, found)

    def facts(self) -> dict[str, str]:
        """Facts that have to be equal on all data-parallel ranks."""
        return {f"DTensor {name}": f"{t.placement} of {t.mesh.size()}" for name, t in self.tensors.items()}

    def data_mesh(self, mesh: DeviceMesh | None) -> DeviceMesh | None:
        """The dimensions of a mesh along which states can be divided: all but that of the DTensors."""
        if mesh is None or mesh.ndim == 1:
            return mesh
        mine = _ranks(self.mesh)
        rest = [d for d in range(mesh.ndim) if sorted(dsx_comm.get_all_ranks_from_group(mesh.get_group(d))) != mine]
        if len(rest) == mesh.ndim:
            return mesh
        if mesh.mesh_dim_names is None:
            raise ZeroModelError(
                f"mesh: got {mesh.ndim} dimensions without names, one of them that of the DTensors; give"
                " init_device_mesh mesh_dim_names=('dp', 'tp'), and mesh=mesh['dp']"
            )
        return mesh[tuple(mesh.mesh_dim_names[d] for d in rest)]

    def joined(self, sets: RankSets, *, given: bool, ranks_of: Any) -> RankSets:
        """The rank sets of the model's parameters, from those over the data-parallel ranks.

        Args:
            given: the caller has named the data-parallel ranks.
            ranks_of: the argument of `shard`.

        Raises:
            ZeroModelError: these ranks hold other parts of the DTensors.
        """
        if ranks_of is not None and not isinstance(ranks_of, RankSets):
            raise ZeroModelError(
                "got ranks_of= and a model of DTensors, and each says which ranks hold a parameter; leave out ranks_of="
            )
        mine, me = _ranks(self.mesh), dsx_comm.get_rank()
        data = [me] if sets.data.size == 1 else sorted(dsx_comm.get_all_ranks_from_group(sets.data.group))
        if set(mine).intersection(data) != {me}:
            name = next(iter(self.tensors))
            told = "the data-parallel ranks given are" if given else "none are named, so that all are data-parallel:"
            raise ZeroModelError(
                f"{name}: is a DTensor whose parts lie on the ranks {mine}, and {told} {data}: they hold different"
                " parts, and only ranks with equal parts can share one. Give shard the dimension of the device mesh"
                " beside it: init_device_mesh(device, (data, tensor), mesh_dim_names=('dp', 'tp')), then"
                " parallelize_module(model, mesh['tp'], ...) and shard(..., mesh=mesh['dp'])"
                " (dsx.initialize: mesh_param=mesh['dp'])"
            )
        if sets.slice_group is not None:
            if sorted(sets.slice_group.ranks) != mine:
                raise ZeroModelError(
                    f"the model's DTensors lie on the ranks {mine}, and the mpu says that slices lie on"
                    f" {sorted(sets.slice_group.ranks)}; let it name the same tensor-parallel group"
                )
            return sets
        group = self.mesh.get_group()
        axis = AxisGroup(group, tuple(dsx_comm.get_all_ranks_from_group(group)), dsx_comm.get_rank(group))
        return sets.with_slices(axis)


def _ranks(mesh: DeviceMesh) -> list[int]:
    return sorted(mesh.mesh.reshape(-1).tolist())


def _tensor_of(name: str, parameter: Any) -> GlobalTensor | None:
    """The tensor that a parameter is a part of. Raises ZeroModelError for one that cannot be taken over."""
    if not is_dtensor(parameter):
        return global_of(parameter)
    mesh, placements = parameter.device_mesh, tuple(parameter.placements)
    what = f"{name}: is a DTensor with the placements {placements} on a mesh of {mesh.ndim} dimensions"
    if mesh.ndim != 1:
        raise ZeroModelError(
            f"{what}; expected one dimension beside the data-parallel ones: parallelize_module(model, mesh['tp'], ...),"
            " and the data-parallel dimension as mesh=mesh['dp'] of shard, in the place of fully_shard"
        )
    (placement,) = placements
    if type(placement).__name__ not in ("Shard", "Replicate"):
        raise ZeroModelError(
            f"{what}; expected Shard or Replicate: a tensor that waits for a sum or is cut in strides has no part of"
            " its own to train. Redistribute it before: parameter.redistribute(placements=[Replicate()])"
        )
    dim = placement.dim if placement.is_shard() else None
    if dim is not None and parameter.shape[dim] % mesh.size():
        raise ZeroModelError(
            f"{what}: {parameter.shape[dim]} entries of dimension {dim} over {mesh.size()} ranks are uneven parts;"
            f" expected a multiple of {mesh.size()}: pad the layer, or leave it out of the parallelize plan"
        )
    if type(parameter.to_local().detach()) is not torch.Tensor:
        raise ZeroModelError(
            f"{what}, whose part is a {type(parameter.to_local()).__name__}; expected a plain tensor: convert the model"
            " after it was sharded, or without tensor parallelism"
        )
    return GlobalTensor(mesh, placement, tuple(parameter.shape))


class _Parts:
    """Shows the parts in a module and below it as DTensors while the module's forward runs.

    A part is shown by the outermost module whose forward runs and for which it is there: at stage 3 a module of the
    unit that has it, else the model. Where it is not there, its place has a `PartitionedParameter`, which shows itself.
    """

    what = "parts of DTensors"

    def __init__(self, root: nn.Module, name: str, places: Sequence[tuple[nn.Module, str, GlobalTensor]]) -> None:
        self._root, self._name, self._places = root, name, tuple(places)
        self._running: list[list[tuple[nn.Module, str, Any, DTensor]]] = []

    def show(self) -> None:
        made: dict[int, DTensor] = {}
        shown = list[tuple[nn.Module, str, Any, Any]]()
        plain = [
            (module, attribute, tensor, part)
            for module, attribute, tensor in self._places
            if (part := module._parameters.get(attribute)) is not None
            and not (is_dtensor(part) or isinstance(part, PartitionedParameter))
        ]
        users = self._users_of_parts() if plain else {}
        for module, attribute, tensor, part in plain:
            if tuple(part.shape) != tensor.size or not self._lies_in(users.get(id(part), ("",))):
                continue
            if id(part) not in made:  # a tied parameter is one tensor
                made[id(part)] = tensor.shown(part)
            shown.append((module, attribute, part, made[id(part)]))
            module._parameters[attribute] = made[id(part)]  # type: ignore[assignment]
        self._running.append(shown)

    def withdraw(self) -> None:
        for module, attribute, part, tensor in self._running.pop() if self._running else ():
            if module._parameters.get(attribute) is tensor:
                module._parameters[attribute] = part

    def saved(self, values: dict[str, Any], prefix: str) -> None:
        """Put DTensors into the module's state dict."""
        for _, attribute, tensor in self._places:
            value = values.get(key := prefix + attribute)
            if type(value) is torch.Tensor and tuple(value.shape) == tensor.size:  # not with `keep_vars`
                values[key] = tensor.shown(value)

    def to_load(self, values: dict[str, Any], prefix: str) -> None:
        """Put this rank's parts into a state dict that is to be loaded (collective for whole values of other ranks)."""
        for _, attribute, tensor in self._places:
            value = values.get(key := prefix + attribute)
            if isinstance(value, ShardView):
                value = value.full_tensor()
            if isinstance(value, torch.Tensor):
                values[key] = tensor.part_of(value)

    def _users_of_parts(self) -> dict[int, tuple[str, ...]]:
        """At stage 3: the modules whose forwards have a part in memory, by the `id` of the part."""
        stage = stage3_of(self._root)
        units = () if stage is None else stage.partitioned
        return {id(face): unit.plan.users for unit in units for face in unit.faces()}

    def _lies_in(self, users: Sequence[str]) -> bool:
        return any(not user or self._name == user or self._name.startswith(f"{user}.") for user in users)


class _Saved(ShowsHook):
    def __call__(self, module: nn.Module, values: dict[str, Any], prefix: str, metadata: Any) -> None:
        self._shows.saved(values, prefix)


def rank_sets_of(model: nn.Module, mesh: DeviceMesh) -> RankSets:
    """The rank sets of a model over a device mesh of one dimension beside that of its DTensors, if it has any.

    Raises:
        ZeroModelError: see `TensorRanks`; the mesh has more dimensions.
    """
    parallel = TensorRanks.of(model)
    mesh = mesh if parallel is None else parallel.data_mesh(mesh) or mesh
    if mesh.ndim != 1:
        raise ZeroModelError(
            f"mesh: got {mesh.ndim} dimensions {mesh.mesh_dim_names or ''} beside those of tensor parallelism, expected"
            " one, such as mesh['dp']; copies of shards (hybrid sharding) are zero_optimization.mics_shard_size"
        )
    sets = RankSets.over(mesh.get_group())
    return sets if parallel is None else parallel.joined(sets, given=True, ranks_of=None)


@contextmanager
def parts_of(model: nn.Module, ranks: TensorRanks | None) -> Iterator[None]:
    """Replace a model's DTensors by parameters with this rank's parts, and show them as DTensors in forwards. An error
    inside the context puts the DTensors back.
    """
    dtensors = {name: p for name, p in model.named_parameters() if is_dtensor(p)}
    if ranks is None or not dtensors:
        yield
        return
    part_of = {id(p): _part(p, ranks.tensors[name]) for name, p in dtensors.items()}
    original = {id(part_of[id(p)]): p for p in dtensors.values()}
    for before in dtensors.values():
        note_replaced(before, part_of[id(before)])
    of_module = {module: found for module in model.modules() if (found := list(_replaced(module, part_of)))}
    handles = list(_hooked(model, of_module))
    try:
        yield
    except BaseException:
        for handle in handles:
            handle.remove()
        for module in of_module:
            list(_replaced(module, original))
        raise


def _replaced(module: nn.Module, by: Mapping[int, Any]) -> Iterator[tuple[nn.Module, str, GlobalTensor]]:
    """Replace a module's own parameters by those given by their `id`."""
    for attribute, parameter in module._parameters.items():
        if (other := by.get(id(parameter))) is not None:
            module._parameters[attribute] = other
            yield module, attribute, global_of(other) or global_of(parameter)  # type: ignore[misc]


def _part(original: Any, tensor: GlobalTensor) -> nn.Parameter:
    part = nn.Parameter(original.to_local().detach(), requires_grad=original.requires_grad)
    vars(part).update({key: value for key, value in vars(original).items() if key not in ("_local_tensor", "_spec")})
    setattr(part, GLOBAL, tensor)
    if tensor.dim is not None:
        part.tensor_model_parallel, part.partition_dim = True, tensor.dim  # type: ignore[attr-defined]
    return part


def _hooked(
    model: nn.Module, of_module: Mapping[nn.Module, list[tuple[nn.Module, str, GlobalTensor]]]
) -> Iterator[Any]:
    for name, module in model.named_modules():
        below = [place for inner in module.modules() for place in of_module.get(inner, ())]
        if not below:
            continue
        parts = _Parts(model, name, below)
        yield from show_in_forwards(module, parts)
        if module in of_module:
            own = _Parts(model, name, of_module[module])
            yield module.register_state_dict_post_hook(_Saved(own))
            yield show_in_loads(module, own)
