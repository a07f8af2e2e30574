"""The view of an engine for `dsx_verify.audit`: whole fp32 master weights and gradients, on every rank."""

from __future__ import annotations

from typing import Any

import torch
from dsx_verify import EngineSystem
from dsx_verify.system import plain_name, whole

__all__ = ["AuditedEngine"]


class AuditedEngine(EngineSystem):
    """An engine under audit; a parameter that is not trained is gathered as the module has it."""

    def __init__(self, engine: Any) -> None:
        import dsx_zero

        super().__init__(engine, dsx_zero.safe_get_full_fp32_param, self._unscaled)
        self._full_gradient = dsx_zero.safe_get_full_grad

    def parameters(self) -> dict[str, torch.Tensor]:
        """See `dsx_verify.System`."""
        found = {}
        for name, parameter in self.module.named_parameters():
            value = self._parameter(parameter) if parameter.requires_grad else None
            if value is None:
                with self.engine._parts.gather([parameter]):
                    value = parameter.detach().clone()
            found[plain_name(name)] = whole(value)
        return found

    def loss_scale(self) -> float:
        """See `dsx_verify.System`."""
        return float(self.engine.loss_scale())

    def _unscaled(self, parameter: Any) -> torch.Tensor | None:
        grad = self._full_gradient(parameter)
        return None if grad is None else grad.float() / self.engine.loss_scale()

    def skipped(self) -> bool:
        """Whether the last update was left out, after an overflow."""
        last = self.engine.last_step
        return last is not None and last.skipped
