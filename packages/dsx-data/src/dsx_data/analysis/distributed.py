"""An analysis by the ranks of a process group: every rank maps its part, rank 0 reduces.

The ranks must share a file system: `save_path` is the same folder for all. If one rank fails, every rank raises an
error with that rank's text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .analyzer import DataAnalyzer
from .sharing import map_and_reduce

__all__ = ["DistributedDataAnalyzer"]


class DistributedDataAnalyzer:
    """Does the work of `DataAnalyzer` with the ranks of a process group as workers.

    Args:
        num_workers, worker_id: number of ranks, and the number of this rank; None: those of the process group.
        num_threads: processes per rank.
        device: has no effect, and is accepted because scripts pass it: the metric functions choose where they compute.
        comm_group: the process group; None: all ranks. If no process group is initialised, this process works alone.

    The other arguments are those of `DataAnalyzer`. The dtypes of the metrics default to int64.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int | None = None,
        num_threads: int = 1,
        worker_id: int | None = None,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        save_path: str = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: Any = "cpu",
        comm_group: Any = None,
        sample_indices: Sequence[int] | None = None,
        *,
        metric_dtypes: Sequence[Any] | None = None,
        **options: Any,
    ) -> None:
        import dsx_comm  # lazy import: an analysis by one process needs no communication

        alive = dsx_comm.is_initialized()
        self.device, self.comm_group = device, comm_group
        self.analyzer = DataAnalyzer(
            dataset,
            num_workers=num_workers or (dsx_comm.get_world_size(comm_group) if alive else 1),
            worker_id=worker_id if worker_id is not None else (dsx_comm.get_rank(comm_group) if alive else 0),
            num_threads=num_threads,
            batch_size=batch_size,
            metric_names=metric_names,
            metric_functions=metric_functions,
            metric_types=metric_types,
            metric_dtypes=["int64"] * len(metric_names) if metric_dtypes is None else metric_dtypes,
            save_path=save_path,
            collate_fn=collate_fn,
            sample_indices=sample_indices,
            **options,
        )

    def run_map_reduce(self) -> None:
        """Run the map and then the reduction. Collective.

        Raises:
            AnalysisError: a rank failed. Every rank raises.
        """
        map_and_reduce(self.analyzer.run_map, self.analyzer.run_reduce, self.comm_group)
