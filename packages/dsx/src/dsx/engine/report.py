"""A record of one optimizer step: `engine.last_step`.

Loss and norm stay tensors on their device until they are read, so that keeping the record needs no host
synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Counters:
    """The progress of training, which checkpoints contain. `micro_steps` counts micro-batches; see `StepReport`."""

    global_steps: int = 0
    global_samples: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0


@dataclass(frozen=True)
class StepReport:
    """One step at an accumulation boundary.

    Attributes:
        global_step: number of the step, counted from 1; skipped steps count.
        global_samples: samples used by all ranks up to and including this step.
        samples: samples of this step alone.
        applied: False if the step was skipped because a gradient was not finite.
        lr: the learning rates of this step, one per parameter group; NaN for a group that has none.
        loss_scale: the loss scale of this step's gradients (1.0 without loss scaling).
    """

    global_step: int
    global_samples: int
    samples: int
    applied: bool
    lr: tuple[float, ...]
    loss_scale: float
    outcome: Any = field(repr=False, compare=False)
    loss_tensor: torch.Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def skipped(self) -> bool:
        """The opposite of `applied`."""
        return not self.applied

    @property
    def grad_norm(self) -> float | None:
        """L2 norm of the unscaled gradients over all ranks, before clipping; waits for the device. None if it was not
        computed.
        """
        return self.outcome.grad_norm

    @property
    def loss(self) -> float | None:
        """Mean unscaled loss over this rank's micro-batches of the update; waits for the device. None without a
        loss.
        """
        return None if self.loss_tensor is None else float(self.loss_tensor)
