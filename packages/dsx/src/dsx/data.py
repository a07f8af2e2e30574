"""The training data loader: which sample goes to which rank, in which order, and where the next one is.

The idea: the order of samples is a function of (seed, epoch) alone, and a position in it is counted in *global*
samples. Ranks take it in turns: of the samples of one global micro-batch, rank r of W takes number r, r + W, r + 2W,
... So the set of samples in each global batch does not depend on the number of ranks, and a run stopped at a position
goes on there with any other number of ranks. Each epoch has its own order.

Left out: sharding of iterable datasets (they must shard themselves), and samplers by difficulty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler


def epoch_order(length: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The order in which the samples of one epoch are used by all ranks together."""
    if not shuffle:
        return list(range(length))
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator).tolist()


def rank_share(order: list[int], *, rank: int, world_size: int, drop_last: bool) -> list[int]:
    """What one rank takes from `order`: every `world_size`-th sample, equally many on each rank.

    The tail that does not divide is dropped (`drop_last`) or filled up from the start of `order`, repeatedly if it is
    shorter than the number of ranks.
    """
    if drop_last:
        usable = order[: len(order) // world_size * world_size]
    else:
        missing = -len(order) % world_size
        repeats = -(-missing // max(1, len(order)))
        usable = order + (order * repeats)[:missing]
    return usable[rank::world_size]


class ShardedSampler(Sampler[int]):
    """Yields this rank's sample indices of the current epoch, from the current position on.

    Args:
        length: number of samples in the dataset.
        rank, world_size: place among the data-parallel ranks.
        shuffle: a new permutation each epoch; else dataset order.
        seed: with the epoch, decides the permutation; the same on all ranks.
        drop_last: drop the tail that cannot be shared out evenly instead of repeating samples.
    """

    def __init__(
        self, length: int, *, rank: int, world_size: int, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        self.length, self.rank, self.world_size = length, rank, world_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self.position = 0  # global samples of this epoch that are already used

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` from its first sample."""
        self.epoch, self.position = epoch, 0

    def _indices(self, position: int) -> list[int]:
        order = epoch_order(self.length, seed=self.seed, epoch=self.epoch, shuffle=self.shuffle)
        return rank_share(order[position:], rank=self.rank, world_size=self.world_size, drop_last=self.drop_last)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices(self.position))

    def __len__(self) -> int:
        remaining = self.length - self.position
        return remaining // self.world_size if self.drop_last else -(-remaining // self.world_size)


@dataclass(frozen=True)
class LoaderOptions:
    """How a loader reads. `micro_batch_size` is per rank; `rank`/`world_size` are data-parallel."""

    micro_batch_size: int
    rank: int = 0
    world_size: int = 1
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False
    pin_memory: bool = True
    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    sampler: Sampler | Iterable[int] | None = None


class TrainingLoader:
    """An iterable over this rank's micro-batches that knows its epoch and position.

    Each `for` loop over it is one epoch. `state_dict()` names the next unused sample independently of the number of
    ranks; after `load_state_dict()` the next loop goes on there.
    """

    def __init__(self, dataset: Dataset | Any, options: LoaderOptions) -> None:
        if options.micro_batch_size <= 0:
            raise ValueError(
                f"micro_batch_size: got {options.micro_batch_size}, expected a positive number of samples; "
                "pass batch_size=... or set train_micro_batch_size_per_gpu in the config"
            )
        self.dataset, self.options = dataset, options
        self.sampler = _sampler_for(dataset, options)
        self._loader = DataLoader(
            dataset,
            batch_size=options.micro_batch_size,
            sampler=self.sampler,
            num_workers=options.num_workers,
            collate_fn=options.collate_fn,
            # Pinned memory only speeds copies to a CUDA device; without one torch would warn and ignore it.
            pin_memory=options.pin_memory and torch.cuda.is_available(),
            drop_last=options.drop_last,
        )
        self._track = _track_for(self.sampler, options)

    @property
    def batch_size(self) -> int:
        """Samples per micro-batch on this rank."""
        return self.options.micro_batch_size

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next loop (or the running one) reads."""
        return self._track.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next loop read `epoch` from its start."""
        self._track.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._track.begin()
        for batch in self._loader:
            # Before the yield: a checkpoint written in the loop body counts this batch as used.
            self._track.advance()
            yield batch
        self._track.finish()

    def state_dict(self) -> dict[str, Any]:
        """Seed, epoch and position in global samples; no trace of ranks."""
        return self._track.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, with this loader's own number of ranks and batch size."""
        self._track.load_state_dict(state)


class RepeatingLoader:
    """Restarts a loader whenever it ends, so that `next()` never stops; each restart is a new epoch.

    Raises:
        ValueError: the loader yields nothing at all.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self.loader)
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
        try:
            return next(self._iterator)
        except StopIteration:
            raise ValueError("RepeatingLoader: got an empty loader, expected at least one batch") from None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """That of the loader inside."""
        return self.loader.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load into the loader inside; a loop that is under way is left and begun anew from there."""
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]
        self._iterator = None


def _sampler_for(dataset: Any, options: LoaderOptions) -> Any:
    if options.sampler is not None:
        return options.sampler
    if isinstance(dataset, IterableDataset):
        return None
    return ShardedSampler(
        len(dataset),
        rank=options.rank,
        world_size=options.world_size,
        shuffle=options.shuffle,
        seed=options.seed,
        drop_last=options.drop_last,
    )


def _track_for(sampler: Any, options: LoaderOptions) -> _PositionTrack | _ForeignTrack:
    if isinstance(sampler, ShardedSampler):
        return _PositionTrack(sampler, options.micro_batch_size)
    return _ForeignTrack(sampler)


class _PositionTrack:
    """Epoch and position of a loader over a `ShardedSampler`.

    Counted as batches leave the loader, not as the sampler is read: with workers the sampler runs ahead of the
    training.
    """

    def __init__(self, sampler: ShardedSampler, micro_batch_size: int) -> None:
        self._sampler = sampler
        self._stride = micro_batch_size * sampler.world_size
        self._used = 0
        self._under_way = False

    @property
    def epoch(self) -> int:
        return self._sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)
        self._used = 0
        self._under_way = False

    def begin(self) -> None:
        if self._under_way:  # the previous loop was left early: its epoch is over
            self.set_epoch(self._sampler.epoch + 1)
        self._under_way = True

    def advance(self) -> None:
        self._used = min(self._used + self._stride, self._sampler.length)

    def finish(self) -> None:
        self.set_epoch(self._sampler.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._sampler.seed, "epoch": self._sampler.epoch, "position": self._used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.seed = int(state["seed"])
        position = int(state["position"])
        if position >= self._sampler.length:
            self.set_epoch(int(state["epoch"]) + 1)
            return
        self.set_epoch(int(state["epoch"]))
        self._sampler.position = self._used = position


class _ForeignTrack:
    """Epoch of a loader whose order is the user's: their sampler's own state, if it has any, is passed through."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.epoch = 0
        self._under_way = False

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._under_way = False
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)

    def begin(self) -> None:
        if self._under_way:
            self.set_epoch(self.epoch + 1)
        self._under_way = True

    def advance(self) -> None:
        """The position is the sampler's business."""

    def finish(self) -> None:
        self.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch": self.epoch}
        if hasattr(self._sampler, "state_dict"):
            state["sampler"] = self._sampler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.set_epoch(int(state.get("epoch", 0)))
        if "sampler" in state and hasattr(self._sampler, "load_state_dict"):
            self._sampler.load_state_dict(state["sampler"])
