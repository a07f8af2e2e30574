"""The parts of an engine. `wiring.py` chooses each part once, from the configuration; the engine only uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from dsx_comm import RankSets
from torch import nn

from ..data import LoaderOptions
from .accumulation import Accumulation, SyncWindow
from .backwards import Backwards
from .checkpointing import Checkpointer
from .clock import Clock
from .efficiency import Batches, FixedBatches
from .gate import StepGate
from .hooks import StepHook
from .inputs import InputChain
from .observers import StepObserver
from .report import Counters
from .schedule import ScheduleDriver
from .stepper import LossScaler, Stepper
from .weights import Gather


@dataclass(frozen=True)
class EngineParts:
    """The composed objects of one engine.

    Attributes:
        module: the sharded model.
        optimizer: the optimizer that `initialize` returns; None without one.
        shards: the sharded state that checkpoints read and write.
        checkpointer: saves and loads the whole engine.
        gate: stops all ranks together between two updates.
        stepper: does one update.
        scaler: the loss scale.
        schedule: drives `lr_scheduler`.
        accumulation, window: say which micro-batch is at the boundary, and when gradients are reduced.
        backwards: judges backwards of losses that the engine did not scale.
        inputs: transforms a batch before the model.
        autocast: makes the context of the forward pass.
        clock: times the parts of a step.
        gather: gathers some parameters for the duration of a context.
        topology: the rank of this process, and the groups of ranks.
        config: the resolved configuration, for saving and for the accessors.
        loader: builds the loaders of `deepspeed_io`.
        release: undoes the changes that sharding made to the model (hooks).
        hooks: are called while a step runs.
        observers: are called after each step.
        batches: the size of an update, and its learning rates.
        efficiency: parts for data efficiency, by the name of their section.
        loader_rule: from dataset and options to the options of the training loader.
        monitor: the writers of events, also for the caller; writes nothing if no writer is switched on.
    """

    module: nn.Module
    optimizer: Any
    shards: Any
    checkpointer: Checkpointer
    gate: StepGate
    stepper: Stepper
    scaler: LossScaler
    schedule: ScheduleDriver
    lr_scheduler: Any
    accumulation: Accumulation
    window: SyncWindow
    backwards: Backwards
    inputs: InputChain
    autocast: Callable[[], AbstractContextManager[object]]
    clock: Clock
    gather: Gather
    topology: RankSets
    settings: EngineSettings
    config: Any
    loader: LoaderOptions
    release: Callable[[], None]
    counters: Counters = field(default_factory=Counters)
    hooks: tuple[StepHook, ...] = ()
    observers: tuple[StepObserver, ...] = ()
    monitor: Any = None
    batches: Batches = field(default_factory=FixedBatches)
    efficiency: Mapping[str, Any] = field(default_factory=dict)
    loader_rule: Callable[[Any, LoaderOptions], LoaderOptions] = lambda dataset, options: options


@dataclass(frozen=True)
class EngineSettings:
    """Plain values that accessors report and saving uses."""

    micro_batch_size: int
    zero_stage: int
    gradient_clipping: float
    optimizer_name: str
    gather_weights_on_save: bool
