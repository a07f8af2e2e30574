"""Reader and builder of the indexed datasets of Megatron and DeepSpeed: ``PREFIX.idx`` and ``PREFIX.bin``.

``PREFIX.bin`` holds the numbers of all sequences, one after the other. ``PREFIX.idx`` is, all numbers little endian:

    9 bytes     magic, ``MMIDIDX`` and two zero bytes
    u64         version, 1
    u8          code of the data type
    u64         number of sequences, n
    u64         number of entries of the document index, d
    n x i32     numbers in each sequence
    n x i64     position of each sequence in PREFIX.bin, in bytes
    d x i64     document index: first sequence of each document, and n

The codes 1-5 are uint8, int8, int16, int32 and int64 everywhere. Megatron and DeepSpeed give 6, 7 and 8 different
meanings (float64, float32, uint16 against uint16, uint32, uint64). The sizes of the two files tell them apart, except
for 4-byte numbers of code 7, which are read as uint32 unless `dtype` says otherwise.

Left out: the older ``TNTIDX`` format, and fetching from object stores.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from dsx_core import replacing

from ..errors import DataArgumentError, IndexFileError

__all__ = ["MMapIndexedDataset", "MMapIndexedDatasetBuilder"]

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_CODES: dict[int, tuple[str, ...]] = {
    1: ("uint8",), 2: ("int8",), 3: ("int16",), 4: ("int32",), 5: ("int64",),
    6: ("uint16", "float64"), 7: ("uint32", "float32", "float64"), 8: ("uint64", "uint16"),
}  # fmt: skip
_WRITTEN = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 6, "uint32": 7, "uint64": 8}


class MMapIndexedDataset:
    """A memory-mapped indexed dataset; `dataset[i]` is sequence i as a numpy array.

    Args:
        path: prefix of the two files, without ``.idx`` and ``.bin``.
        skip_warmup: accepted because scripts pass it; nothing is read ahead.
        dtype: data type of the numbers, where the code in the file has several meanings.

    Raises:
        IndexFileError: a file is missing, truncated, or no indexed dataset, or a position is outside of the data file.
    """

    def __init__(self, path: str | os.PathLike[str], skip_warmup: bool = True, *, dtype: Any = None) -> None:
        self.path = str(path)
        self._given = None if dtype is None else np.dtype(dtype)
        self._index = Path(f"{self.path}.idx")
        self._data = Path(f"{self.path}.bin")
        count, documents, code = self._read_head()
        start = _HEAD.size
        raw: Any = np.memmap(self._index, np.uint8, "r")
        self.sizes = raw[start : start + 4 * count].view("<i4")
        self._pointers = raw[start + 4 * count : start + 12 * count].view("<i8")
        self._documents = raw[start + 12 * count :].view("<i8")
        self.dtype = self._decide_dtype(code)
        self._check_pointers()
        empty = self._data.stat().st_size == 0
        self._values = np.zeros(0, self.dtype) if empty else np.memmap(self._data, np.uint8, "r")
        del documents

    @staticmethod
    def exists(path: str | os.PathLike[str]) -> bool:
        """Whether both files exist."""
        return Path(f"{path}.idx").is_file() and Path(f"{path}.bin").is_file()

    @property
    def doc_idx(self) -> np.ndarray:
        """First sequence of each document, and the number of sequences, int64."""
        return self._documents

    @property
    def supports_prefetch(self) -> bool:
        """False: the operating system reads ahead."""
        return False

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, item: int | slice) -> Any:
        if isinstance(item, slice):
            return [self[i] for i in range(*item.indices(len(self)))]
        count = len(self)
        place = item + count if item < 0 else item
        if not 0 <= place < count:
            raise IndexError(f"sequence {item} of {self.path}: it has {count} sequences")
        return self.get(int(place))

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """The numbers `offset` to `offset + length` (exclusive) of sequence `idx`: a 1-D view of the memory map.

        Args:
            length: how many numbers; None: all up to the end of the sequence.

        Raises:
            DataArgumentError: the sequence is shorter.
        """
        size = int(self.sizes[idx])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise DataArgumentError(
                f"get({idx}, {offset}, {length}): got numbers {offset} to {stop}, expected a part of the {size} numbers"
            )
        start = int(self._pointers[idx]) + offset * self.dtype.itemsize
        return self._values[start : start + (stop - offset) * self.dtype.itemsize].view(self.dtype)

    def size(self, index: int) -> int:
        """The length of sequence `index`."""
        return int(self.sizes[index])

    def start(self, row: int) -> int:
        """Position in `values` of the first number of a sequence; `start(len(dataset))` is the count of numbers."""
        return self.values.size if row == len(self) else int(self._pointers[row]) // self.dtype.itemsize

    @property
    def values(self) -> np.ndarray:
        """The numbers of all sequences, one after the other.

        Raises:
            IndexFileError: the sequences are not one after the other in the data file.
        """
        ends = np.asarray(self._pointers, np.int64) + np.asarray(self.sizes, np.int64) * self.dtype.itemsize
        if len(self) and (self._pointers[0] or (ends[:-1] != self._pointers[1:]).any()):
            raise self._error("its sequences do not lie one after the other")
        stop = int(ends[-1]) if len(self) else 0
        return self._values[:stop].view(self.dtype)

    def __reduce__(self) -> Any:
        return _reopen, (type(self), self.path, None if self._given is None else self._given.str)

    def _read_head(self) -> tuple[int, int, int]:
        for file in (self._index, self._data):
            if not file.is_file():
                raise IndexFileError(
                    f"{file}: there is no such file; expected the pair {self.path}.idx and {self.path}.bin"
                )
        with open(self._index, "rb") as stream:
            head = stream.read(_HEAD.size)
        if head[:9] != _MAGIC:
            raise self._error("it does not begin with the magic MMIDIDX; is it another kind of file?")
        if len(head) < _HEAD.size:
            raise self._error(f"got {len(head)} bytes, expected at least {_HEAD.size}; the file is truncated")
        _, version, code, count, documents = _HEAD.unpack(head)
        if version != 1:
            raise self._error(f"got version {version}, expected 1")
        expected, got = _HEAD.size + 12 * count + 8 * documents, self._index.stat().st_size
        if got != expected:
            what = "truncated" if got < expected else "longer than its header says"
            raise self._error(f"got {got} bytes, expected {expected}; the file is {what}")
        return count, documents, code

    def _decide_dtype(self, code: int) -> np.dtype:
        if self._given is not None:
            return self._given.newbyteorder("<")
        if code not in _CODES:
            raise self._error(f"got data type code {code}, expected 1 to 8; pass dtype=...")
        names = _CODES[code]
        width = self._width() if len(names) > 1 else None
        for name in names:
            if width is None or np.dtype(name).itemsize == width:
                return np.dtype(name).newbyteorder("<")
        raise self._error(f"got data type code {code} and numbers of {width} bytes, which do not fit; pass dtype=...")

    def _width(self) -> int | None:
        """Bytes per number, from the positions of two neighbours or of the last sequence; None if it holds nothing."""
        filled = np.flatnonzero(np.asarray(self.sizes))
        if not filled.size:
            return None
        first = int(filled[0])
        later = self._pointers[first + 1 :]
        end = int(later[0]) if later.size else self._data.stat().st_size
        return (end - int(self._pointers[first])) // int(self.sizes[first])

    def _check_pointers(self) -> None:
        if not len(self):
            return
        sizes, starts = np.asarray(self.sizes, np.int64), np.asarray(self._pointers, np.int64)
        have, needed = self._data.stat().st_size, int((starts + sizes * self.dtype.itemsize).max())
        if (sizes < 0).any() or (starts < 0).any():
            raise self._error("it has a negative size or position; the file is damaged")
        if needed > have:
            raise IndexFileError(
                f"{self._data}: got {have} bytes, expected {needed} by {self._index.name}; the file is truncated"
            )

    def _error(self, text: str) -> IndexFileError:
        return IndexFileError(f"{self._index}: {text}")


def _reopen(kind: type[MMapIndexedDataset], path: str, dtype: str | None) -> MMapIndexedDataset:
    return kind(path, dtype=dtype)


class MMapIndexedDatasetBuilder:
    """Writes an indexed dataset, sequence after sequence.

    Args:
        out_file: the data file, ``PREFIX.bin``.
        dtype: numpy data type of the numbers: an integer type.

    Raises:
        DataArgumentError: the format has no code for the data type.
    """

    def __init__(self, out_file: str | os.PathLike[str], dtype: Any = np.int32) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype.name not in _WRITTEN:
            raise DataArgumentError(
                f"MMapIndexedDatasetBuilder(dtype=...): got {self.dtype.name}, expected one of {', '.join(_WRITTEN)}"
            )
        Path(out_file).parent.mkdir(parents=True, exist_ok=True)
        self._file: Any = open(out_file, "wb")  # noqa: SIM115 - closed by finalize()
        self._sizes: list[np.ndarray] = []
        self._count = 0
        self._documents = [0]

    def add_item(self, tensor: Any) -> None:
        """Append one sequence: a tensor, an array or a list of numbers. Raises what `add_rows` raises."""
        values = np.asarray(tensor).reshape(-1)
        self.add_rows(values, [values.size])

    def add_item_numpy(self, array: np.ndarray) -> None:
        """Does the same as `add_item`; DeepSpeed's name."""
        self.add_item(array)

    def add_items(self, tensors: Any) -> None:
        """Append several sequences."""
        for tensor in tensors:
            self.add_item(tensor)

    def add_rows(self, values: Any, sizes: Any) -> None:
        """Append several sequences.

        Args:
            values: the numbers of all sequences, one after the other.
            sizes: the length of each sequence.

        Raises:
            DataArgumentError: the data type cannot hold one of the numbers.
        """
        given, lengths = np.asarray(values).reshape(-1), np.asarray(sizes, np.int32).reshape(-1)
        flat = given.astype(self.dtype, copy=False)
        if not np.array_equal(flat, given):
            wrong = given[np.flatnonzero(flat != given)[0]]
            raise DataArgumentError(
                f"got the number {wrong}, which {self.dtype.name} cannot hold; choose a wider data type"
            )
        self._file.write(flat.tobytes())
        self._sizes.append(lengths)
        self._count += lengths.size

    def end_document(self) -> None:
        """End a document: the next sequence begins another one."""
        self._documents.append(self._count)

    def add_document_end(self, count: int) -> None:
        """Note that a document ends after the first `count` sequences. Call it in the order of the documents."""
        self._documents.append(count)

    def merge_file_(self, another_file: str | os.PathLike[str]) -> None:
        """Append all sequences and documents of the dataset with the prefix `another_file`.

        Raises:
            DataArgumentError: that dataset has another data type.
            IndexFileError: it is missing or damaged.
        """
        other = MMapIndexedDataset(another_file, dtype=None)
        if other.dtype != self.dtype:
            raise DataArgumentError(
                f"merge_file_({another_file}): got {other.dtype.name}, expected {self.dtype.name} as in this dataset"
            )
        base = self._count
        self.add_rows(other.values, other.sizes)
        self._documents += [base + int(first) for first in other.doc_idx[1:]]

    def finalize(self, index_file: str | os.PathLike[str]) -> None:
        """Close the data file and write ``PREFIX.idx``."""
        self._file.close()
        sizes = np.concatenate(self._sizes) if self._sizes else np.zeros(0, np.int32)
        pointers = np.zeros(sizes.size, "<i8")
        if sizes.size:
            np.cumsum(sizes[:-1].astype(np.int64) * self.dtype.itemsize, out=pointers[1:])
        with replacing(index_file) as temporary, open(temporary, "wb") as file:
            file.write(_HEAD.pack(_MAGIC, 1, _WRITTEN[self.dtype.name], sizes.size, len(self._documents)))
            file.write(sizes.astype("<i4").tobytes())
            file.write(pointers.tobytes())
            file.write(np.asarray(self._documents, "<i8").tobytes())
