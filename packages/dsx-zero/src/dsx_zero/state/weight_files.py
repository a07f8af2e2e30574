"""Reads weights by name from safetensors files, in ranges: only the ranges that are asked for come into memory.

A folder is expected as Hugging Face writes it: one or several `*.safetensors`, and `*.safetensors.index.json`, which
says in which file each tensor is. Without an index the headers of all files in the folder are read. Headers are read
and checked when a `WeightFiles` is made; values are read range by range.

The format (https://github.com/huggingface/safetensors): 8 bytes with the header's length, a JSON header with dtype,
shape and place of each tensor, then the data. Pickled weights (`*.bin`) are left out, because reading them runs code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..errors import ZeroLoadError

__all__ = ["StoredTensor", "WeightFiles"]

_MAX_HEADER = 100_000_000
"""Bytes; the same limit as the safetensors library."""

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor: file, bytes, dtype and shape."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class WeightFiles:
    """The tensors of a folder, of an index file, or of one file.

    Raises:
        ZeroLoadError: a file is missing, not complete, or damaged; names the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._tensors: dict[str, StoredTensor] = {}
        for file in self._files():
            for name, tensor in _header(file):
                if name in self._tensors:
                    raise ZeroLoadError(
                        f"{name} is in {self._tensors[name].file.name} and in {file.name} of {file.parent}; expected it"
                        " once: remove the files that do not belong together, or give the path of one index"
                    )
                self._tensors[name] = tensor
        self._check_index()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a tensor in row-major order, as a new 1-D host tensor.

        Raises:
            ZeroLoadError: the file ends before these elements, or cannot be read.
        """
        tensor = self._tensors[name]
        size = tensor.dtype.itemsize
        if start == stop:
            return torch.empty(0, dtype=tensor.dtype, device="cpu")
        data = bytearray((stop - start) * size)
        try:
            with open(tensor.file, "rb", buffering=0) as file:
                file.seek(tensor.offset + start * size)
                view, got = memoryview(data), 0
                while got < len(data) and (n := file.readinto(view[got:])):
                    got += n
        except OSError as error:
            raise ZeroLoadError(f"{tensor.file}: cannot be read ({error}); copy it again") from error
        if got < len(data):
            raise ZeroLoadError(
                f"{tensor.file}: got {got} of the {len(data)} bytes that {name} has there; the file was cut since it"
                " was opened: copy it again"
            )
        return torch.frombuffer(data, dtype=tensor.dtype)

    def _files(self) -> list[Path]:
        self._index: dict[str, str] = {}
        if self.path.is_file() and self.path.name.endswith(".index.json"):
            return self._of_index(self.path)
        if self.path.is_file():
            return [self.path]
        if not self.path.is_dir():
            raise ZeroLoadError(
                f"{self.path}: not there; expected a folder with *.safetensors, one such file, or a"
                " *.safetensors.index.json"
            )
        indexes = sorted(self.path.glob("*.safetensors.index.json"))
        if len(indexes) > 1:
            names = ", ".join(index.name for index in indexes)
            raise ZeroLoadError(
                f"{self.path}: got {len(indexes)} indexes ({names}), expected one; give the path of one"
            )
        if indexes:
            return self._of_index(indexes[0])
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            others = sorted(file.name for file in self.path.iterdir())[:5]
            raise ZeroLoadError(
                f"{self.path}: got no *.safetensors (there is {', '.join(others) or 'nothing'}); save the weights in"
                " that format: model.save_pretrained(folder, safe_serialization=True)"
            )
        return files

    def _of_index(self, index: Path) -> list[Path]:
        try:
            table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self._index = {str(name): str(file) for name, file in table.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ZeroLoadError(f"{index}: not an index of weights ({error!r}); copy it again") from error
        files = sorted(set(self._index.values()))
        strange = [name for name in files if Path(name).name != name]
        if strange:
            raise ZeroLoadError(f"{index}: got the file name {strange[0]!r}, expected names in the same folder")
        missing = [name for name in files if not (index.parent / name).is_file()]
        if missing:
            raise ZeroLoadError(
                f"{index}: {len(missing)} of its {len(files)} files are not there ({', '.join(missing[:5])}); the"
                " download is not complete: copy them too"
            )
        return [index.parent / name for name in files]

    def _check_index(self) -> None:
        for name, file in self._index.items():
            found = self._tensors.get(name)
            if found is None or found.file.name != file:
                where = "in no file" if found is None else f"in {found.file.name}"
                raise ZeroLoadError(
                    f"{self.path}: the index has {name} in {file}, but it is {where}; index and files do not belong"
                    " together: copy them again"
                )


def _header(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        size = file.stat().st_size
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size} bytes")
            table = json.loads(opened.read(length))
        for name, entry in table.items():
            if name == "__metadata__":
                continue
            yield name, _stored(file, name, entry, base=8 + length, size=size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ZeroLoadError(f"{file}: not a whole safetensors file ({error}); copy it again") from error


def _stored(file: Path, name: str, entry: Any, *, base: int, size: int) -> StoredTensor:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"{name}: got the type {entry['dtype']!r}, expected one of {', '.join(_DTYPES)}")
    shape = tuple(int(extent) for extent in entry["shape"])
    start, stop = (int(place) for place in entry["data_offsets"])
    if min(shape, default=0) < 0 or stop - start != prod(shape) * dtype.itemsize or start < 0 or base + stop > size:
        raise ValueError(
            f"{name}: bytes {start} to {stop} of the {size - base} that are there, for shape {shape} of {dtype}"
        )
    return StoredTensor(file, dtype, shape, base + start)
