"""Reading a committed checkpoint: regions of its tensors by name, verified while they are read.

It does not matter which rank wrote a region, at which stage or world size. A load of several ranks is in `loading.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .boxes import Box, Region
from .crc import Sums
from .encode import decode
from .errors import CheckpointCorruptError, CheckpointError, nothing_committed, shown
from .extra_state import EXTRA_KEY
from .files import opened, read_text
from .folder import check_folder, find_checkpoint, resolve_tag
from .format import CLIENT, INDEX_NAME, LATEST_NAME, MASTER, MODEL, OPTIMIZER, Index, TensorSpec
from .node_part import refuse_part
from .parsing import parse_index
from .regions import read_region
from .selecting import Selection
from .snapshot import Place
from .verifying import Verification


class Reader:
    """Regions of tensors of one checkpoint, by the parameter's name (or a tied name of it) in this rank's model.

    Answers None where the checkpoint has nothing, which means: keep what you have. Ranges count the elements of this
    rank's tensor, row by row; `places` says of which tensors that is a part of the whole one.

    What is read is verified: alone, whole chunks are read where a range begins or ends inside one; in a load of several
    ranks `verification` waits for all of them.
    """

    def __init__(
        self,
        folder: Path,
        index: Index,
        *,
        optimizer_states: bool = True,
        verify: bool = True,
        places: Mapping[str, Place] | None = None,
        selection: Selection | None = None,
    ) -> None:
        self.folder, self.index = folder, index
        self.selection = selection or Selection()
        self.verification = Verification(folder, index) if verify else None
        self.verifies_later = False
        self._optimizer_states, self._places = optimizer_states, places or {}
        self._canonical = {alias: name for name, others in index.aliases.items() for alias in others}
        self._renamed = self.selection.renamed([*index.tensors[MODEL], *self._canonical])
        self.unfit: set[str] = set()
        """Tensors of the model whose shape is another one here, and whose states are therefore not loaded."""
        self._hidden = set(self._renamed.values()) - set(self._renamed)  # what has another name now
        self._keys: dict[str, list[str]] = {}  # parameter -> its states, so that asking for all of them is linear
        for key, _, name in (n.partition("/") for n in index.tensors[OPTIMIZER]):
            if key != MASTER:
                self._keys.setdefault(name, []).append(key)
        for key, values in index.scalars.items():
            for name in values:
                self._keys.setdefault(name, []).append(key)

    def name_of(self, name: str) -> str:
        """The name under which a parameter or buffer is stored, given any of its names."""
        if name in self._places:
            name = self._places[name].name
        if name in self._hidden:
            return ""  # no tensor has this name
        name = self._renamed.get(name, name)
        return name if name in self.index.aliases else self._canonical.get(name, name)

    def spec_of(self, name: str) -> TensorSpec | None:
        """The stored parameter or buffer of this name; None if there is none."""
        entry = self.index.tensors[MODEL].get(self.name_of(name))
        return None if entry is None else entry.spec

    def has(self, name: str) -> bool:
        """Is there a parameter or buffer of this name?"""
        return self.spec_of(name) is not None

    def param(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """Elements of the stored parameter, 1-D, in the stored dtype."""
        if not self.selection.wants(name):
            return None
        return self._read(MODEL, self.name_of(name), name, start, stop)

    def master(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """Elements of the fp32 master; the parameter itself where it was stored in full precision."""
        if not self.selection.wants(name):
            return None
        found = self._read(OPTIMIZER, f"{MASTER}/{self.name_of(name)}", name, start, stop)
        return self.param(name, start, stop) if found is None else found

    def state_keys(self, name: str) -> tuple[str, ...]:
        """The optimizer states stored for a parameter; empty when they are not to be loaded."""
        if not self._loads_states_of(name):
            return ()
        return tuple(self._keys.get(self.name_of(name), ()))

    def state(self, key: str, name: str, start: int, stop: int) -> torch.Tensor | int | float | None:
        """A range of an optimizer state, or the number it is."""
        if not self._loads_states_of(name):
            return None
        scalar = self.index.scalars.get(key, {}).get(self.name_of(name))
        return scalar if scalar is not None else self._read(OPTIMIZER, f"{key}/{self.name_of(name)}", name, start, stop)

    def shaped_state(self, key: str, name: str, start: int, stop: int, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Elements of an optimizer state with a shape of its own, counted in that shape, 1-D.

        Raises:
            CheckpointError: the stored state has another shape: the optimizer has another setting (a rank, a block), or
                keeps states of slices, and the tensor was cut in another way.
        """
        entry = self.index.tensors[OPTIMIZER].get(f"{key}/{self.name_of(name)}")
        if entry is None or not self._loads_states_of(name):
            return None
        if entry.spec.shape != tuple(shape):
            raise CheckpointError(
                f"optimizer state {shown(key)} of {shown(name)}: got the shape {entry.spec.shape} in the checkpoint,"
                f" expected {tuple(shape)}, which the optimizer keeps here; build it with the settings that were saved"
                " (rank, block, split), with tensor slices as they were, or load with optimizer_states=False to start"
                " the states again"
            )
        return self._read_region((OPTIMIZER, entry.spec.name), Region(Box.whole(entry.spec.shape), start, stop))

    def _loads_states_of(self, name: str) -> bool:
        return self._optimizer_states and self.selection.selects(name) and name not in self.unfit

    def whole(self, name: str) -> torch.Tensor:
        """A whole parameter or buffer in its logical shape, whatever part of it this rank holds."""
        stored = self.name_of(name)
        entry = self.index.tensors[MODEL].get(stored)
        if entry is None:
            raise CheckpointError(f"{self.folder}: has no tensor {shown(name)}")
        return self._read_region((MODEL, stored), Region.whole(entry.spec.shape)).reshape(entry.spec.shape)

    def stored(self, family: str, name: str) -> torch.Tensor:
        """A whole tensor as it is stored, by family ("model", "optimizer", "client") and name in the family's files."""
        shape = self.index.tensors[family][name].spec.shape
        return self._read_region((family, name), Region.whole(shape)).reshape(shape)

    def state_of_caller(self) -> dict[str, Any]:
        """The `state` that `save` was given: under "engine" the training state, under "client" the caller's."""
        return {key: value for key, value in decode(self.index.state, self.client).items() if key != EXTRA_KEY}

    def buffer(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """This rank's part of a stored buffer, in the shape it has here."""
        values = self.param(name, 0, torch.Size(shape).numel())
        if values is None:
            raise CheckpointError(f"{self.folder}: has no buffer {shown(name)}")
        return values.reshape(shape)

    def client(self, name: str) -> torch.Tensor:
        """A tensor of the client state. Raises `CheckpointCorruptError` where there is none of this name."""
        entry = self.index.tensors[CLIENT].get(name)
        if entry is None:
            raise CheckpointCorruptError(f"{self.folder}: the state names a tensor {shown(name)} that is not there")
        return self._read_region((CLIENT, name), Region.whole(entry.spec.shape)).reshape(entry.spec.shape)

    def _read(self, family: str, stored: str, name: str, start: int, stop: int) -> torch.Tensor | None:
        entry = self.index.tensors[family].get(stored)
        if entry is None:
            return None
        place = self._places.get(name)
        region = Region.whole(entry.spec.shape) if place is None else Region(place.box, 0, place.box.numel)
        region = Region(region.box, start, stop)
        model = self.index.tensors[MODEL].get(self.name_of(name))
        if model is not None and model.spec.shape != entry.spec.shape:
            raise CheckpointError(
                f"{shown(stored)} has the shape {entry.spec.shape} in the checkpoint, and its parameter"
                f" {model.spec.shape}: another optimizer keeps such states; load with optimizer_states=False to start"
                " the states again"
            )
        if self.selection.may_pad(name):
            return self._read_padded((family, stored), region, place)
        if not region.lies_in(entry.spec.shape):
            raise CheckpointError(
                f"{shown(name)}: elements {start} to {stop} of a tensor of shape {region.box.size} were asked for, but "
                f"the checkpoint's tensor has shape {entry.spec.shape}"
            )
        return self._read_region((family, stored), region)

    def _read_padded(self, key: tuple[str, str], region: Region, place: Place | None) -> torch.Tensor:
        """A region of a tensor that may have other rows than the stored one: zeros for rows that are not stored."""
        shape = self.index.tensors[key[0]][key[1]].spec.shape
        box = region.box if place is not None else Box.whole(shape)
        rows = max(0, min(box.size[0], shape[0] - box.offset[0]))
        there = Box(box.offset if rows else (0, *box.offset[1:]), (rows, *box.size[1:]))
        start, stop = min(region.start, there.numel), min(region.stop, there.numel)
        values = self._read_region(key, Region(there, start, stop))
        return torch.cat([values, values.new_zeros(region.numel - values.numel())])

    def _read_region(self, key: tuple[str, str], region: Region) -> torch.Tensor:
        entry = self.index.tensors[key[0]][key[1]]
        sums = Sums(entry.chunks)
        path = self.folder / entry.placed.file
        try:
            with opened(path, os.O_RDONLY) as fd:
                values = read_region(fd, entry.placed, region, sums)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); restore the file or load another tag") from error
        if self.verification is not None:
            self.verification.add(key, region, sums)
            if not self.verifies_later:
                self.verification.settle_alone()
        return values


