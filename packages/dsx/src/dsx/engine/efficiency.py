"""The parts of an engine for the configuration's sections on data efficiency.

Each part is a transform of the batch, an observer of the step, or both, and has a state for the checkpoint.
`SeqlenCurriculum` cuts sequences. `LayerDropping` and `TokenDropping` drive layers that skip work. `TokenBatches`
weights the losses of micro-batches of unequal size and scales the learning rate. dsx_data has the arithmetic.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from .errors import EngineArgumentError, EngineError
from .inputs import Arguments
from .report import Counters, StepReport

_FROM_THE_LOADER = (
    "this update used no batch of the engine's loader; pass training_data to dsx.initialize, or make the loader with"
    " engine.deepspeed_io, and compute the loss with engine(batch), not with engine.module(batch)"
)


class TokenBatches:
    """Updates whose micro-batches differ in size: weights their losses, counts samples, scales the learning rates.

    Let n be the tokens (or samples) of a micro-batch, and N their sum over all micro-batches and ranks of the update.
    The gradient of the update is the sum of n / N times the gradients of the micro-batches. This is the gradient of one
    batch of all of them, if a loss is a mean over tokens (samples). N is known only at the end. So each loss gets the
    weight n / unit, and the mean of the gradients is divided by N / (unit x micro-batches x ranks).

    A batch that the loader has returned waits until a loss is made of it. A loss is made of the batch that waited when
    the forward began. A loop may therefore take the next batch whenever it likes: between forward, backward and step.

    Args:
        base: samples of the update for which the learning rate was chosen.
        factor: (samples, base) -> the factor on the learning rate.
        groups: the optimizer's parameter groups.
        by: "tokens", "samples", or "none" (all losses have the same weight).
        unit: any positive number; with the usual size of a micro-batch, weights are near 1.
        parts: micro-batches of an update over all ranks.
    """

    known_before = False

    def __init__(
        self, base: int, factor: Callable[[int, int], float], groups: Callable[[], list[dict[str, Any]]], *,
        by: str, unit: int, parts: Callable[[], int],
    ) -> None:  # fmt: skip
        self._base, self._factor, self._groups = base, factor, groups
        self._by, self._unit, self._parts = by, unit, parts
        # A backward that does not go through the engine would add gradients without their weight.
        self.needs_engine_backward = by != "none"
        self._waiting: list[Any] = []
        """Sizes of the batches that no loss has used yet."""
        self._at_forward = 0
        """The number of them that waited when the last forward began."""
        self._clear()

    def _clear(self) -> None:
        self._samples = self._sum = 0
        self._weight = 1.0

    def note(self, size: Any) -> None:
        """The loader is about to return a micro-batch of this size (`dsx_data.loader.BatchSize`)."""
        self._waiting.append(size)

    def before_forward(self) -> None:
        """A forward is about to run on the batch that was taken last."""
        self._at_forward = len(self._waiting)

    def weight(self) -> float:
        """The weight of the loss whose backward comes next. A second loss of the same batch gets the same weight.

        Raises:
            EngineError: the batch of this loss is not known: several were taken between the last backward and the
                forward, or the update has had no forward on a batch of the loader.
        """
        if self._by != "none":
            if self._at_forward > 1:
                raise EngineError(
                    f"dynamic_batching: {self._at_forward} batches were taken from the loader since the last backward"
                    " and before this forward, so the weight of this loss is not known; call the engine with a batch"
                    " before you take the next one, or set"
                    ' data_efficiency.data_sampling.dynamic_batching.loss_weighting to "none"'
                )
            if not self._at_forward and not self._sum:
                raise EngineError(f"dynamic_batching: the batch of this loss is not known; {_FROM_THE_LOADER}")
        self._use_batches()
        return self._weight

    def _use_batches(self) -> None:
        """Add the batches of the last forward to the update."""
        for size in self._waiting[: self._at_forward]:
            self._samples += size.samples
            if self._by != "none":
                own, both = (getattr(size, f"{whose}_{self._by}") for whose in ("own", "sum"))
                self._sum += both
                self._weight = own / self._unit
        del self._waiting[: self._at_forward]
        self._at_forward = 0

    def gradient_scale(self) -> float:
        """The factor by which the mean of the weighted gradients is too large."""
        return self._sum / (self._unit * self._parts()) if self._sum else 1.0

    def samples(self, configured: int) -> int:
        """The samples of the update that has just ended; counting starts again."""
        samples = self._samples
        self._clear()
        return samples

    def forget(self) -> None:
        """Forget the running update, and the batches that were taken for it."""
        self._clear()
        self._waiting.clear()
        self._at_forward = 0

    @contextmanager
    def rates(self) -> Iterator[None]:
        """Inside the context the learning rates are those for an update of this size; afterwards the scheduler's."""
        if self._by == "none":  # a direct `loss.backward()` is allowed, and does not come to `weight`
            self._use_batches()
        if not self._samples:
            raise EngineError(f"dynamic_batching: the size of this update is not known; {_FROM_THE_LOADER}")
        factor = self._factor(self._samples, self._base)
        groups = [group for group in self._groups() if group.get("lr") is not None]
        before = [group["lr"] for group in groups]
        for group, rate in zip(groups, before):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(groups, before):
                group["lr"] = rate


