"""DeepSpeed's questions to an engine about its configuration. Nothing here changes the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["EngineSwitches"]

if TYPE_CHECKING:
    import torch
    from dsx.engine.parts import EngineParts


class EngineSwitches:
    """Read-only answers from the resolved configuration. Each is a method of any engine of dsx."""

    _parts: EngineParts

    def fp16_enabled(self) -> bool:
        """Whether parameters or computation are fp16."""
        precision = self._parts.config.precision
        return "fp16" in (precision.params, precision.compute)

    def bfloat16_enabled(self) -> bool:
        """Whether parameters or computation are bf16."""
        precision = self._parts.config.precision
        return "bf16" in (precision.params, precision.compute)

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self._parts.update.scaler.state_dict()["kind"] == "dynamic"

    def zero_optimization(self) -> bool:
        """Whether anything is sharded over the ranks (stage 1 or above)."""
        return self._parts.config.zero.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded over the ranks (stage 2 or above)."""
        return self._parts.config.zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded over the ranks (stage 3)."""
        return self._parts.config.zero.stage >= 3

    def optimizer_name(self) -> str:
        """Class name of the optimizer in use; empty without one."""
        optimizer = self._parts.optimizer
        return "" if optimizer is None else type(optimizer.inner).__name__

    def scheduler_name(self) -> str | None:
        """Class name of the learning-rate scheduler; None without one."""
        scheduler = self._parts.update.schedule.scheduler
        return None if scheduler is None else type(scheduler).__name__

    def steps_per_print(self) -> int | None:
        """Updates between two progress lines."""
        return self._parts.config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether the parts of a step are timed."""
        return self._parts.config.wall_clock_breakdown

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Data types of the parameters and of gradient accumulation."""
        precision = self._parts.config.precision
        return precision.dtype("params"), precision.dtype("grad_accum")