def open_checkpoint(
    directory: str | os.PathLike[str],
    tag: str | None = None,
    *,
    optimizer_states: bool = True,
    verify: bool = True,
    places: Mapping[str, Place] | None = None,
    selection: Selection | None = None,
    parts: bool = False,
) -> Reader:
    """A `Reader` of a committed checkpoint, in this process alone.

    Args:
        tag: which one; None: the one that `latest` names.
        optimizer_states: whether `state_keys` and `state` have answers.
        verify: whether what is read is compared with the hashes.
        places: where this process holds parts of tensors; see `Place`.
        selection: which tensors, and under which names.
        parts: take also one node's part of a checkpoint, of which not all bytes are there
            (`checkpoint.use_node_local_storage`).

    Raises:
        CheckpointError: there is none, or it is damaged, or one node's part.
    """
    root = check_folder(directory, "directory")
    found = resolve_tag(root, tag)
    if found is None:
        raise nothing_committed(f"{root}: no '{LATEST_NAME}' file; expected a folder that save_checkpoint has written")
    folder = find_checkpoint(root, found)
    index = parse_index(read_text(folder / INDEX_NAME), str(folder / INDEX_NAME))
    if not parts:
        refuse_part(folder, index)
    return Reader(folder, index, optimizer_states=optimizer_states, verify=verify, places=places, selection=selection)
