"""The samples of a dataset in the order of one metric, from its index files.

The samples that a difficulty admits are always the beginning of this order. With "value" they are the samples whose
value is at most the difficulty. With "percentile" they are the fraction difficulty / max_difficulty of all samples, but
at least one sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..errors import DataArgumentError
from ..index import open_index

__all__ = ["MetricOrder"]


@dataclass(frozen=True)
class MetricOrder:
    """Samples from easy to hard by one metric.

    Attributes:
        name: name of the metric.
        samples: all sample numbers in order of difficulty (usually a memory map).
        kind: what a difficulty is: a value of the metric, or a percentile of the samples.
        values: distinct values of the metric, increasing; needed for kind "value".
        ends: number of samples with at most each of these values.
        maximum: greatest difficulty.
    """

    name: str
    samples: np.ndarray
    kind: Literal["value", "percentile"]
    maximum: int
    values: np.ndarray | None = None
    ends: np.ndarray | None = None

    @staticmethod
    def open(name: str, section: Any, *, size: int) -> MetricOrder:
        """Open the index files that a metric's section names.

        Args:
            name: name of the metric.
            section: has `index_to_sample_path`, `index_to_metric_path`, `difficulty_type` and `max_difficulty`.
            size: number of samples of the dataset.

        Raises:
            IndexFileError: a file is missing or damaged.
            DataArgumentError: the files were made for another dataset, or do not belong together.
        """
        rows = open_index(section.index_to_sample_path)
        samples = rows.values
        if len(samples) != size:
            raise DataArgumentError(
                f"{name}.index_to_sample_path: got an index of {len(samples)} samples"
                f" ({section.index_to_sample_path}), expected {size} as in the dataset; analyse this dataset again"
            )
        if section.difficulty_type == "percentile":
            return MetricOrder(name, samples, "percentile", section.max_difficulty)
        values = np.asarray(open_index(section.index_to_metric_path).values)
        if len(values) != len(rows):
            raise DataArgumentError(
                f"{name}.index_to_sample_path: got {len(rows)} rows, expected {len(values)}, one per value of"
                ' index_to_metric_path; a file of percentiles needs difficulty_type "percentile"'
            )
        return MetricOrder(name, samples, "value", section.max_difficulty, values, np.cumsum(rows.sizes))

    def admitted(self, difficulty: int) -> int:
        """The number of samples, from the start of the order, that a difficulty admits."""
        if self.kind == "percentile":
            count = len(self.samples) * min(difficulty, self.maximum) // self.maximum
            return max(count, min(1, len(self.samples)))
        values, ends = self.values, self.ends
        if values is None or ends is None:
            raise DataArgumentError(f"{self.name}: an order by value needs the values of the metric")
        known = int(np.searchsorted(values, difficulty, side="right"))
        return int(ends[known - 1]) if known else 0
