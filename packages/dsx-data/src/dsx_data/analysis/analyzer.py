"""`DataAnalyzer` computes metrics of a dataset with many processes; it shows progress and can be resumed.

    analyzer = DataAnalyzer(dataset, num_threads=8, batch_size=1024, metric_names=["seqlen"],
                            metric_functions=[SequenceLength()], metric_types=["single_value_per_sample"],
                            metric_dtypes=[torch.int32], save_path="analysis")
    analyzer.run_map()
    analyzer.run_reduce()

The map can be divided among machines: each runs `run_map` with its own `worker_id` of `num_workers`. When all have
finished, one of them runs `run_reduce`. "Threads" are processes; the name is that of DeepSpeed's arguments. Processes
are forked, so datasets and functions need not be picklable.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from dsx_core.progress import Progress

from ..errors import AnalysisError, DataArgumentError, DataError
from .mapping import ACCUMULATE, SINGLE, Chunks, Metric, Reader, map_chunks, mark_of
from .reduction import reduce_metric
from .sharing import map_and_reduce

__all__ = ["DataAnalyzer"]


class DataAnalyzer:
    """Analyses a map-style dataset.

    Args:
        dataset: has `__len__` and `__getitem__`.
        num_workers, worker_id: number of machines that share the map, and which one this is.
        num_threads: processes on this machine.
        num_threads_reduce: metrics that are reduced at the same time.
        specific_threads: run only these of the processes 0 to `num_threads` - 1; empty: all.
        batch_size: samples per call of the metric functions.
        metric_names: names of the metrics, which are also the names of their folders below `save_path`.
        metric_functions: map a batch to a tensor: [samples], or values that are added up over all batches.
        metric_types: "single_value_per_sample" or "accumulate_value_over_samples".
        metric_dtypes: torch or numpy data types of the results.
        save_path: folder of the results; one that all machines share.
        collate_fn: makes a batch from a list of samples; None: `default_collate` of torch.
        custom_map_init, custom_map_update, custom_map_finalize, custom_reduce: replace the map and the reduction; see
            `run_map` and `run_reduce`.
        sample_indices: number of each sample in the results, if `dataset` is a part of another one; None: 0, 1, ...
        index_format: "dsx", or "megatron" for pairs of files that Megatron and DeepSpeed read.
        progress: show a progress bar.
        fingerprint: text that distinguishes this dataset and its metrics from others in the same folder; a checksum of
            three samples is added to it. Results with another fingerprint are computed again.

    Raises:
        DataArgumentError: the arguments do not fit each other.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str | os.PathLike[str] = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        custom_map_init: Callable[..., Any] | None = None,
        custom_map_update: Callable[..., Any] | None = None,
        custom_map_finalize: Callable[..., Any] | None = None,
        custom_reduce: Callable[..., Any] | None = None,
        sample_indices: Sequence[int] | None = None,
        *,
        index_format: Literal["dsx", "megatron"] = "dsx",
        progress: bool = False,
        fingerprint: str = "",
    ) -> None:
        self.dataset, self.num_workers, self.worker_id = dataset, num_workers, worker_id
        self.num_threads, self.num_threads_reduce = num_threads, num_threads_reduce
        self.specific_threads = list(specific_threads) or list(range(num_threads))
        self.save_path, self.sample_indices = Path(save_path), sample_indices
        self.index_format, self.progress = index_format, progress
        self._custom_map = (custom_map_init, custom_map_update, custom_map_finalize)
        self._custom_reduce = custom_reduce
        self.metrics = _metrics(metric_names, metric_functions, metric_types, metric_dtypes)
        self._reader = Reader(dataset, batch_size, collate_fn)
        self._check()
        self.chunks = Chunks(len(dataset), mark_of(dataset, fingerprint))

    def _check(self) -> None:
        for name, value in (
            ("num_workers", self.num_workers), ("num_threads", self.num_threads),
            ("num_threads_reduce", self.num_threads_reduce), ("batch_size", self._reader.batch_size),
        ):  # fmt: skip
            if value < 1:
                raise DataArgumentError(f"DataAnalyzer({name}=...): got {value}, expected at least 1")
        if not 0 <= self.worker_id < self.num_workers:
            raise DataArgumentError(
                f"DataAnalyzer(worker_id=...): got {self.worker_id}, expected 0 to {self.num_workers - 1}"
            )
        if not set(self.specific_threads) <= set(range(self.num_threads)):
            raise DataArgumentError(
                f"DataAnalyzer(specific_threads=...): got {self.specific_threads}, expected numbers below"
                f" num_threads, {self.num_threads}"
            )
        if self.index_format not in ("dsx", "megatron"):
            raise DataArgumentError(
                f"DataAnalyzer(index_format=...): got {self.index_format!r}, expected 'dsx' or 'megatron'"
            )
        if not hasattr(self.dataset, "__len__") or not len(self.dataset):
            raise DataArgumentError("DataAnalyzer: got a dataset without a length or without samples")
        if any(self._custom_map) and not all(self._custom_map):
            raise DataArgumentError(
                "DataAnalyzer: got some of custom_map_init, custom_map_update and custom_map_finalize, expected all"
                " three"
            )
        if self.sample_indices is not None and len(self.sample_indices) != len(self.dataset):
            raise DataArgumentError(
                f"DataAnalyzer(sample_indices=...): got {len(self.sample_indices)} numbers, expected"
                f" {len(self.dataset)}, one per sample"
            )

    # - Map

    def run_map(self) -> None:
        """Compute the metrics of this worker's samples and write them below `save_path`.

        Chunks that an earlier run finished are not computed again. With custom map functions, each process calls
        `init(thread_id, metric_names, metric_types, metric_dtypes, save_path, worker_id)`, then for every batch
        `update(metric_types, metric_dtypes, metric_functions, results, batch, first_sample)`, and at the end
        `finalize(metric_types, metric_dtypes, results)`. `results` is what `init` returned; these functions write the
        results to disk themselves.

        Raises:
            AnalysisError: a process failed. The message names the process, the samples and the cause.
        """
        executors = self.num_workers * self.num_threads
        shares = {
            thread: self.chunks.of(self.worker_id * self.num_threads + thread, executors)
            for thread in self.specific_threads
        }
        total = sum(last - first for share in shares.values() for first, last in map(self.chunks.range, share))
        with Progress(total, "analysing", shown=self.progress) as bar:
            if len(shares) == 1:
                for thread, share in shares.items():
                    for samples in self._map(thread, share):
                        bar.add(samples)
            else:
                _in_processes(shares, self._map, bar)

    def _map(self, thread: int, share: list[int]) -> Any:
        if self._custom_map[0] is None:
            return map_chunks(self._reader, self.metrics, self.save_path, self.chunks, share)
        return self._map_custom(thread, share)

    def _map_custom(self, thread: int, share: list[int]) -> Any:
        init, update, finalize = self._custom_map
        names, types = [m.name for m in self.metrics], [m.kind for m in self.metrics]
        dtypes, functions = [m.dtype for m in self.metrics], [m.function for m in self.metrics]
        results = init(thread, names, types, dtypes, str(self.save_path), self.worker_id)  # type: ignore[misc]
        for chunk in share:
            first, last = self.chunks.range(chunk)
            for number, batch in enumerate(self._reader.batches(first, last)):
                at = first + number * self._reader.batch_size
                update(types, dtypes, functions, results, batch, at)  # type: ignore[misc]
            yield last - first
        finalize(types, dtypes, results)  # type: ignore[misc]

    # - Reduction

    def run_reduce(self) -> None:
        """Merge the results of all workers' maps into the index files; `reduction.py` lists their names.

        A custom reduction is called with `(dataset, metric_names, metric_types, save_path, num_workers, num_threads,
        num_threads_reduce)`.

        Raises:
            AnalysisError: the results of some samples are missing, or belong to another dataset.
        """
        if self._custom_reduce is not None:
            names, types = [m.name for m in self.metrics], [m.kind for m in self.metrics]
            self._custom_reduce(
                self.dataset, names, types, str(self.save_path), self.num_workers, self.num_threads,
                self.num_threads_reduce,
            )  # fmt: skip
            return

        def reduce(metric: Metric) -> None:
            reduce_metric(
                metric, self.save_path, self.chunks, sample_indices=self.sample_indices, index_format=self.index_format
            )

        with (
            Progress(len(self.metrics), "merging", unit="metrics", shown=self.progress) as bar,
            ThreadPoolExecutor(self.num_threads_reduce) as pool,
        ):
            for _ in pool.map(reduce, self.metrics):
                bar.add(1)

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Run the map and then the reduction. Collective if there is a process group.

        With a process group every rank runs `run_map`, and rank 0 of `comm_group` runs `run_reduce`. `num_workers` and
        `worker_id` still say which part this rank maps.

        Args:
            comm_group: the ranks that take part; None: all ranks.

        Raises:
            AnalysisError: a rank failed. Every rank raises.
        """
        map_and_reduce(self.run_map, self.run_reduce, comm_group)


def _metrics(names: Any, functions: Any, kinds: Any, dtypes: Any) -> list[Metric]:
    if not names or len({len(names), len(functions), len(kinds), len(dtypes)}) != 1:
        raise DataArgumentError(
            f"got {len(names)} metric_names, {len(functions)} metric_functions, {len(kinds)} metric_types and"
            f" {len(dtypes)} metric_dtypes, expected equally many and at least one"
        )
    for kind in kinds:
        if kind not in (SINGLE, ACCUMULATE):
            raise DataArgumentError(f"metric_types: got {kind!r}, expected {SINGLE!r} or {ACCUMULATE!r}")
    if len(set(names)) != len(names):
        raise DataArgumentError(f"metric_names: got a name twice in {list(names)}")
    return [Metric(*item[:3], _numpy_dtype(item[3])) for item in zip(names, functions, kinds, dtypes)]


def _numpy_dtype(dtype: Any) -> np.dtype:
    if isinstance(dtype, torch.dtype):
        return torch.zeros(0, dtype=dtype, device="cpu").numpy().dtype
    return np.dtype(dtype)


def _in_processes(shares: dict[int, list[int]], work: Callable[[int, list[int]], Any], bar: Progress) -> None:
    """Run `work` for every share in a process of its own. The first failure ends all processes."""
    context = multiprocessing.get_context("fork")
    running: dict[Connection, tuple[int, Any]] = {}
    try:
        for thread, share in shares.items():
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(there, work, thread, share), daemon=True)
            process.start()
            there.close()
            running[here] = (thread, process)
        while running:
            for pipe in wait(list(running)):
                _handle_message(pipe, running, bar)  # type: ignore[arg-type]
    finally:
        for _, process in running.values():
            process.terminate()


def _handle_message(pipe: Connection, running: dict[Connection, tuple[int, Any]], bar: Progress) -> None:
    """Handle one message of a process: a count of samples done, None at its end, or the text of its failure."""
    thread, process = running[pipe]
    try:
        message = pipe.recv()
    except EOFError:
        process.join()
        raise AnalysisError(
            f"process {thread} of the analysis died with exit code {process.exitcode}; was it out of memory?"
        ) from None
    if isinstance(message, int):
        bar.add(message)
        return
    del running[pipe]
    process.join()
    if message is not None:
        raise AnalysisError(f"process {thread} of the analysis failed: {message}")


def _child(pipe: Connection, work: Callable[[int, list[int]], Any], thread: int, share: list[int]) -> None:
    # The parent's thread pool does not exist after a fork; an operation with several threads would wait for it forever.
    torch.set_num_threads(1)
    try:
        for samples in work(thread, share):
            pipe.send(samples)
        pipe.send(None)
    except DataError as error:
        pipe.send(str(error))
    except Exception as error:  # noqa: BLE001 - whatever the dataset or a metric raises has to reach the parent
        pipe.send(f"{type(error).__name__}: {error}")
