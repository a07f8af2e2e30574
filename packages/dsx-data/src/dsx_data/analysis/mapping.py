"""The map phase of an analysis: metrics of the samples, chunk by chunk, each chunk's result in separate files.

The chunks are the same for any number of processes. A chunk's file gets its final name when it is complete, and the
name has the range of its samples. So an analysis that was stopped continues with the missing chunks, also with another
number of processes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset, default_collate

from ..errors import AnalysisError, DataArgumentError, IndexFileError
from ..index import IndexFile, IndexWriter

__all__ = ["ACCUMULATE", "SINGLE", "Chunks", "Metric", "Reader", "map_chunks", "mark_of"]

SINGLE = "single_value_per_sample"
ACCUMULATE = "accumulate_value_over_samples"
_LARGEST_CHUNK = 65536
_FEWEST_CHUNKS = 64


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: name of the metric, and of its folder and files.
        function: maps a batch to one number per sample, [samples], or to numbers that are added up over all batches.
        kind: `SINGLE` or `ACCUMULATE`.
        dtype: numpy data type of the numbers.
    """

    name: str
    function: Callable[[Any], Any]
    kind: str
    dtype: np.dtype

    def part(self, save_path: Path, chunk: int) -> Path:
        """Path of the file with the result of a chunk."""
        return save_path / self.name / "parts" / f"part_{chunk:06d}.dsxi"

    def final(self, save_path: Path, what: str) -> Path:
        """Path, without suffix, of the index `what` of this metric."""
        return save_path / self.name / f"{self.name}_{what}"


