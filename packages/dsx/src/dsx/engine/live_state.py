"""The objects of an engine whose state a checkpoint saves beside the tensors: taking that state, and restoring it.

`TrainingState` is the state as plain values; this part knows the objects that have it. State of one rank alone (random
states, the position of a loader that counts samples per rank, objects registered with `per_rank=True`) is restored
apart, because it is there only if as many ranks load as have saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsx_core import with_code

from ..data import RepeatingLoader, TrainingLoader
from ..loss_scaler import LossScale
from ..utils.logging import logger
from .hyperparameters import numbers_of, restore_numbers
from .randomness import RandomStates
from .registered import Registered, has_state
from .report import Counters
from .stepper import ScheduleDriver
from .training_state import TrainingState, Undo

if TYPE_CHECKING:
    from dsx_zero import ZeroOptimizer

__all__ = ["LiveState", "Rest", "Wanted"]


@dataclass(frozen=True)
class Wanted:
    """The parts that a load restores in addition to the weights."""

    strict: bool = True
    optimizer: bool = True
    lr_scheduler: bool = True
    module_only: bool = False
    random_states: bool = True
    only: Sequence[str] | None = None
    key_mapping: Mapping[str, str] = field(default_factory=dict)
    padded_vocabulary: Sequence[str] = ()
    custom: Callable[..., Any] | None = None

    @property
    def optimizer_states(self) -> bool:
        """Whether the states of the optimizer are read."""
        return self.optimizer and not self.module_only


def counts_globally(loader: Any) -> bool:
    """Whether a loader's state says how many samples all ranks together have used, so that any number of ranks can
    continue there. The states of other loaders are valid for their rank only.
    """
    inner = loader.loader if isinstance(loader, RepeatingLoader) else loader
    return isinstance(inner, TrainingLoader)


def _has_position(loader: Any) -> bool:
    return has_state(loader.loader if isinstance(loader, RepeatingLoader) else loader)


@dataclass(frozen=True)
class Rest:
    """Data position and random states between two updates.

    Attributes:
        data: the loader's state if it is valid for all ranks; otherwise empty.
        rank_data: the loader's state if it is valid for this rank only; otherwise None.
        random: see `randomness.py`.
    """

    data: dict[str, Any]
    rank_data: Any
    random: dict[str, Any]

    @staticmethod
    def take(loader: Any) -> Rest:
        """The present position and random states."""
        known = counts_globally(loader)
        return Rest(
            data=loader.state_dict() if known else {},
            rank_data=loader.state_dict() if not known and _has_position(loader) else None,
            random=RandomStates().state_dict(),
        )


@dataclass(frozen=True)
class LiveState:
    """The objects of one engine that have training state.

    Attributes:
        optimizer: the optimizer; the numbers in its parameter groups are saved. None without one.
        counters, schedule, scaler: parts of the engine; their states are saved.
        precision: the precision record as plain values.
        rank: rank of this process in the job.
        facts: `config`, `versions` and `layout` of the training state; for people and tools.
        registered: the objects that the caller registered.
        parts: other objects with `state_dict` and `load_state_dict`, by name. Rank 0's state is saved. An object whose
            state is spread over the ranks gathers it in a method `whole_state`.
    """

    optimizer: ZeroOptimizer | None
    counters: Counters
    schedule: ScheduleDriver
    scaler: LossScale
    precision: dict[str, Any]
    rank: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    registered: Registered = field(default_factory=Registered)
    parts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def _scheduled(self) -> bool:
        """Whether a schedule sets the learning rates."""
        return self.schedule.scheduler is not None

    def take(self, rest: Rest) -> TrainingState:
        """The training state of now, with the data position of `rest`."""
        return TrainingState(
            counters=dataclasses.asdict(self.counters),
            param_groups=[] if self.optimizer is None else numbers_of(self.optimizer.param_groups),
            precision=self.precision,
            lr_scheduler=self.schedule.state_dict(),
            loss_scaler=self.scaler.state_dict(),
            data=rest.data,
            parts={name: getattr(part, "whole_state", part.state_dict)() for name, part in self.parts.items()},
            objects=self.registered.states(per_rank=False),
            **self.facts,
        )

    def restore(self, saved: Any, rank_state: Any, wanted: Wanted, loader: Any, undo: Undo) -> None:
        """Restore what `take` has given, as far as it is wanted, and the state of this rank alone.

        Args:
            saved: the state as plain values; None if the checkpoint has none.
            rank_state: the state of this rank alone; None: that stays as it is.
            loader: the training loader; None without one.
            undo: is told how to undo each change.

        Raises:
            CheckpointError: the checkpoint has no training state.
            CheckpointCorruptError: the state is damaged, or of another engine.
        """
        from dsx_checkpoint import CheckpointCorruptError, CheckpointError

        if saved is None:
            raise CheckpointError(
                "the checkpoint has no training state, because no engine wrote it; pass load_module_only=True"
            )
        try:
            state = TrainingState.from_dict(saved)
            self._apply(state, wanted, loader, undo)
            if rank_state is not None:
                self._apply_rank_state(rank_state, wanted, loader, undo)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointCorruptError(f"the training state is damaged, or not this engine's: {error!r}") from error

    def _apply(self, state: TrainingState, wanted: Wanted, loader: Any, undo: Undo) -> None:
        before = dataclasses.asdict(self.counters)
        undo.add(lambda: vars(self.counters).update(before))
        vars(self.counters).update(dataclasses.asdict(Counters(**state.counters)))
        if wanted.optimizer:
            undo.restore_state_of(self.scaler)
            self.scaler.load_state_dict(state.loss_scaler)
        self._restore_groups(state, wanted, undo)  # before the schedule, which may change the groups again
        if wanted.lr_scheduler and state.lr_scheduler:
            undo.restore_state_of(self.schedule)
            self.schedule.load_state_dict(state.lr_scheduler)
        for name, part in self.parts.items():
            if name in state.parts:
                undo.restore_state_of(part)
                part.load_state_dict(state.parts[name])
            elif self.rank == 0:
                logger.warning("load_checkpoint: it has no state of %s, which is not changed", name)
        others = sorted(set(state.parts) - set(self.parts))
        if others and self.rank == 0:
            text = (
                "load_checkpoint: it has states of %s, which this engine has no part for: they are not used; configure"
                " the same sections, and give initialize the same extensions"
            )
            logger.warning(with_code(text, "DSX554"), ", ".join(others))
        self._restore_objects(state.objects, undo, per_rank=False)
        self._compare_precision(state.precision)
        if state.data and counts_globally(loader):
            undo.restore_state_of(loader)
            loader.load_state_dict(state.data)

    def _apply_rank_state(self, saved: Any, wanted: Wanted, loader: Any, undo: Undo) -> None:
        """Restore the state that belongs to this rank alone."""
        self._restore_objects(saved["objects"], undo, per_rank=True)
        if saved["data"] is not None and _has_position(loader) and not counts_globally(loader):
            undo.restore_state_of(loader)
            loader.load_state_dict(saved["data"])
        if wanted.random_states:
            random = RandomStates()
            undo.restore_state_of(random)
            random.load_state_dict(saved["random"])

    def _restore_objects(self, saved: Mapping[str, Any], undo: Undo, *, per_rank: bool) -> None:
        named = dict(self.registered.named(per_rank=per_rank))
        for name, thing in named.items():
            if name in saved:
                undo.restore_state_of(thing)
                thing.load_state_dict(saved[name])
            elif self.rank == 0:
                logger.warning("load_checkpoint: it has no state of the registered %s, which is not changed", name)
        others = [name for name in saved if name not in named]
        if others and self.rank == 0:
            text = (
                "load_checkpoint: it has states of %s, which nobody has registered here: they are not used; call"
                " register_for_checkpointing before load_checkpoint"
            )
            logger.warning(with_code(text, "DSX554"), ", ".join(others))

    def _restore_groups(self, state: TrainingState, wanted: Wanted, undo: Undo) -> None:
        """Restore learning rates and other numbers of the groups.

        If a schedule starts new, the numbers that it set are kept.
        """
        saved = state.param_groups
        if self.optimizer is None or not saved:
            return
        groups = self.optimizer.param_groups
        if len(saved) != len(groups):
            text = "load_checkpoint: saved with %d parameter groups, there are %d: their rates stay as configured"
            logger.warning(with_code(text, "DSX555"), len(saved), len(groups))
            return
        before = numbers_of(groups)
        undo.add(lambda: restore_numbers(groups, before, scheduled=True, others=True))
        goes_on = wanted.lr_scheduler and bool(state.lr_scheduler)
        changes = restore_numbers(
            groups, saved, scheduled=goes_on if self._scheduled else wanted.optimizer, others=wanted.optimizer
        )
        if changes and not self._scheduled and self.rank == 0:
            logger.info("load_checkpoint: as saved, not as configured: %s", "; ".join(changes))

    def _compare_precision(self, saved: dict[str, Any]) -> None:
        """Log which numbers were saved in another precision; loading converts them."""
        if not saved or self.rank != 0:
            return
        now = self.precision
        other = [f"{role} {saved.get(role)} (now {value})" for role, value in now.items() if saved.get(role) != value]
        if other:
            logger.info("load_checkpoint: saved in another precision: %s", ", ".join(other))
