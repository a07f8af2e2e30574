"""The datasets that a command line can name.

PREFIX               an indexed dataset of Megatron or DeepSpeed: PREFIX.idx and PREFIX.bin
FILE.dsxi            an index file of this package: its rows are the samples
FILE.npy             an array; its first dimension counts the samples
FILE.txt             a text file; its lines are the samples, their UTF-8 bytes the tokens
MODULE:NAME          an object of an importable module: a dataset, or a function without arguments that returns one
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from .errors import DataArgumentError
from .index import open_index

__all__ = ["TextLines", "open_dataset"]


class TextLines:
    """The lines of a text file as arrays of bytes, uint8. The file is memory-mapped, not read into memory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        empty = self.path.stat().st_size == 0
        self._bytes: np.ndarray = np.zeros(0, np.uint8) if empty else np.memmap(self.path, np.uint8, "r")
        ends = [
            first + np.flatnonzero(self._bytes[first : first + (1 << 24)] == 10)
            for first in range(0, len(self._bytes), 1 << 24)
        ]
        self._ends = np.concatenate(ends) if ends else np.zeros(0, np.int64)
        if len(self._bytes) and self._bytes[-1] != 10:
            self._ends = np.append(self._ends, len(self._bytes))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, line: int) -> np.ndarray:
        if not 0 <= line < len(self):
            raise IndexError(f"line {line} of {self.path}: it has {len(self)} lines")
        return self._bytes[int(self._ends[line - 1]) + 1 if line else 0 : int(self._ends[line])]


def open_dataset(name: str) -> Any:
    """Open the dataset that a command line names; the module lists the forms of a name.

    Raises:
        DataArgumentError: the name has none of the known forms, or the module or object does not exist.
        IndexFileError: the file is damaged.
    """
    path = Path(name)
    if path.suffix == ".npy" and path.is_file():
        return np.load(path, mmap_mode="r")
    if path.suffix == ".txt" and path.is_file():
        return TextLines(path)
    module, colon, attribute = name.partition(":")
    if not colon:
        return open_index(path)
    sys.path.insert(0, os.getcwd())  # as `python -m` does, so that modules in the current folder are found
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise DataArgumentError(
            f"{name}: {error}; expected MODULE:NAME of a dataset or of a function that makes one"
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    made = found if hasattr(found, "__getitem__") else found()
    if not hasattr(made, "__len__"):
        raise DataArgumentError(f"{name}: got a {type(made).__name__} without a length, expected a map-style dataset")
    return made
