"""Clusters: the samples that one increase of the difficulty admitted, in a random order that can be computed again.

A cluster's order is a function of (seed, number of the cluster, round), so that its state is two numbers: the round,
and how many samples of it are used. Its samples are kept in memory, or in an index file below `folder`, which every
rank of a machine memory-maps. The file is a cache: a missing one is made again, and its header describes its contents.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import IndexFileError
from ..index import IndexFile, IndexWriter
from ..randomness import generator

__all__ = ["Cluster", "store_samples"]

logger = logging.getLogger("dsx_data")


class Cluster:
    """Samples that are drawn without repetition until all are used, then in another order.

    Args:
        samples: numbers of the samples.
        seed, number: decide the orders.
        difficulties: the difficulty of each metric at which the samples were admitted.
    """

    def __init__(self, samples: np.ndarray, *, seed: int, number: int, difficulties: dict[str, int]) -> None:
        self.samples, self.seed, self.number, self.difficulties = samples, seed, number, difficulties
        self.position = self.round = 0
        self._order: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, count: int) -> np.ndarray:
        """Take the next `count` samples: [count], int64."""
        taken: list[np.ndarray] = []
        while count:
            part = self._current_order()[self.position : self.position + count]
            taken.append(np.asarray(self.samples[part], np.int64))
            self.position += len(part)
            count -= len(part)
            if self.position == len(self):
                self.round, self.position, self._order = self.round + 1, 0, None
        return np.concatenate(taken) if taken else np.zeros(0, np.int64)

    def state(self) -> dict[str, Any]:
        """The difficulties, the round and the position in it."""
        return {"difficulties": dict(self.difficulties), "round": self.round, "position": self.position}

    def go_to(self, round_number: int, position: int) -> None:
        """Continue from a round and a position in it."""
        self.round, self.position, self._order = round_number, position, None

    def _current_order(self) -> np.ndarray:
        if self._order is None:
            order = torch.randperm(len(self), generator=generator(self.seed, self.number, self.round), device="cpu")
            self._order = order.numpy().astype(np.min_scalar_type(max(1, len(self))))
        return self._order


def store_samples(samples: np.ndarray, folder: Path | None, name: str, facts: dict[str, Any]) -> np.ndarray:
    """Write the samples to a file below `folder` and return them memory-mapped; without `folder` return them unchanged.

    A file that holds exactly these samples already is used as it is.
    """
    if folder is None or not samples.size:
        return samples
    path = folder / f"{name}.dsxi"
    about = {**facts, "sum": int(samples.sum(dtype=np.int64)), "count": int(samples.size)}
    if path.is_file():
        try:
            found = IndexFile(path)
            if found.facts == about:
                return found.values
        except IndexFileError as error:
            logger.warning("%s; making it again", error)
    # Two ranks may write the same content at the same time: each renames its own temporary file.
    with IndexWriter(path, samples.dtype, row_size=1, facts=about) as writer:
        writer.add_rows(samples)
    return IndexFile(path).values
