"""Questions to an engine: sizes, counters, rates, norms, ranks. Nothing here changes the engine, except
`lr_scheduler`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsx_core.modules import is_compiled

from .describe import describe
from .errors import EngineArgumentError
from .stepper import ScheduleDriver, learning_rates

if TYPE_CHECKING:
    from torch import nn

    from ..config import Config
    from .parts import EngineParts
    from .report import Counters, StepReport
    from .stepper import Scheduler
    from .watch import Monitor


@dataclass(frozen=True)
class BatchInfo:
    """The three batch sizes: per update over all ranks, per rank and forward, forwards per update."""

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int


def moments(groups: list[dict[str, Any]]) -> list[Any]:
    """Momentum of each parameter group: its `betas`, otherwise its `momentum`, otherwise 0.0."""
    return [group.get("betas", group.get("momentum", 0.0)) for group in groups]


class EngineAccessors:
    """Read-only side of `Engine`; only `lr_scheduler` can be set."""

    _parts: EngineParts
    _custom_batch: int | None
    counters: Counters
    last_step: StepReport | None
    module: nn.Module
    _applied = False

    # - Batch sizes and counters

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self._parts.accumulation.steps

    @property
    def global_steps(self) -> int:
        """Updates so far, skipped ones included."""
        return self.counters.global_steps

    @property
    def global_samples(self) -> int:
        """Samples used so far by all ranks."""
        return self.counters.global_samples

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far."""
        return self.counters.micro_steps

    @property
    def skipped_steps(self) -> int:
        """Updates skipped because a gradient was not finite."""
        return self.counters.skipped_steps

    def was_step_applied(self) -> bool:
        """Whether the latest `step()` changed the parameters: it was a boundary and was not skipped."""
        return self._applied

    @property
    def monitor(self) -> Monitor:
        """The writers of events. Use it for your own events: `engine.monitor.write_events([(label, value,
        samples)])`.
        """
        return self._parts.watch.monitor

    # - Optimizer

    @property
    def optimizer(self) -> Any:
        """The sharded optimizer (`param_groups`, `state`, `state_dict`); None without one."""
        return self._parts.optimizer

    @property
    def lr_scheduler(self) -> Scheduler | None:
        """The learning-rate scheduler, stepped by the engine; None without one."""
        return self._parts.update.schedule.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Scheduler | None) -> None:
        """Let the engine step another scheduler. None: the engine steps none, the caller may. Checkpoints save the new
        one.

        Raises:
            EngineArgumentError: it is not a scheduler.
        """
        if scheduler is not None and not callable(getattr(scheduler, "step", None)):
            raise EngineArgumentError(
                f"engine.lr_scheduler: got {type(scheduler).__name__}, expected an object with step(), or None"
            )
        driver = ScheduleDriver(scheduler)
        parts = self._parts
        live = dataclasses.replace(parts.checkpointer.live, schedule=driver)
        saved = dataclasses.replace(parts.checkpointer, live=live)
        update = dataclasses.replace(parts.update, schedule=driver)
        self._parts = dataclasses.replace(parts, update=update, checkpointer=saved)

    def loss_scale(self) -> float:
        """Factor on the loss of the next backward; 1.0 without loss scaling."""
        return self._parts.update.scaler.scale

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._parts.optimizer
        return [] if optimizer is None else optimizer.param_groups

    def audited(self) -> Any:
        """The view by which `dsx_verify.audit` reads this engine."""
        from .audited import AuditedEngine

        return AuditedEngine(self)

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group, as the next update will use it; NaN for a group without one."""
        return learning_rates(self._groups())

    def get_mom(self) -> list[Any]:
        """Momentum of each parameter group: its `betas`, otherwise its `momentum`, otherwise 0.0."""
        return moments(self._groups())

    def get_type(self) -> str:
        """Class name of the optimizer in use; empty without one."""
        optimizer = self._parts.optimizer
        return "" if optimizer is None else type(optimizer.inner).__name__

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of the latest update's unscaled gradients over all ranks, before clipping; None before the first."""
        return None if self.last_step is None else self.last_step.grad_norm

    def gradient_clipping(self) -> float:
        """Largest global gradient norm that is not clipped; 0.0: no clipping."""
        return self._parts.config.max_norm or 0.0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage: 0, 1, 2 or 3."""
        return self._parts.config.zero.stage

    # - Place

    @property
    def global_rank(self) -> int:
        """Rank of this process among all processes."""
        return self._parts.topology.rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self._parts.topology.local_rank

    @property
    def is_compiled(self) -> bool:
        """Whether a part of the module was compiled with `torch.compile`, in place (`module.compile()`) or wrapped."""
        return is_compiled(self._parts.module)

    @property
    def data_parallel_group(self) -> Any:
        """The process group over which gradients are averaged; None: all ranks."""
        return self._parts.topology.data.group

    def get_data_parallel_rank(self) -> int:
        """Rank of this process among the ranks over which gradients are averaged."""
        return self._parts.topology.batches[0]

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._parts.topology.world_size

    @property
    def dp_world_size(self) -> int:
        """Number of ranks over which gradients are averaged."""
        return self._parts.topology.batches[1]

    @property
    def mp_world_size(self) -> int:
        """Number of ranks that share one copy of the model by model parallelism."""
        return self._parts.topology.model_size

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return self._parts.config

    @property
    def precision(self) -> Any:
        """The data types of parameters, gradients and other numbers: a `dsx.precision.Precision`."""
        return self._parts.config.precision

    def describe(self) -> str:
        """The parts of the engine, as lines of text; `dump_state` logs this."""
        return describe(self._parts)

    def __repr__(self) -> str:
        topology = self._parts.topology
        return (
            f"Engine({type(self.module).__name__}, {self.get_type() or 'no optimizer'}, "
            f"zero stage {self.zero_optimization_stage()}, rank {topology.rank} of {topology.world_size}, "
            f"step {self.global_steps})"
        )
