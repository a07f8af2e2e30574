"""DeepSpeed's checkpoint of a pipeline's weights: one file per layer, for any number of stages.

    layer_03-model_states.pt              the state dict of layer 3
    layer_03-model_01-model_states.pt     the state dict of slice 1 of layer 3, under tensor slicing

The names in a file are those inside the layer. Shared layers are in the file of their first use. Files with another
number of slices can be read: the attributes of sliced parameters say how slices are joined and cut.

Files are read without running pickled code (`weights_only`). Left out: optimizer states, and everything that is not a
weight or a buffer; checkpoints of `dsx` have them, and need no file per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dsx_comm
import torch
from dsx_core import replacing
from torch import nn

from .errors import PipelineError
from .grid import RankGrid
from .layers import TiedLayerSpec
from .tensor.slices import is_sliced, slice_of, whole_of

_NOT_IN_NAMES = ("pipe", "data", "sequence")
"""Axes whose ranks have the same values of a layer, or other layers."""


@dataclass(frozen=True)
class LayerFile:
    """The file of one layer, as this rank sees it.

    Attributes:
        index: place of the layer in the whole list.
        names: key in the file -> name in the `PipelineModule`.
        is_written: False if the weights are a shared layer's, which the file of its first use holds.
    """

    index: int
    names: dict[str, str]
    is_written: bool = True


class TorchFiles:
    """Writes and reads files with torch. A checkpoint engine of the caller must have the same two methods."""

    def save(self, state_dict: dict[str, torch.Tensor], path: str) -> None:
        """Write a file. It is renamed into place when it is complete, so no half-written file is ever read."""
        with replacing(path) as part:
            torch.save(state_dict, part)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read the tensors of a file, without running pickled code."""
        return torch.load(path, map_location=map_location, weights_only=True)


class LayerFiles:
    """The files of this rank's layers.

    Args:
        module: the `PipelineModule`.
        specs: all layers.
        mine: indices of this rank's layers.
        grid: the ranks.
        of_model: the layers are units of a model, whose names the files have.
    """

    def __init__(
        self,
        module: nn.Module,
        specs: Sequence[Any],
        mine: Sequence[int],
        grid: RankGrid,
        *,
        of_model: bool,
    ) -> None:
        self._grid = grid
        self._files = _units(module, specs, mine) if of_model else _layers(module, specs, mine)

    def path(self, folder: str | Path, index: int) -> str:
        """The file of layer `index` and this rank's slice."""
        place = self._grid.topology.get_rank_repr(rank=self._grid.global_rank, omit_axes=_NOT_IN_NAMES)
        return str(Path(folder) / f"layer_{index:02d}{f'-{place}' if place else ''}-model_states.pt")

    def paths(self, folder: str | Path, index: int) -> list[str]:
        """The existing files of layer `index`, of all slices in their order."""
        return sorted(str(p) for p in Path(folder).glob(f"layer_{index:02d}-*model_states.pt"))

    def write(self, module: nn.Module, folder: str | Path, engine: Any, *, exclude_frozen: bool, divided: bool) -> None:
        """Write this rank's layers and wait for the other ranks (collective).

        Args:
            divided: the data-parallel ranks divide the layers among them; False: the first of them writes all.

        Raises:
            PipelineError: on every rank, if one of them could not write its files.
        """
        data, error_text = self._grid.copies, None
        try:
            tensors = module.state_dict(keep_vars=True)
            for file in self._files:
                if not file.is_written or data.rank != (file.index % data.size if divided else 0):
                    continue
                held = {key: tensors[name] for key, name in file.names.items()}
                state = {
                    key: value.detach().cpu().clone()
                    for key, value in held.items()
                    if not (exclude_frozen and isinstance(value, nn.Parameter) and not value.requires_grad)
                }
                path = Path(self.path(folder, file.index))
                path.parent.mkdir(parents=True, exist_ok=True)
                engine.save(state, str(path))
        except Exception as error:  # noqa: BLE001  (the other ranks wait: they must be told)
            error_text = f"{type(error).__name__}: {error}"
        _raise_on_all_ranks("written", error_text)

    def read(self, module: nn.Module, folder: str | Path, engine: Any, *, strict: bool) -> None:
        """Load this rank's layers from their files (collective).

        Nothing is changed on any rank if one of them finds a file that does not fit.

        Args:
            strict: every weight must be in its file, and every entry of a file must be one.

        Raises:
            PipelineError: on every rank, if a file is missing, or names or shapes do not fit.
        """
        place = self._grid.model.rank, self._grid.model.size
        ready: list[tuple[torch.Tensor, torch.Tensor]] = []
        error_text = None
        try:
            for file in self._files:
                ready += _read_layer(module, file, self.paths(folder, file.index), engine, strict, place)
        except Exception as error:  # noqa: BLE001  (no rank may load if one of them cannot)
            error_text = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
        _raise_on_all_ranks("read", error_text)
        with torch.no_grad():
            for target, value in ready:
                target.copy_(value)


