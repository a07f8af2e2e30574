"""The weights of a checkpoint as a mapping from name to whole tensor, each read and verified when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from .extra_state import is_extra_state
from .format import MODEL
from .reading import Reader, open_checkpoint

__all__ = ["WholeTensors"]


class WholeTensors(Mapping[str, torch.Tensor]):
    """Parameters and buffers under all their names; nothing is kept, so that memory holds one tensor at a time."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        aliases = reader.index.aliases
        own = [name for name in reader.index.tensors[MODEL] if not is_extra_state(name)]
        self._names = [n for name in own for n in (name, *aliases.get(name, ()))]

    @staticmethod
    def of(path: Path) -> WholeTensors:
        """The tensors of the checkpoint in this folder, which is that of a tag."""
        return WholeTensors(open_checkpoint(path.parent, path.name))

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._reader.whole(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
