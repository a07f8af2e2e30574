"""The interface that planner, autotuner and trials ask of an engine, and the entry points by which they find one.

This package imports no engine. Whoever calls it hands one in, or it is found through the entry points of the group
`dsx_plan.engines`: functions without arguments that return an `EngineToPlan`. dsx registers itself there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

from .errors import NoEngineError

if TYPE_CHECKING:
    import torch
    from dsx_comm import RankSets
    from dsx_zero import ZeroOptimizer
    from torch import nn

__all__ = ["ENGINES", "BuiltEngine", "EngineToPlan", "StepWatcher", "Trained", "Watchers", "engine_to_plan"]

ENGINES = "dsx_plan.engines"
"""Group of entry points: functions without arguments that return an `EngineToPlan`."""


class EngineToPlan(Protocol):
    """A kind of engine, with its configuration language."""

    config_error: type[Exception]
    """The error for a wrong configuration; `problems` has one item or more, with `path` and `message`."""

    def read(self, source: Any) -> dict[str, Any]:
        """The keys of a configuration (dictionary, path, base64 text) as they were written, in a copy."""
        ...

    def load(self, source: Any, *, world_size: int, template: bool = False) -> Any:
        """The checked configuration for so many data-parallel ranks, with every default.

        Args:
            template: values that only the script knows may be missing (`"auto"`).
        """
        ...

    def value_type(self, path: str) -> Any | None:
        """The annotation of the key at a dotted path; None where the configuration knows no such key."""
        ...

    def is_pipeline(self, model: nn.Module) -> bool:
        """Whether a model is cut into stages."""
        ...

    def build(
        self, config: Mapping[str, Any], *, model: nn.Module,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None, store: Any,
    ) -> BuiltEngine:  # fmt: skip
        """An engine around a model, which writes no file: state on disk goes to `store`. Collective."""
        ...


class BuiltEngine(Protocol):
    """An engine that was built for a plan, and the parts of it that a plan reads."""

    @property
    def engine(self) -> Any:
        """The engine: it is called, `backward`, `step` (or `train_batch`), `module`, `destroy`."""
        ...

    @property
    def shards(self) -> ZeroOptimizer:
        """The sharded state, of which a plan names every tensor."""
        ...

    @property
    def pipeline(self) -> Any:
        """The runtime of its pipeline (`dsx_pipe.Pipeline`); None without one."""
        ...

    def add_hook(self, hook: StepWatcher) -> None:
        """Call `hook` during every step from now on."""
        ...


def engine_to_plan(given: EngineToPlan | None = None) -> EngineToPlan:
    """The engine that was handed in, otherwise the installed one.

    Raises:
        NoEngineError: none is installed, or more than one.
    """
    if given is not None:
        return given
    found = list(entry_points(group=ENGINES))
    if len(found) == 1:
        return found[0].load()()
    names = ", ".join(sorted(one.name for one in found))
    raise NoEngineError(
        f"there are {len(found)} engines to plan with ({names}), expected one; hand one in (engine=...)"
        if found
        else "a plan runs the engine, and none is installed; install dsx with all its parts,"
        " or hand one in (engine=...)"
    )


# - What a trial sees of an engine


class Trained(Protocol):
    """An engine that is being built, as a trial sees it: everything is there but the first step."""

    @property
    def config(self) -> Any:
        """The checked configuration."""
        ...

    @property
    def topology(self) -> RankSets:
        """The ranks."""
        ...

    @property
    def module(self) -> nn.Module:
        """The sharded model."""
        ...

    @property
    def optimizer(self) -> ZeroOptimizer:
        """Its shards."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        ...


class Watchers(Protocol):
    """The objects that an engine calls while it trains."""

    def add(self, thing: Any) -> Any:
        """Add an object by its methods: those of `StepWatcher`, and `after_step(report)`."""
        ...


class StepWatcher:
    """Callbacks of an engine's step. Those of this class do nothing; override the ones of interest."""

    needs_engine_backward = False

    def before_batch(self) -> None:
        """A pipeline begins an update."""

    def after_batch(self) -> None:
        """A pipeline has run the forwards and backwards of an update."""

    def micro_batch_read(self, item: Any) -> None:
        """A pipeline has read a micro-batch, (inputs, labels)."""

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module will run on a micro-batch with these arguments."""

    def before_backward(self, loss: torch.Tensor, boundary: bool) -> None:
        """The backward of a loss begins; `boundary`: it is the last one of its update."""

    def before_update(self) -> None:
        """All gradients of the update have arrived."""