class SeqlenCurriculum:
    """Cuts sequences to the length for the coming step.

    A model whose forward has an argument `curriculum_seqlen` gets the length and cuts the sequences itself; for other
    models the batch is cut.

    Args:
        scheduler: a `dsx_data.CurriculumScheduler`.
        truncate: cuts the arguments of a batch to a length.
    """

    def __init__(
        self, scheduler: Any, truncate: Callable[[tuple[Any, ...], dict[str, Any], int], Arguments],
        module: nn.Module, counters: Counters,
    ) -> None:  # fmt: skip
        self.scheduler, self._truncate, self._module, self._counters = scheduler, truncate, module, counters
        self._passes = "curriculum_seqlen" in _named_arguments(module)
        self._length = 0

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Cut a training batch; evaluations get uncut sequences."""
        if not self._module.training:
            return args, kwargs
        length = self.scheduler.update_difficulty(self._counters.global_steps + 1)
        if self._passes:
            return args, {**kwargs, "curriculum_seqlen": length}
        return self._truncate(args, kwargs, length)

    def changed(self) -> bool:
        """Set the length for the coming step; returns whether it differs from the step before."""
        before, self._length = self._length, self.scheduler.update_difficulty(self._counters.global_steps + 1)
        return before != self._length

    def cut(self, item: Any) -> Any:
        """An item of a loader (inputs and labels), cut to the coming step's length."""
        (found,), _ = self._truncate((item,), {}, self.scheduler.update_difficulty(self._counters.global_steps + 1))
        return found

    def state_dict(self) -> dict[str, Any]:
        """The state of the schedule."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the schedule."""
        self.scheduler.load_state_dict(state)


class LayerDropping:
    """Drives progressive layer dropping, in converted layers or through the model's own arguments.

    Args:
        schedule: theta(t), a `dsx_data.ProgressiveLayerDrop`.
        layers: the object that converted layers share, a `dsx_data.routing.LayerDrop`; None: the model takes arguments,
            which it names or takes as `**kwargs`.
    """

    def __init__(self, schedule: Any, layers: Any, module: nn.Module) -> None:
        self._schedule, self._layers, self._module = schedule, layers, module
        self._step = 0
        wanted = set(schedule.get_state())
        self._named = wanted & _named_arguments(module) if layers is None else set()
        if layers is None and not self._named and takes_any_keyword(module):
            self._named = wanted

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Add the arguments that a model with its own layer dropping names."""
        if not self._named or not self._module.training:
            return args, kwargs
        state = self._schedule.get_state()
        return args, {**kwargs, **{name: value for name, value in state.items() if name in self._named}}

    def after_step(self, report: StepReport) -> None:
        """Go to the next step."""
        self._go_to(report.global_step)

    def _go_to(self, step: int) -> None:
        self._step = step
        self._schedule.update_state(step)
        if self._layers is not None:
            self._layers.update_state(step)

    def state_dict(self) -> dict[str, Any]:
        """The step, and the seed of converted layers."""
        return {"step": self._step, "seed": None if self._layers is None else self._layers.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the saved step."""
        if self._layers is not None and state["seed"] is not None:
            self._layers.seed = int(state["seed"])
        self._go_to(int(state["step"]))