def _units(module: nn.Module, specs: Sequence[Any], mine: Sequence[int]) -> list[LayerFile]:
    """The files of units of a model. A unit has no parameter names of its own: the file has the model's names."""
    paths = {id(part): name for name, part in module.named_modules(remove_duplicate=False)}
    found = []
    for index in mine:
        held = [f"{paths[id(part)]}.{key}" for part in specs[index].parts for key in part.state_dict()]
        found.append(LayerFile(index, {name: name for name in held}))
    return [file for file in found if file.names]


def _layers(module: nn.Module, specs: Sequence[Any], mine: Sequence[int]) -> list[LayerFile]:
    """The files of layers, each with the names of its weights in the file and in the module."""
    names: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), name)
    parts = dict(module.named_modules(remove_duplicate=False))
    uses = [spec.key if isinstance(spec, TiedLayerSpec) else None for spec in specs]
    found: dict[int, LayerFile] = {}

    def add(first: int, layer: nn.Module, *, is_written: bool = True) -> None:
        held = layer.state_dict(keep_vars=True)
        file = LayerFile(first, {key: names[id(tensor)] for key, tensor in held.items()}, is_written)
        found.setdefault(first, file)

    for index in mine:
        if (key := uses[index]) is not None:
            first = uses.index(key)
            add(first, parts[f"tied_modules.{key}"], is_written=index == first)
        elif str(index) in parts:
            add(index, parts[str(index)])
    return [file for _, file in sorted(found.items()) if file.names]


def _raise_on_all_ranks(what: str, error_text: str | None) -> None:
    """Raise on every rank if one of them has an error text (collective)."""
    rows: list[Any] = [None] * dsx_comm.get_world_size()
    dsx_comm.all_gather_object(rows, error_text)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(rows) if text is not None]
    if failed:
        raise PipelineError(f"the layers could not be {what}: {'; '.join(failed)}")


def _read_layer(
    module: nn.Module, file: LayerFile, paths: list[str], engine: Any, strict: bool, place: tuple[int, int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(parameter or buffer, its new value) for each entry of one layer."""
    if not paths:
        raise PipelineError(f"layer {file.index}: there is no file of it in the folder")
    tensors = module.state_dict(keep_vars=True)
    own = [paths[place[0]]] if len(paths) == place[1] else paths
    states = [engine.load(path, map_location="cpu") for path in own]
    missing, extra = sorted(set(file.names) - set(states[0])), sorted(set(states[0]) - set(file.names))
    if strict and (missing or extra):
        raise PipelineError(
            f"{paths[0]}: missing are {missing or 'none'}, not of this layer are {extra or 'none'}; pass strict=False "
            "to take what fits"
        )
    found = []
    for key, name in file.names.items():
        if key in states[0]:
            value = _value_for_rank(tensors[name], [state[key] for state in states], place)
            if value.shape != tensors[name].shape:
                raise PipelineError(
                    f"{paths[0]}: {key} has the shape {list(value.shape)}, expected {list(tensors[name].shape)}"
                )
            found.append((tensors[name], value))
    return found


def _value_for_rank(target: torch.Tensor, pieces: list[torch.Tensor], place: tuple[int, int]) -> torch.Tensor:
    """The value that this rank loads: its slice of the joined pieces, or the piece itself if there is only one."""
    if len(pieces) == 1 or not is_sliced(target):
        whole = pieces[0]
        if len(pieces) == 1 and is_sliced(target) and whole.shape != target.shape:
            return slice_of(whole, _dim(target), *place, target.partition_stride)  # type: ignore[attr-defined]
        return whole
    dim, parts = _dim(target), target.partition_stride  # type: ignore[attr-defined]
    return slice_of(whole_of(pieces, dim, parts), dim, *place, parts)


def _dim(parameter: Any) -> int:
    return int(parameter.partition_dim)
