"""Finds out which kind of index is at a path, and reads both kinds in the same way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import IndexFileError
from .file import SUFFIX, IndexFile
from .indexed_dataset import MMapIndexedDataset

__all__ = ["RowIndex", "open_index"]


class RowIndex(Protocol):
    """Rows of numbers: the interface that both kinds of index have."""

    @property
    def dtype(self) -> Any: ...

    @property
    def sizes(self) -> np.ndarray: ...

    @property
    def values(self) -> np.ndarray: ...

    def start(self, row: int) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


def open_index(path: str | os.PathLike[str]) -> RowIndex:
    """Open the index at `path`: an index file of this package, or a pair of Megatron's.

    Args:
        path: the file, or its name without suffix (``.dsxi``, or ``.idx`` and ``.bin``).

    Raises:
        IndexFileError: there is no index at `path`, or it is damaged.
    """
    given = Path(path)
    if given.suffix in (".idx", ".bin"):
        return MMapIndexedDataset(given.with_suffix(""))
    if given.is_file():
        return IndexFile(given)
    own = Path(f"{given}{SUFFIX}")
    if own.is_file():
        return IndexFile(own)
    if MMapIndexedDataset.exists(given):
        return MMapIndexedDataset(given)
    raise IndexFileError(
        f"{given}: there is no index; expected the file {own.name}, or the pair {given.name}.idx and {given.name}.bin"
        " (dsx-data analyze and DataAnalyzer write them)"
    )
