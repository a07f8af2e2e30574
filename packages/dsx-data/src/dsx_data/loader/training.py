"""The training loader over any dataset, and a loader that never ends.

Datasets: map-style (`__len__` and `__getitem__`), iterable, and the objects of Hugging Face `datasets`, which are
recognised by their methods. A map-style Hugging Face dataset without a format is read with format "torch": otherwise
its samples are lists of numbers, which torch's collate function transposes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from dsx_core import with_code
from dsx_core.device import accelerator_kind
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from ..batching.plan import TokenBudget
from ..curriculum import CurriculumSampler
from ..errors import DataArgumentError
from ..randomness import generator
from .continuous import ContinuousSampler, ContinuousTrack
from .given_tracks import CallerSamplerTrack, SharedStreamTrack, StreamTrack, UpdateStreamTrack
from .order import ShardedSampler
from .seeding import NumberedDraws, SeededCollate, SeededSamples
from .stream import Placed, PlacedCollate, SharedStream, StreamReader, StreamShare
from .tracks import BatchSize, CurriculumTrack, PlannedTrack, PositionTrack, Track

__all__ = ["LoaderOptions", "RepeatingLoader", "TrainingLoader"]

logger = logging.getLogger("dsx_data")


@dataclass(frozen=True)
class LoaderOptions:
    """Options of a loader.

    Attributes:
        micro_batch_size: samples per rank and batch.
        rank, world_size: this rank and the number of data-parallel ranks.
        shuffle: another random order of the samples in each epoch; else the order of the dataset.
        seed: decides the orders; it must be the same on all ranks.
        drop_last: drop the samples at the end that do not fill a batch on every rank.
        pin_memory: put batches into page-locked memory, if there is a CUDA device.
        num_workers: processes that read samples; 0: this process reads them.
        prefetch: batches that each worker reads ahead; None: torch's default, 2.
        collate_fn: makes a batch from a list of samples.
        sampler: the caller's own order, which must yield this rank's samples only, or a `CurriculumSampler`.
        budget: batches by number of tokens instead of samples; `micro_batch_size` is not used then.
        seed_samples: random augmentations are a function of the seed and the sample's position in the run, so that they
            resume exactly (see `seeding`); False: they use the random state of the process that reads.
        global_batch: samples of all ranks in one update. An epoch then ends with a complete update, and its remaining
            samples begin the next epoch (see `continuous`), so that each update has the same samples at any number of
            ranks. None: the last batches of an epoch are smaller, or dropped. It applies to map-style datasets in the
            loader's own order, and to a `SharedStream`.
    """

    micro_batch_size: int
    rank: int = 0
    world_size: int = 1
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False
    pin_memory: bool = True
    num_workers: int = 0
    prefetch: int | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    sampler: Sampler | CurriculumSampler | Iterable[int] | None = None
    budget: TokenBudget | None = None
    seed_samples: bool = True
    global_batch: int | None = None


class TrainingLoader:
    """An iterable over this rank's micro-batches that knows its epoch and position.

    Each `for` loop over it is one epoch. (With a curriculum each loop continues the draws.) `state_dict()` has the
    position of the next unused sample, independent of the number of ranks; after `load_state_dict()` the next loop
    continues there.

    Raises:
        DataArgumentError: the options do not fit each other or the dataset.
    """

    def __init__(self, dataset: Dataset | Any, options: LoaderOptions) -> None:
        _check_options(options)
        self.options = options
        self.dataset = _readable(dataset)
        self.on_batch: Callable[[BatchSize], None] | None = None
        """Called with the size of each batch before it is handed out."""
        self._post_process: Callable[[Any, dict[str, Any]], Any] | None = None
        # torch's loader draws a seed for its workers whenever a loop begins. If it drew from the global generator, a
        # resumed run would draw once more than one that never stopped (test_checkpoint_resume_exactly.py in dsx).
        self._seeds = torch.Generator()
        arguments = {"collate_fn": options.collate_fn, **self._choose_track()}
        if options.seed_samples:
            arguments.update(self._seeded(arguments))
        if isinstance(self._track, UpdateStreamTrack):
            arguments["collate_fn"] = PlacedCollate(arguments["collate_fn"] or default_collate)
        self._loader = DataLoader(
            num_workers=options.num_workers,
            prefetch_factor=options.prefetch,
            generator=self._seeds,
            # Pinned memory only speeds copies to a CUDA device; without one torch would warn and ignore it.
            pin_memory=options.pin_memory and accelerator_kind() is not None,
            **arguments,
        )

    def _choose_track(self) -> dict[str, Any]:
        """Choose the track; returns the dataset and the order, as arguments of the DataLoader."""
        options, dataset = self.options, self.dataset
        place = {"rank": options.rank, "world_size": options.world_size}
        batches = {"batch_size": options.micro_batch_size, "drop_last": options.drop_last}
        self.sampler: Any = None
        self._track: Track
        if isinstance(dataset, (SharedStream, IterableDataset)) and (options.budget or options.sampler is not None):
            raise DataArgumentError(
                "got an iterable dataset with a token budget or a sampler, which choose samples by their number;"
                " expected a dataset with __len__ and __getitem__"
            )
        if isinstance(dataset, SharedStream):
            per_update = options.global_batch
            if per_update is not None:
                _check_global_batch(per_update, options.micro_batch_size * options.world_size)
            share = StreamShare(
                **place, micro_batch_size=options.micro_batch_size, drop_last=options.drop_last, global_batch=per_update
            )
            reader = StreamReader(dataset, share, seeded=options.seed_samples)
            self._track = (SharedStreamTrack if per_update is None else UpdateStreamTrack)(reader, options.seed)
            return {"dataset": reader, **batches}
        if isinstance(dataset, IterableDataset):
            if options.world_size > 1 and options.rank == 0:
                text = (
                    "every rank reads the iterable dataset %s as it comes: unless it shares itself out among the ranks,"
                    " all %d train on the same samples; wrap it in dsx_data.SharedStream to have it shared out"
                )
                kind = type(getattr(dataset, "source", dataset)).__name__
                logger.warning(with_code(text, "DSX751"), kind, options.world_size)
            self._track = StreamTrack(dataset, options.world_size, options.num_workers)
            return {"dataset": dataset, **batches}
        if options.budget is not None:
            _check_lengths(options.budget, dataset)
            track = PlannedTrack(options.budget, **place, seed=options.seed, drop_last=options.drop_last)
        elif isinstance(options.sampler, CurriculumSampler):
            self.sampler = options.sampler
            track = CurriculumTrack(options.sampler, **place, micro_batch_size=options.micro_batch_size)
        elif options.sampler is not None:
            self.sampler = options.sampler
            caller_track = CallerSamplerTrack(options.sampler, options.micro_batch_size, **place, seed=options.seed)
            self._track = caller_track
            return {"dataset": dataset, "sampler": caller_track, **batches}
        elif options.global_batch is not None:
            _check_global_batch(options.global_batch, options.micro_batch_size * options.world_size)
            if not len(dataset):
                raise DataArgumentError("global_batch: got a dataset without samples, expected at least one")
            self.sampler = ContinuousSampler(
                len(dataset), **place, micro_batch_size=options.micro_batch_size, global_batch=options.global_batch,
                shuffle=options.shuffle, seed=options.seed,
            )  # fmt: skip
            self._track = ContinuousTrack(self.sampler)
            return {"dataset": dataset, "sampler": self.sampler, **batches}
        else:
            self.sampler = ShardedSampler(
                len(dataset), **place, shuffle=options.shuffle, seed=options.seed, drop_last=options.drop_last
            )
            self._track = PositionTrack(self.sampler, options.micro_batch_size)
            return {"dataset": dataset, "sampler": self.sampler, **batches}
        self._track = track
        return {"dataset": dataset, "batch_sampler": track}

    def _seeded(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the DataLoader that make it seed every sample and batch.

        There are none for an iterable dataset that is not a `SharedStream`.
        """
        if isinstance(arguments["dataset"], IterableDataset) and not isinstance(arguments["dataset"], StreamReader):
            return {}
        common = {"collate_fn": SeededCollate(arguments["collate_fn"])}
        if isinstance(arguments["dataset"], StreamReader):
            return common
        order = "batch_sampler" if "batch_sampler" in arguments else "sampler"
        return {
            **common,
            "dataset": SeededSamples(arguments["dataset"]),
            order: NumberedDraws(arguments[order], self._track.key, batches=order == "batch_sampler"),
        }

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

    def set_post_process(self, function: Callable[[Any, dict[str, Any]], Any] | None) -> None:
        """Let `function(batch, state)` change each batch before it is handed out.

        `state` is this loader's `state_dict()`; with a curriculum its key `current_difficulties` holds the difficulty
        of each metric at which the batch was drawn. None removes the function.

        Raises:
            DataArgumentError: `function` cannot be called.
        """
        if function is not None and not callable(function):
            raise DataArgumentError(f"set_post_process: got {function!r}, expected a function of batch and state")
        self._post_process = function

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        track = self._track
        track.begin()
        self._seeds.manual_seed(generator(self.options.seed, track.epoch, self.options.rank).initial_seed())
        handed_out = 0
        for read in self._read():
            batch = self._take_position(read)
            # Before the yield: a checkpoint written in the loop body counts this batch as used.
            track.advance()
            handed_out += 1
            if self.on_batch is not None:
                self.on_batch(track.size)
            yield batch if self._post_process is None else self._post_process(batch, self.state_dict())
        used_up = track.empty_means_next and not handed_out
        track.finish()
        if used_up:  # the state was saved in the last batch of an order whose length is not known beforehand
            yield from self

    def _read(self) -> Iterator[Any]:
        batches = iter(self._loader)
        for _ in range(self._track.to_skip):
            if next(batches, None) is None:
                return
        yield from batches

    def _take_position(self, read: Any) -> Any:
        """Return the batch, and report the position of its end to a track that needs it."""
        if not isinstance(self._track, UpdateStreamTrack):
            return read
        placed: Placed = read
        self._track.set_batch_end(placed.epoch, placed.position)
        return placed.what

    def state_dict(self) -> dict[str, Any]:
        """The seed, the epoch and the position of the next batch.

        For the loader's own orders the position is a count of global samples, which does not depend on the number of
        ranks.
        """
        return self._track.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, with this loader's own number of ranks and batch size.

        Raises:
            DataStateError: the state belongs to another kind of order, or is not valid for this number of ranks.
        """
        self._track.load_state_dict(state)


class RepeatingLoader:
    """Restarts a loader whenever it ends, so that `next()` never stops; each restart is a new epoch.

    Raises:
        DataArgumentError: the loader yields no batch. `next()` raises it.
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
            raise DataArgumentError("RepeatingLoader: got an empty loader, expected at least one batch") from None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """The state of the loader inside."""
        return self.loader.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state into the loader inside. A running loop ends, and the next batch is the one of the state."""
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]
        self._iterator = None


def _check_options(options: LoaderOptions) -> None:
    if options.micro_batch_size <= 0 and options.budget is None:
        raise DataArgumentError(
            f"micro_batch_size: got {options.micro_batch_size}, expected a positive number of samples; "
            "pass batch_size=... or set train_micro_batch_size_per_gpu in the config"
        )
    if not 0 <= options.rank < options.world_size:
        raise DataArgumentError(f"rank: got {options.rank} of {options.world_size} ranks, expected 0 or more and less")
    if options.budget is not None and options.sampler is not None:
        raise DataArgumentError("got both a token budget and a sampler, expected one of them: each decides the batches")
    if options.prefetch is not None and not options.num_workers:
        raise DataArgumentError(f"prefetch: got {options.prefetch} without workers; set num_workers to 1 or more")


def _check_global_batch(size: int, together: int) -> None:
    if size <= 0 or size % together:
        raise DataArgumentError(
            f"global_batch: got {size}, expected a multiple of {together}, which is a micro-batch of all ranks"
        )


def _readable(dataset: Any) -> Any:
    """The dataset as torch's DataLoader reads it."""
    if isinstance(dataset, (SharedStream, IterableDataset)):
        return dataset
    if hasattr(dataset, "column_names") and isinstance(dataset, dict):
        raise DataArgumentError(
            f"the dataset is a dictionary of splits ({', '.join(map(str, dataset))}); pass one of them, for example"
            f" dataset[{next(iter(dataset), 'train')!r}]"
        )
    has_length = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not has_length and hasattr(dataset, "__iter__"):
        return _Iterable(dataset)
    if not has_length:
        raise DataArgumentError(
            f"the dataset is a {type(dataset).__name__}, expected one with __len__ and __getitem__, or an iterable"
        )
    if hasattr(dataset, "with_format") and (getattr(dataset, "format", None) or {}).get("type", "") is None:
        return dataset.with_format("torch")
    return dataset


def _check_lengths(budget: TokenBudget, dataset: Any) -> None:
    if budget.size != len(dataset):
        raise DataArgumentError(
            f"token budget: got {budget.size} lengths, expected {len(dataset)}, one per sample; analyse this dataset"
            " again"
        )


class _Iterable(IterableDataset):
    """Makes torch treat any iterable as an iterable dataset."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the source, if it has `set_epoch`."""
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)
