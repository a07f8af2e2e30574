"""Additions to an engine: clock, hooks, observers, writers of events, the size of updates, and so on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..data import LoaderOptions
from .hooks import Batches, Clock, FixedBatches, NoClock, StepHook
from .inputs import BatchTransform
from .observers import Event, StepObserver, StepTimes
from .report import StepReport

if TYPE_CHECKING:
    from dsx_activations import SequenceParallel

__all__ = ["Monitor", "Watch"]


class Monitor(Protocol):
    """The writers of events (`dsx_monitor.MonitorMaster`)."""

    @property
    def enabled(self) -> bool: ...

    def write_events(self, events: list[Event]) -> None: ...

    def close(self) -> None: ...


class NoMonitor:
    """Writes nothing."""

    enabled = False

    def write_events(self, events: list[Event]) -> None:
        """Drops the events."""

    def close(self) -> None:
        """Does nothing."""


@dataclass
class Watch:
    """The additions of extensions to an engine.

    Attributes:
        clock, times: measure the parts of a step, and keep the figures of the latest.
        monitor: the writers of events, also for the caller.
        hooks: are called while a step runs.
        observers: are called after each step.
        sources: return events of a step for the writers.
        transforms: change a batch before the model.
        closing: is closed with the engine, the last entry first.
        batches: the size of an update, and its learning rates.
        loader_rule: from dataset and options to the options of the training loader.
        places: the place (`dsx.checkpoint.Place`) of tensors of which this rank holds a part, by parameter name.
        forward: a further context of the forward pass.
        eigenvalues: returns the latest relative eigenvalue of each block by module name.
        sequence_parallel: cuts tensors over the ranks of a sequence (`dsx_activations.SequenceParallel`).
    """

    clock: Clock = field(default_factory=NoClock)
    times: StepTimes = field(default_factory=lambda: StepTimes(NoClock(), list))
    monitor: Monitor = field(default_factory=NoMonitor)
    hooks: list[StepHook] = field(default_factory=list)
    observers: list[StepObserver] = field(default_factory=list)
    sources: list[Callable[[StepReport], list[Event]]] = field(default_factory=list)
    transforms: list[BatchTransform] = field(default_factory=list)
    closing: ExitStack = field(default_factory=ExitStack)
    batches: Batches = field(default_factory=FixedBatches)
    loader_rule: Callable[[Any, LoaderOptions], LoaderOptions] = lambda dataset, options: options
    places: Mapping[str, Any] = field(default_factory=dict)
    forward: Callable[[], AbstractContextManager[Any]] | None = None
    eigenvalues: Callable[[], dict[str, float]] = dict
    sequence_parallel: SequenceParallel | None = None

    def add(self, thing: Any) -> Any:
        """Add an object to the hooks, observers, transforms or sources of events, by its methods."""
        for method, group in (
            ("before_forward", self.hooks), ("after_step", self.observers), ("__call__", self.transforms),
        ):  # fmt: skip
            if hasattr(thing, method):
                group.append(thing)
        if hasattr(thing, "events"):
            self.sources.append(thing.events)
        if hasattr(thing, "close"):
            self.closing.callback(thing.close)
        return thing

    def close(self) -> None:
        """End every measurement, write remaining results and close the writers."""
        self.closing.close()