@dataclass(frozen=True)
class Chunks:
    """Division of `size` samples into chunks.

    Attributes:
        size: samples of the dataset.
        mark: text that distinguishes this dataset from others; results with another mark are not used.
    """

    size: int
    mark: str = ""

    @property
    def length(self) -> int:
        """Samples per chunk. There are at least 64 chunks, so that processes get equal work. A chunk has at most 65536
        samples, so that an interruption loses little work.
        """
        return max(1, min(_LARGEST_CHUNK, self.size // _FEWEST_CHUNKS))

    def __len__(self) -> int:
        return -(-self.size // self.length)

    def range(self, chunk: int) -> tuple[int, int]:
        """The first sample of a chunk, and the sample after its last one."""
        return chunk * self.length, min(self.size, (chunk + 1) * self.length)

    def of(self, executor: int, executors: int) -> list[int]:
        """The chunks of executor number `executor` of `executors`."""
        return list(range(executor, len(self), executors))


@dataclass(frozen=True)
class Reader:
    """Reads batches of a dataset in order."""

    dataset: Any
    batch_size: int
    collate_fn: Callable[[list[Any]], Any] | None

    def batches(self, first: int, last: int) -> Iterator[Any]:
        """Batches of the samples `first` to `last - 1`."""
        for start in range(first, last, self.batch_size):
            stop = min(last, start + self.batch_size)
            whole = self._slice(start, stop)
            yield self._collated(start, stop) if whole is None else whole

    def _slice(self, start: int, stop: int) -> Any:
        """The batch as a slice of the dataset, if that consists of tensors and is collated by default; else None."""
        if self.collate_fn is not None:
            return None
        if isinstance(self.dataset, torch.Tensor):
            return self.dataset[start:stop]
        if type(self.dataset) is TensorDataset:
            return [tensor[start:stop] for tensor in self.dataset.tensors]
        return None

    def _collated(self, start: int, stop: int) -> Any:
        numbers = range(start, stop)
        many = getattr(self.dataset, "__getitems__", None)
        samples = many(list(numbers)) if many is not None else [self.dataset[i] for i in numbers]
        if self.collate_fn is not None:
            return self.collate_fn(samples)
        try:
            return default_collate(samples)
        except (RuntimeError, TypeError) as error:
            raise AnalysisError(
                f"samples {start} to {stop - 1} do not fit into one batch ({error}); pass collate_fn=list if the metric"
                " functions take a list of samples"
            ) from error


def mark_of(dataset: Any, fingerprint: str) -> str:
    """A text that distinguishes a dataset from others: the caller's `fingerprint`, and a checksum of three samples.

    Samples that are different at every reading (random crops) give another mark each time, so such an analysis always
    begins again from the start.
    """
    size = len(dataset)
    crc = 0
    for number in (0, size // 2, size - 1):
        crc = _checksum(dataset[number], crc)
    return f"{fingerprint}{crc:08x}"


def _checksum(value: Any, crc: int) -> int:
    """CRC-32 of the numbers and texts in a sample. Of objects of other kinds only the name of the type counts."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, Mapping):
        for key, item in value.items():
            crc = _checksum(item, zlib.crc32(str(key).encode(), crc))
        return crc
    if isinstance(value, (list, tuple)) and not all(isinstance(item, (int, float)) for item in value):
        for item in value:
            crc = _checksum(item, crc)
        return crc
    if isinstance(value, (str, bytes)):
        return zlib.crc32(value.encode() if isinstance(value, str) else value, crc)
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        return zlib.crc32(type(value).__name__.encode(), crc)
    return zlib.crc32(np.ascontiguousarray(array).tobytes(), zlib.crc32(f"{array.dtype}{array.shape}".encode(), crc))


def map_chunks(
    reader: Reader, metrics: Sequence[Metric], save_path: Path, chunks: Chunks, mine: Sequence[int]
) -> Iterator[int]:
    """Compute and write the metrics of the chunks `mine`; yields the number of samples of each finished chunk."""
    for chunk in mine:
        first, last = chunks.range(chunk)
        missing = [m for m in metrics if not _is_complete(m, save_path, chunk, chunks)]
        if missing:
            for metric, values in zip(missing, _compute(reader, missing, first, last)):
                facts = _facts(metric, chunk, chunks)
                with IndexWriter(metric.part(save_path, chunk), metric.dtype, facts=facts) as writer:
                    writer.add(values)
        yield last - first


def _facts(metric: Metric, chunk: int, chunks: Chunks) -> dict[str, Any]:
    first, last = chunks.range(chunk)
    return {
        "metric": metric.name,
        "kind": metric.kind,
        "first": first,
        "last": last,
        "samples": chunks.size,
        "mark": chunks.mark,
    }


def _is_complete(metric: Metric, save_path: Path, chunk: int, chunks: Chunks) -> bool:
    path = metric.part(save_path, chunk)
    if not path.is_file():
        return False
    try:
        found = IndexFile(path)
    except IndexFileError:
        return False  # a damaged file is computed again
    return found.facts == _facts(metric, chunk, chunks) and found.dtype == metric.dtype


def _compute(reader: Reader, metrics: Sequence[Metric], first: int, last: int) -> list[np.ndarray]:
    results: list[list[np.ndarray]] = [[] for _ in metrics]
    start = first
    for batch in reader.batches(first, last):
        stop = min(last, start + reader.batch_size)
        for metric, parts in zip(metrics, results):
            values = _values(metric, batch, start, stop)
            if metric.kind == SINGLE or not parts:
                parts.append(values)
            else:
                parts[0] = _added(metric, parts[0], values)
        start = stop
    return [np.concatenate(parts) for parts in results]


def _values(metric: Metric, batch: Any, start: int, stop: int) -> np.ndarray:
    try:
        result = metric.function(batch)
    except DataArgumentError as error:
        raise AnalysisError(f"metric {metric.name!r}, samples {start} to {stop - 1}: {error}") from error
    array = result.detach().cpu().numpy() if isinstance(result, torch.Tensor) else np.asarray(result)
    if metric.kind == SINGLE and array.reshape(-1).size != stop - start:
        raise AnalysisError(
            f"metric {metric.name!r}, samples {start} to {stop - 1}: its function returned {array.reshape(-1).size}"
            f" numbers, expected {stop - start}, one per sample"
        )
    return array.reshape(-1).copy()


def _added(metric: Metric, total: np.ndarray, values: np.ndarray) -> np.ndarray:
    if total.shape != values.shape:
        raise AnalysisError(
            f"metric {metric.name!r}: its function returned {values.size} numbers after {total.size}, expected equally"
            " many for every batch, because they are added up"
        )
    return total + values
