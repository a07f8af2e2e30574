"""Where the tensors of this rank belong in the whole model, for checkpoints.

With plain data parallelism, a rank has every tensor completely, under its name in the model. Model parallelism changes
that: different experts have parameters of the same name on different ranks, and a slice is a box of a larger tensor. A
module that knows this has a method

    def parameter_places(self) -> Mapping[str, tuple[str, shape, offset]]:

whose keys are the names of its own parameters and buffers. A value is the name in the whole model (relative to the
module, like the key), the shape of the whole tensor, and where this rank's part begins in each dimension. Slices with
Megatron's attribute `partition_dim` need no such method. A tensor that differs between ranks, and for which neither
exists, is saved under a separate name for each rank (`...expert_rank_01_of_02`): nothing is lost and the same layout
can load it, but no other layout can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from dsx_comm import ParameterMarks, RankSets
from torch import nn

from ..checkpoint.boxes import Box
from ..checkpoint.snapshot import Place
from .errors import EngineArgumentError

__all__ = ["differs_between_ranks", "places_of_model"]


def places_of_model(model: nn.Module, sets: RankSets, known: Mapping[str, Place]) -> dict[str, Place]:
    """The place of every parameter and buffer of which this rank has only a part, or which has another name in the
    whole model.

    Args:
        known: places that are known already.

    Raises:
        EngineArgumentError: a module's `parameter_places` names a tensor that it does not have, or a box that does not
            fit.
    """
    places = {**dict(_told_by_modules(model)), **known}
    suffixes: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        marks = ParameterMarks.read(parameter)
        suffixes[name] = sets.part_of_model(marks)
        if name in places or not suffixes[name]:
            continue
        shape, found = tuple(parameter.shape), None
        if marks.sliced and marks.expert is None:
            found = _cut_along(parameter, name, shape, *sets.tensor_slice)
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


def _cut_along(parameter: torch.Tensor, name: str, shape: tuple[int, ...], rank: int, size: int) -> Place | None:
    """The box of a slice with `partition_dim`, the dimension along which it was cut; None for other tensors."""
    dim, stride = getattr(parameter, "partition_dim", None), getattr(parameter, "partition_stride", 1)
    if type(dim) is not int or not -len(shape) <= dim < len(shape) or stride != 1:
        return None
    whole, offset = list(shape), [0] * len(shape)
    whole[dim], offset[dim] = shape[dim] * size, shape[dim] * rank
    return Place(name, tuple(whole), Box(tuple(offset), shape)) if math.prod(shape) else None


def _suffix_around(name: str, suffixes: Mapping[str, str]) -> str:
    """The suffix for a buffer: that of the parameters in the innermost module around it, if all have the same."""
    path = name.rpartition(".")[0]
    while True:
        prefix = f"{path}." if path else ""
        found = {suffix for parameter, suffix in suffixes.items() if parameter.startswith(prefix)}
        if found or not path:
            return found.pop() if len(found) == 1 else ""
        path = path.rpartition(".")[0]
