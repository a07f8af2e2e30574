"""The reduction of an analysis: merges the results of the chunks into the index files that samplers read.

For a metric of one value per sample, below ``SAVE_PATH/METRIC/``:

    METRIC_sample_to_metric                       row i: the value of sample i
    METRIC_index_to_metric                        the distinct values, increasing, one per row
    METRIC_index_to_sample                        row i: the samples that have the i-th distinct value
    METRIC_index_to_sample_percentile_merged      row i of 100: the samples between percentile i and i + 1

For a metric that is summed over all samples: ``METRIC_metric_value``, one row. Within a row samples are in increasing
order. The names are those of DeepSpeed; the format is that of this package (suffix ``.dsxi``), or Megatron's pair of
files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import AnalysisError, IndexFileError
from ..index import IndexFile, IndexWriter, MMapIndexedDatasetBuilder
from .mapping import SINGLE, Chunks, Metric

__all__ = ["PERCENTILES", "reduce_metric"]

PERCENTILES = 100


def reduce_metric(
    metric: Metric, save_path: Path, chunks: Chunks, *, sample_indices: Sequence[int] | None, index_format: str
) -> None:
    """Merge the results of a metric's chunks into its index files.

    Args:
        sample_indices: number of each sample in the index; None: 0, 1, 2, ...
        index_format: "dsx" or "megatron".

    Raises:
        AnalysisError: the result of a chunk is missing, or belongs to another dataset.
    """
    parts = [_part(metric, save_path, chunk, chunks) for chunk in range(len(chunks))]
    if metric.kind != SINGLE:
        total = sum((np.asarray(part.values) for part in parts[1:]), start=np.array(parts[0].values))
        _write(metric.final(save_path, "metric_value"), total, [total.size], metric.dtype, index_format)
        return
    values = np.concatenate([part.values for part in parts])
    del parts
    _write(metric.final(save_path, "sample_to_metric"), values, None, metric.dtype, index_format)
    order = np.argsort(values, kind="stable")
    distinct, counts = np.unique(values, return_counts=True)
    del values
    numbers = order if sample_indices is None else np.asarray(sample_indices)[order]
    numbers = numbers.astype(_id_dtype(numbers, index_format))
    _write(metric.final(save_path, "index_to_metric"), distinct, None, metric.dtype, index_format)
    _write(metric.final(save_path, "index_to_sample"), numbers, counts, numbers.dtype, index_format)
    edges = np.arange(PERCENTILES + 1) * numbers.size // PERCENTILES
    merged = metric.final(save_path, "index_to_sample_percentile_merged")
    _write(merged, numbers, np.diff(edges), numbers.dtype, index_format)


def _part(metric: Metric, save_path: Path, chunk: int, chunks: Chunks) -> IndexFile:
    first, last = chunks.range(chunk)
    path = metric.part(save_path, chunk)
    try:
        part = IndexFile(path)
    except IndexFileError as error:
        raise AnalysisError(
            f"metric {metric.name!r}: the result of samples {first} to {last - 1} is missing ({error}); run the map of"
            " every worker first"
        ) from error
    found = tuple(part.facts.get(key) for key in ("first", "last", "samples", "mark"))
    if found != (first, last, chunks.size, chunks.mark):
        raise AnalysisError(
            f"{path}: it holds the samples {found[0]} to {found[1]} of a dataset of {found[2]} with the mark"
            f" {found[3]}, expected {first} to {last} of {chunks.size} with the mark {chunks.mark}; another dataset was"
            " analysed in this folder: run the map again, or choose another save_path"
        )
    return part


def _id_dtype(numbers: np.ndarray, index_format: str) -> Any:
    greatest = int(numbers.max()) if numbers.size else 0
    if index_format == "megatron":  # Megatron and DeepSpeed agree on the codes of these types only
        return np.int32 if greatest < 1 << 31 else np.int64
    return np.min_scalar_type(max(greatest, 256))


def _write(path: Path, values: np.ndarray, sizes: Any, dtype: Any, index_format: str) -> None:
    """Write rows of the given sizes; None: rows of one value."""
    if index_format == "megatron":
        builder = MMapIndexedDatasetBuilder(f"{path}.bin", dtype)
        builder.add_rows(values, np.ones(values.size, np.int32) if sizes is None else sizes)
        builder.finalize(f"{path}.idx")
        return
    with IndexWriter(f"{path}.dsxi", dtype, row_size=1 if sizes is None else None) as writer:
        writer.add_rows(values, sizes)