class TokenDropping:
    """Drives random-LTD: gives converted layers their schedule, and advances it.

    Args:
        drop: a `dsx_data.routing.TokenDrop`.
        bind: gives this schedule to a module's converted layers; returns their number.
    """

    def __init__(self, drop: Any, bind: Callable[[nn.Module, Any], int], module: nn.Module) -> None:
        self.drop, self._bind, self._module = drop, bind, module
        self._bound = False

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Find the converted layers before the first batch in training mode."""
        if not self._bound and self._module.training:
            if not self._bind(self._module, self.drop):
                raise EngineError(
                    "random_ltd is enabled and no layer of the model can drop tokens; call"
                    " dsx.data.convert_to_random_ltd(engine, LayerClass) before training"
                )
            self._bound = True
        return args, kwargs

    def after_step(self, report: StepReport) -> None:
        """Count the step's layer tokens, and set the number of kept tokens for the next step."""
        self.drop.schedule.update_seq(report.global_step)

    def state_dict(self) -> dict[str, Any]:
        """The state of the schedule."""
        return self.drop.schedule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the schedule."""
        self.drop.schedule.load_state_dict(state)


class EngineData:
    """The part of `Engine` for data: the caller's functions for curricula and batches."""

    _parts: Any
    training_dataloader: Any

    @property
    def random_ltd(self) -> Any:
        """The object that token-dropping layers share, a `dsx_data.routing.TokenDrop`; None if random-LTD is off."""
        part = self._parts.checkpointer.live.parts.get("random_ltd")
        return None if part is None else part.drop

    @property
    def random_ltd_scheduler(self) -> Any:
        """The schedule of kept tokens; None if random-LTD is off."""
        return None if self.random_ltd is None else self.random_ltd.schedule

    @property
    def curriculum_scheduler_legacy(self) -> Any:
        """The schedule of `curriculum_learning`; None if that section is off."""
        part = self._parts.checkpointer.live.parts.get("curriculum_learning")
        return None if part is None else part.scheduler

    def set_custom_curriculum_learning_schedule(self, schedule: Any) -> None:
        """Set the functions of "custom" schedules: from the step (1 is the first) to the difficulty.

        Args:
            schedule: a dictionary from metric to function; for the section `curriculum_learning` also one function.

        Raises:
            EngineArgumentError: no curriculum with a custom schedule is configured.
        """
        legacy = self.curriculum_scheduler_legacy
        sampler: Any = getattr(self.training_dataloader, "sampler", None)
        if hasattr(sampler, "set_custom_curriculum_learning_schedule") and isinstance(schedule, Mapping):
            sampler.set_custom_curriculum_learning_schedule(schedule)
            return
        function = schedule.get("seqlen") if isinstance(schedule, Mapping) else schedule
        if legacy is None or function is None:
            raise EngineArgumentError(
                "set_custom_curriculum_learning_schedule: got a schedule, but this engine has no curriculum for it;"
                " switch on data_efficiency.data_sampling.curriculum_learning and pass training_data to dsx.initialize"
                " (then the argument is a dictionary by metric), or switch on curriculum_learning"
            )
        legacy.set_custom_get_difficulty(function)

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """Let `post_process_func(batch, state)` change every batch of the engine's loader; see
        `dsx_data.TrainingLoader.set_post_process`.

        Raises:
            EngineArgumentError: there is no loader.
        """
        if self.training_dataloader is None:
            raise EngineArgumentError(
                "set_data_post_process_func: this engine has no loader; pass training_data to dsx.initialize"
            )
        self.training_dataloader.set_post_process(post_process_func)


def takes_any_keyword(module: nn.Module) -> bool:
    """Whether the forward takes `**kwargs`."""
    return any(item.kind is item.VAR_KEYWORD for item in inspect.signature(module.forward).parameters.values())


def _named_arguments(module: nn.Module) -> set[str]:
    """The arguments that the forward names. Arguments that it takes as `**kwargs` it may ignore."""
    about = inspect.signature(module.forward).parameters
    return {name for name, item in about.items() if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)}
