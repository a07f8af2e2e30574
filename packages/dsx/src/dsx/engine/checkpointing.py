"""The engine's checkpointer: the sharded tensors, and the training state beside them, to a folder and back.

The tensors and the files are the business of `dsx.checkpoint`. This part adds the training state (`training_state.py`),
agrees with the other ranks on folder and tag, and decides what of a checkpoint is taken.

A load changes nothing until every rank has read and verified everything it needs. Then the small parts are restored,
which can be taken back, and last the tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..data import RepeatingLoader, TrainingLoader
from ..utils.logging import logger
from .errors import EngineArgumentError
from .hyperparameters import numbers_of, restore_numbers
from .report import Counters
from .schedule import ScheduleDriver
from .stepper import LossScaler
from .training_state import TrainingState, Undo

__all__ = ["Checkpointer", "Wanted"]


@dataclass(frozen=True)
class Wanted:
    """What a load is to restore beside the weights."""

    strict: bool = True
    optimizer: bool = True
    lr_scheduler: bool = True
    module_only: bool = False

    @property
    def optimizer_states(self) -> bool:
        """Whether the states of the optimizer are read."""
        return self.optimizer and not self.module_only


@dataclass(frozen=True)
class Checkpointer:
    """Saves and loads one engine's model, optimizer and training state.

    Attributes:
        module: the sharded model; its persistent buffers are saved.
        shards: the sharded state: parameters, masters and optimizer states.
        optimizer: whose parameter groups' numbers are saved; None without one.
        counters, schedule, scaler: the parts whose state is saved.
        scheduled: whether a schedule drives the rates.
        precision: the precision record as plain values.
        tag_validation: what happens when ranks pass different tags: "ignore", "warn" or "fail".
        rank: number of this process in the job.
        parts: further objects with `state_dict` and `load_state_dict`, by name.
        places: for tensors of which this rank holds a part (`dsx.checkpoint.Place`): model parallelism says so here.
    """

    module: Any
    shards: Any
    optimizer: Any
    counters: Counters
    schedule: ScheduleDriver
    scaler: LossScaler
    scheduled: bool
    precision: dict[str, Any]
    tag_validation: str
    rank: int
    places: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def _ranks(self) -> Any:
        # Late: training without checkpoints does not need the format.
        from ..checkpoint.ranks import default_ranks

        return default_ranks()

    # - Saving

    def save(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None,
        client_state: dict[str, Any],
        *,
        loader: Any,
        latest: bool,
        exclude_frozen: bool,
    ) -> str:
        """Save collectively; the folder written. `loader`: the training loader, None without one."""
        from ..checkpoint import save

        wanted = f"global_step{self.counters.global_steps}" if tag is None else str(tag)
        tag = self._agreed_tag(save_dir, wanted, client_state)
        self.shards.synchronize()  # where ranks' parameters differ between two steps
        folder = save(
            save_dir,
            tag,
            module=self.module,
            slices=self.shards.slices(),
            state={"engine": self._state(loader).to_dict(), "client": client_state},
            ranks=self._ranks,
            places=self.places,
            exclude_frozen=exclude_frozen,
            save_latest=latest,
        )
        return str(folder)

    def _state(self, loader: Any) -> TrainingState:
        return TrainingState(
            counters=dataclasses.asdict(self.counters),
            param_groups=[] if self.optimizer is None else numbers_of(self.optimizer.param_groups),
            precision=self.precision,
            lr_scheduler=self.schedule.state_dict(),
            loss_scaler=self.scaler.state_dict(),
            data=loader.state_dict() if isinstance(loader, (TrainingLoader, RepeatingLoader)) else {},
            parts={name: part.state_dict() for name, part in self.parts.items()},
        )

    def _agreed_tag(self, save_dir: Any, tag: str, client_state: Any) -> str:
        """Rank 0's tag; that others have another one is ignored, warned about or refused, as the config says."""
        from ..checkpoint import CheckpointArgumentError
        from ..checkpoint.folder import check_folder, check_tag

        def checked() -> str:
            check_folder(save_dir, "save_dir")
            if not isinstance(client_state, dict):
                raise CheckpointArgumentError(f"client_state: got {type(client_state).__name__}, expected a dictionary")
            return check_tag(tag)

        tags = self._ranks.together("save_checkpoint", checked)
        if len(set(tags)) == 1:
            return tag
        message = f"save_checkpoint: ranks save under different tags: {dict(enumerate(tags[:10]))}"
        policy = self.tag_validation.lower()
        if policy == "fail":
            raise EngineArgumentError(f"{message}; pass the same tag on every rank")
        if policy == "warn":
            logger.warning("%s; using rank 0's, %r", message, tags[0])
        return tags[0]

    # - Loading

    def load(
        self, load_dir: str | os.PathLike[str], tag: str | None, wanted: Wanted, *, loader: Any
    ) -> tuple[str | None, dict[str, Any]]:
        """Load collectively; folder and client state, or (None, {}) where there is no checkpoint."""
        from ..checkpoint import prepare_load

        prepared = prepare_load(
            load_dir,
            None if tag is None else str(tag),
            module=self.module,
            optimizer=self.shards,
            ranks=self._ranks,
            places=self.places,
            strict=wanted.strict,
            optimizer_states=wanted.optimizer_states,
        )
        if prepared is None:
            logger.warning("load_checkpoint: %s has no checkpoint", load_dir)
            return None, {}
        state = prepared.loaded.state
        with Undo() as undo:
            if not wanted.module_only:
                restore = functools.partial(self._restore, state.get("engine"), wanted, loader, undo)
                self._ranks.all_or_none(f"restoring the training state of {prepared.loaded.path}", restore)
        prepared.install()
        return str(prepared.loaded.path), state.get("client", {})

    def _restore(self, saved: Any, wanted: Wanted, loader: Any, undo: Undo) -> None:
        from ..checkpoint import CheckpointCorruptError, CheckpointError

        if saved is None:
            raise CheckpointError(
                "the checkpoint has no training state, because no engine wrote it; pass load_module_only=True"
            )
        try:
            state = TrainingState.from_dict(saved)
            self._apply(state, wanted, loader, undo)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointCorruptError(f"the training state is damaged, or not this engine's: {error!r}") from error

    def _apply(self, state: TrainingState, wanted: Wanted, loader: Any, undo: Undo) -> None:
        before = dataclasses.asdict(self.counters)
        undo.add(lambda: vars(self.counters).update(before))
        vars(self.counters).update(dataclasses.asdict(Counters(**state.counters)))
        if wanted.optimizer:
            undo.restore_state_of(self.scaler)
            self.scaler.load_state_dict(state.loss_scaler)
        self._restore_groups(state, wanted, undo)  # before the schedule, which may have more to say
        if wanted.lr_scheduler and state.lr_scheduler:
            undo.restore_state_of(self.schedule)
            self.schedule.load_state_dict(state.lr_scheduler)
        for name, part in self.parts.items():
            if name in state.parts:
                undo.restore_state_of(part)
                part.load_state_dict(state.parts[name])
            elif self.rank == 0:
                logger.warning("load_checkpoint: it has no state of %s, which begins anew", name)
        self._compare_precision(state.precision)
        if state.data and isinstance(loader, (TrainingLoader, RepeatingLoader)):
            undo.restore_state_of(loader)
            loader.load_state_dict(state.data)

    def _restore_groups(self, state: TrainingState, wanted: Wanted, undo: Undo) -> None:
        """Rates and other numbers of the groups. Where a schedule begins anew, what it sets stays as it has set it."""
        saved = state.param_groups
        if self.optimizer is None or not saved:
            return
        groups = self.optimizer.param_groups
        if len(saved) != len(groups):
            logger.warning(
                "load_checkpoint: saved with %d parameter groups, there are %d: their rates stay as configured",
                len(saved), len(groups),
            )  # fmt: skip
            return
        before = numbers_of(groups)
        undo.add(lambda: restore_numbers(groups, before, scheduled=True, others=True))
        goes_on = wanted.lr_scheduler and bool(state.lr_scheduler)
        changes = restore_numbers(
            groups, saved, scheduled=goes_on if self.scheduled else wanted.optimizer, others=wanted.optimizer
        )
        if changes and not self.scheduled and self.rank == 0:
            logger.info("load_checkpoint: as saved, not as configured: %s", "; ".join(changes))

    def _compare_precision(self, saved: dict[str, Any]) -> None:
        """Say where the numbers come from another precision; loading converts them."""
        if not saved or self.rank != 0:
            return
        now = self.precision
        other = [f"{role} {saved.get(role)} (now {value})" for role, value in now.items() if saved.get(role) != value]
        if other:
            logger.info("load_checkpoint: saved in another precision: %s", ", ".join(other))
