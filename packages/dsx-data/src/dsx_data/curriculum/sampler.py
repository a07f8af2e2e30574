"""Samples drawn by difficulty, over several metrics at once.

Each step has a difficulty per metric (`schedule`). A sample is admitted when every metric admits it. The samples that
one increase of the difficulties admits form a cluster. For each sample of a global batch a cluster is drawn, with a
probability proportional to its size, and the next sample of that cluster's random order is taken.

All draws are a function of the configuration, the seed, the index files and the number of the draw. So every rank draws
the whole global batch itself and takes its share, without communication, and a run resumes at any number of ranks.

A metric with clustering_type "single_cluster" does not choose samples. Its difficulty only reaches the function that
post-processes batches, which may cut sequences to it.

Memory: one byte per sample for the count of metrics that admit it, the clusters (4 bytes per sample below 2^32 samples,
on disk with a `cluster_path`), and one random order per cluster in use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import DataArgumentError, DataStateError
from ..randomness import generator
from .clusters import Cluster, store_samples
from .metrics import MetricOrder
from .schedule import CurriculumScheduler

__all__ = ["CurriculumSampler", "Draw"]


@dataclass(frozen=True)
class Draw:
    """One global batch.

    Attributes:
        samples: numbers of the samples of all ranks, int64.
        difficulties: difficulty of each metric at this draw.
    """

    samples: np.ndarray
    difficulties: dict[str, int]


class CurriculumSampler:
    """Draws global batches by difficulty.

    Args:
        size: number of samples of the dataset.
        metrics: section of each metric by name; see `dsx_data.config.CurriculumMetric`.
        global_batch_size: samples per draw: those of one optimizer step over all ranks.
        seed: of all random choices.
        num_epochs: all draws together have at most this many times the size of the dataset.
        cluster_path: folder for the clusters; None keeps them in memory.

    Raises:
        DataArgumentError: a section is incomplete, or an index belongs to another dataset.
        IndexFileError: an index file is missing or damaged.
    """

    def __init__(
        self,
        size: int,
        metrics: Mapping[str, Any],
        *,
        global_batch_size: int,
        seed: int = 1234,
        num_epochs: int = 1000,
        cluster_path: str | os.PathLike[str] | None = None,
    ) -> None:
        if size < 1 or global_batch_size < 1:
            raise DataArgumentError(
                f"CurriculumSampler: got {size} samples and batches of {global_batch_size}, expected at least 1 of both"
            )
        self.size, self.batch_size, self.seed = size, global_batch_size, seed
        self.total = size * num_epochs
        self.schedules = {name: CurriculumScheduler(section, name=name) for name, section in metrics.items()}
        chosen = [name for name, section in metrics.items() if section.clustering_type != "single_cluster"]
        self._orders = {name: MetricOrder.open(name, metrics[name], size=size) for name in chosen}
        if not metrics:
            raise DataArgumentError("CurriculumSampler: got no metric, expected at least one in curriculum_metrics")
        self._folder = None if cluster_path is None else Path(cluster_path)
        self._begin()

    def _begin(self) -> None:
        self.step = 0
        self._clusters: list[Cluster] = []
        self._prefix = dict.fromkeys(self._orders, 0)
        self._votes = np.zeros(self.size if len(self._orders) > 1 else 0, np.uint8)
        for schedule in self.schedules.values():
            schedule.set_current_difficulty(schedule.minimum)

    @property
    def drawn(self) -> int:
        """Samples drawn so far."""
        return self.step * self.batch_size

    @property
    def current_difficulties(self) -> dict[str, int]:
        """Difficulty of each metric at the latest draw."""
        return {name: schedule.current for name, schedule in self.schedules.items()}

    def set_custom_curriculum_learning_schedule(self, functions: Mapping[str, Callable[[int], int]]) -> None:
        """Give the functions (step to difficulty) of the metrics with a "custom" schedule, by name of the metric.
        Raises `DataArgumentError` for a name that is no metric of this sampler.
        """
        for name, function in functions.items():
            if name not in self.schedules:
                raise DataArgumentError(
                    f"set_custom_curriculum_learning_schedule: got the metric {name!r}, expected one of"
                    f" {', '.join(self.schedules)}"
                )
            self.schedules[name].set_custom_get_difficulty(function)

    def draw(self) -> Draw:
        """The next global batch."""
        for schedule in self.schedules.values():
            schedule.update_difficulty(self.step + 1)
        self._admit(self.current_difficulties)
        samples = self._from_clusters()
        self.step += 1
        return Draw(samples, self.current_difficulties)

    def _from_clusters(self) -> np.ndarray:
        ends = np.cumsum([len(cluster) for cluster in self._clusters])
        slots = torch.randint(
            int(ends[-1]), (self.batch_size,), generator=generator(self.seed, -1, self.step), device="cpu"
        ).numpy()
        owner = np.searchsorted(ends, slots, side="right")
        samples = np.empty(self.batch_size, np.int64)
        for number, cluster in enumerate(self._clusters):
            mine = np.flatnonzero(owner == number)
            if mine.size:
                samples[mine] = cluster.take(mine.size)
        return samples

    # - Clusters

    def _admit(self, difficulties: dict[str, int]) -> None:
        """Make a cluster of the samples that these difficulties admit and earlier ones did not."""
        if not self._orders:
            if not self._clusters:
                everything = np.arange(self.size, dtype=np.min_scalar_type(self.size))
                self._clusters.append(Cluster(everything, seed=self.seed, number=0, difficulties=difficulties))
            return
        before = dict(self._prefix)
        new = self._newly_admitted(difficulties)
        if new.size:
            number = len(self._clusters)
            facts = {"seed": self.seed, "difficulties": difficulties, "size": self.size}
            kept = store_samples(new, self._folder, f"cluster_{number:05d}", facts)
            self._clusters.append(Cluster(kept, seed=self.seed, number=number, difficulties=difficulties))
        elif not self._clusters:
            self._prefix = before
            raise DataArgumentError(
                f"curriculum: no sample is admitted at the first difficulties {difficulties}; raise min_difficulty"
                f" ({', '.join(self._smallest(order) for order in self._orders.values())})"
            )

    def _newly_admitted(self, difficulties: dict[str, int]) -> np.ndarray:
        joined: list[np.ndarray] = []
        for name, order in self._orders.items():
            first, last = self._prefix[name], order.admitted(difficulties[name])
            if last <= first:  # a custom schedule may fall, but samples that were admitted stay admitted
                continue
            self._prefix[name] = last
            samples = self._checked(order, order.samples[first:last])
            if len(self._orders) == 1:
                return samples.astype(np.min_scalar_type(self.size))
            self._votes[samples] += 1
            joined.append(samples[self._votes[samples] == len(self._orders)])
        if not joined:
            return np.zeros(0, np.uint8)
        return np.sort(np.concatenate(joined)).astype(np.min_scalar_type(self.size))

    def _checked(self, order: MetricOrder, samples: np.ndarray) -> np.ndarray:
        if samples.size and int(samples.max()) >= self.size:
            raise DataArgumentError(
                f"{order.name}: its index names sample {int(samples.max())}, expected numbers below {self.size}"
            )
        return samples

    @staticmethod
    def _smallest(order: MetricOrder) -> str:
        least = "percentile 1" if order.values is None else f"smallest value {order.values[0]}"
        return f"{order.name}: {least}"

    # - State

    def state_dict(self) -> dict[str, Any]:
        """The state that the next draws depend on. It does not depend on the number of ranks."""
        return {
            "step": self.step,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "size": self.size,
            "current_difficulties": self.current_difficulties,
            "clusters": [cluster.state() for cluster in self._clusters],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            DataStateError: the state was saved with another dataset, batch size or set of metrics.
        """
        for key, ours, reason in (
            ("size", self.size, "samples in the dataset"),
            ("batch_size", self.batch_size, "samples per global batch (train_batch_size)"),
        ):
            if int(state[key]) != ours:
                raise DataStateError(f"curriculum state: got {state[key]} {reason}, expected {ours} as configured now")
        saved = state["current_difficulties"]
        if set(saved) != set(self.schedules):
            raise DataStateError(
                f"curriculum state: got the metrics {sorted(saved)}, expected {sorted(self.schedules)} as configured"
            )
        self.seed = int(state["seed"])
        self._begin()
        for entry in state["clusters"]:
            self._admit({name: int(value) for name, value in entry["difficulties"].items()})
            if not self._clusters or len(self._clusters) > len(state["clusters"]):
                raise DataStateError("curriculum state: its clusters do not follow from the index files")
            self._clusters[-1].go_to(int(entry["round"]), int(entry["position"]))
        for name, value in saved.items():
            self.schedules[name].set_current_difficulty(int(value))
        self.step = int(state["step"])
