"""The parts of an engine. `wiring.py` chooses each part once, from the configuration; the engine only uses them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsx_comm import RankSets
from torch import nn

from ..data import LoaderOptions
from ..loss_scaler import LossScale
from .backwards import Accumulation, Backwards, SyncWindow
from .checkpointing import Checkpointer
from .inputs import InputChain
from .report import Counters
from .stepper import NoStepper, ScheduleDriver, StepGate, Stepper
from .watch import Watch
from .weights import Gather

if TYPE_CHECKING:
    from dsx_zero import ZeroOptimizer

    from ..config import Config

__all__ = ["EngineParts", "Update"]


@dataclass(frozen=True)
class Update:
    """The parts that change the parameters.

    Attributes:
        stepper: does one update.
        scaler: the loss scale.
        schedule: drives the learning-rate scheduler.
    """

    stepper: Stepper
    scaler: LossScale
    schedule: ScheduleDriver


@dataclass(frozen=True)
class EngineParts:
    """The composed objects of one engine.

    Attributes:
        module: the sharded model.
        shards: the sharded state of the model, which checkpoints read and write; the optimizer, if there is one.
        topology: the rank of this process, and the groups of ranks.
        config: the resolved configuration, for saving and for the accessors.
        counters: the progress of training.
        gate: stops all ranks together between two updates.
        accumulation, window: say which micro-batch is at the boundary, and when gradients are reduced.
        backwards: judges backwards of losses that the engine did not scale.
        update: changes the parameters.
        inputs: transforms a batch before the model, and makes the context of the forward pass.
        watch: what the extensions have added: clock, hooks, observers, writers, the size of updates.
        loader: builds the loaders of `deepspeed_io`.
        gather: gathers some parameters for the duration of a context.
        checkpointer: saves and loads the whole engine.
    """

    module: nn.Module
    shards: ZeroOptimizer
    topology: RankSets
    config: Config
    counters: Counters
    gate: StepGate
    accumulation: Accumulation
    window: SyncWindow
    backwards: Backwards
    update: Update
    inputs: InputChain
    watch: Watch
    loader: LoaderOptions
    gather: Gather
    checkpointer: Checkpointer

    @property
    def optimizer(self) -> ZeroOptimizer | None:
        """The optimizer that `initialize` returns; None without one."""
        return None if isinstance(self.update.stepper, NoStepper) else self.shards
