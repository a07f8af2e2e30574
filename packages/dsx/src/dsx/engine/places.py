"""The places of this rank's tensors in the whole model, for checkpoints.

With plain data parallelism, a rank has every tensor completely, under its name in the model. Model parallelism changes
that: different experts have parameters of the same name on different ranks, and a slice is a box of a larger tensor. A
module that knows this has a method

    def parameter_places(self) -> Mapping[str, tuple[str, shape, offset]]:

whose keys are the names of its own parameters and buffers. A value is the name in the whole model (relative to the
module, like the key), the shape of the whole tensor, and where this rank's part begins in each dimension. Slices with
Megatron's attribute `partition_dim` need no such method: the ranks tell each other the sizes of their slices, which may
differ. A tensor that differs between ranks, and for which neither exists, is saved under a separate name for each rank
(`...expert_rank_01_of_02`): nothing is lost and the same layout can load it, but no other layout can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import dsx_comm
import torch
from dsx_checkpoint.boxes import Box
from dsx_checkpoint.snapshot import Place
from dsx_comm import ParameterMarks, RankSets
from torch import nn

from .errors import EngineArgumentError

__all__ = ["differs_between_ranks", "places_of_model"]


def places_of_model(model: nn.Module, sets: RankSets, known: Mapping[str, Place]) -> dict[str, Place]:
    """The place of every parameter and buffer of which this rank has only a part, or which has another name in the
    whole model. Collective over the ranks that hold slices of the same tensors, if any.

    Args:
        known: places that are known already.

    Raises:
        EngineArgumentError: a module's `parameter_places` names a tensor that it does not have, or a box that does not
            fit; slices of one tensor do not fit together.
    """
    places = {**dict(_told_by_modules(model)), **known}
    suffixes: dict[str, str] = {}
    cuts = _cuts_of_slices(model, sets, told=places)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        marks = ParameterMarks.read(parameter)
        suffixes[name] = sets.part_of_model(marks)
        if name in places or not suffixes[name]:
            continue
        shape, found = tuple(parameter.shape), None
        if marks.sliced and marks.expert is None and name in cuts:
            found = cuts[name].place(name, shape, sets.tensor_slice[0])
        places[name] = found or Place(f"{name}.{suffixes[name]}", shape, Box.whole(shape))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        suffix = _suffix_around(name, suffixes)
        if name not in places and suffix:
            places[name] = Place(f"{name}.{suffix}", tuple(buffer.shape), Box.whole(buffer.shape))
    return places


def differs_between_ranks(places: Mapping[str, Place]) -> list[str]:
    """The names of tensors of which this rank has only a part, or which other ranks have under other names."""
    return [name for name, place in places.items() if place.name != name or place.box != Box.whole(place.shape)]


def _told_by_modules(model: nn.Module) -> Iterator[tuple[str, Place]]:
    for path, module in model.named_modules():
        tell: Callable[[], Mapping[str, Any]] | None = getattr(module, "parameter_places", None)
        if tell is None:
            continue
        prefix = f"{path}." if path else ""
        own = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
        for name, (whole_name, shape, offset) in tell().items():
            if name not in own:
                raise EngineArgumentError(
                    f"{type(module).__name__}.parameter_places: names {name!r}, which {path or 'the model'} does not"
                    " have"
                )
            place = Place(f"{prefix}{whole_name}", tuple(shape), Box(tuple(offset), tuple(own[name].shape)))
            if not place.box.lies_in(place.shape):
                raise EngineArgumentError(
                    f"{type(module).__name__}.parameter_places: {name!r} of shape {place.box.size} at"
                    f" {place.box.offset} does not lie in a tensor of shape {place.shape}"
                )
            yield f"{prefix}{name}", place


@dataclass(frozen=True)
class _Cut:
    """The split of a tensor: the dimension, and the size of each slice along it."""

    dim: int
    sizes: tuple[int, ...]

    def place(self, name: str, shape: tuple[int, ...], number: int) -> Place | None:
        """The box of slice `number`, which has this shape; None where the whole tensor has no elements."""
        whole, offset = list(shape), [0] * len(shape)
        whole[self.dim], offset[self.dim] = sum(self.sizes), sum(self.sizes[:number])
        return Place(name, tuple(whole), Box(tuple(offset), shape)) if math.prod(whole) else None


def _cuts_of_slices(model: nn.Module, sets: RankSets, told: Collection[str]) -> dict[str, _Cut]:
    """The cuts of the parameters that say along which dimension they were cut. Collective over the slices' ranks.

    Args:
        told: names of parameters whose places are known.

    Raises:
        EngineArgumentError: ranks contradict each other; the same on all of them.
    """
    if sets.slice_group is None or sets.slice_group.size == 1:
        return {}
    mine: dict[str, tuple[tuple[int, ...], int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        dim = _cut_dimension(parameter)
        if dim is not None and name not in told and ParameterMarks.read(parameter).sliced:
            mine[name] = tuple(parameter.shape), dim
    everyone: list[dict[str, tuple[tuple[int, ...], int]]] = [{}] * sets.slice_group.size
    dsx_comm.all_gather_object(everyone, mine, group=sets.slice_group.group)
    found: dict[str, _Cut] = {}
    for name in dict.fromkeys(name for slices in everyone for name in slices):
        slices = [slices.get(name) for slices in everyone]  # a rank without the parameter has nothing of the tensor
        ways = {(dim, (*shape[:dim], *shape[dim + 1 :])) for shape, dim in filter(None, slices)}
        if len(ways) > 1:
            raise EngineArgumentError(
                f"{name}: the slices have (shape, partition_dim) {slices}, expected shapes that differ in one dimension"
                " only, in which all were cut; set partition_dim alike on all ranks, or give the module a method"
                " parameter_places()"
            )
        dim = ways.pop()[0]
        found[name] = _Cut(dim, tuple(0 if one is None else one[0][dim] for one in slices))
    return found


def _cut_dimension(parameter: torch.Tensor) -> int | None:
    """The dimension along which a slice says it was cut; None for one that does not, or was cut into several parts."""
    dim, stride = getattr(parameter, "partition_dim", None), getattr(parameter, "partition_stride", 1)
    if type(dim) is not int or not -parameter.dim() <= dim < parameter.dim() or stride != 1:
        return None
    return dim % parameter.dim()


def _suffix_around(name: str, suffixes: Mapping[str, str]) -> str:
    """The suffix for a buffer: that of the parameters in the innermost module around it, if all have the same."""
    path = name.rpartition(".")[0]
    while True:
        prefix = f"{path}." if path else ""
        found = {suffix for parameter, suffix in suffixes.items() if parameter.startswith(prefix)}
        if found or not path:
            return found.pop() if len(found) == 1 else ""
        path = path.rpartition(".")[0]
