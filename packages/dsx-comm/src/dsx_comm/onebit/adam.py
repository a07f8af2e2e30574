"""1-bit Adam (arXiv:2102.02888): Adam until the variance is stable, then momenta averaged in one bit over a frozen
variance.

Steps 1 .. `freeze_step` are Adam with decoupled weight decay: gradients averaged exactly, both moments move. Afterwards
v stays, every rank moves the common momentum by its own gradient, the momenta are averaged in one bit with error
feedback, and all ranks take the same step:

    m = b1 m + (1 - b1) g_local;  m = compressed mean(m) * mask;  p = p - lr (m / (sqrt(v) + eps) + weight_decay p)

Left out: clipping (an engine clips before the step; see `rules.clipping_note`), ZeRO stages (a rank needs whole
momenta).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .arithmetic import Hyper, batches, directions, move_first, move_second
from .base import CompressedOptimizer
from .checks import Compression, check_freezing
from .schedule import EVERY_STEP_ALIKE, StepKind, VarianceWindow


@dataclass
class FreezeClock:
    """Steps done, and how many of them moved the variance."""

    step: int = 0
    variance_steps: int = 0


class FreezingOptimizer(CompressedOptimizer):
    """An optimizer whose variance is frozen after `freeze_step` steps, the last `variance_window` of which weigh alike
    in it.
    """

    clock_type = FreezeClock

    def __init__(
        self, params: Any, defaults: dict[str, Any], freeze_step: int, variance_window: int, **options: Any
    ) -> None:
        check_freezing(freeze_step, variance_window)
        self.freeze_step, self.variance_window = freeze_step, variance_window
        super().__init__(params, defaults, **options)

    @property
    def frozen(self) -> bool:
        """Whether `freeze_step` steps are done, so that the next one leaves the variance as it is."""
        return self.clock.step >= self.freeze_step

    def _coming(self) -> StepKind:
        return StepKind.ONE_BIT if self.frozen else StepKind.EXACT

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        clock = self.clock
        if group.get("non_freeze"):
            return Hyper.of(group, clock.step, clock.step)
        window = VarianceWindow(self.freeze_step, self.variance_window) if self._compresses else EVERY_STEP_ALIKE
        return Hyper.of(group, clock.step, clock.variance_steps, window)

    def _advance(self) -> StepKind:
        kind = self._coming() if self._compresses else StepKind.EXACT
        self.clock.step += 1
        self.clock.variance_steps += kind is StepKind.EXACT
        return kind


class OneBitAdam(FreezingOptimizer):
    """Adam until the variance is stable, then momenta averaged in one bit over a frozen variance; config name
    `OneBitAdam`, other name `OnebitAdam`.

    Args:
        params: parameters or groups. A group may have `exp_avg_mask` (a tensor, or one per parameter: positions with 0
            keep zero momentum; flattened or in the parameter's shape) and `non_freeze: True` (ordinary Adam with
            exactly averaged gradients for ever).
        deepspeed: an engine that reduces gradients during backward unless its `enable_backward_allreduce` is false,
            which the optimizer then sets; None in a plain loop and with `dsx.initialize`.
        freeze_step: number of exact steps before compression begins.
        bias_correction: correct the bias of the moments as Adam does. DeepSpeed's default is True and has no effect;
            the published algorithm has no such correction.
        eps_inside_sqrt: divide by sqrt(v + eps).
        max_grad_norm, amsgrad: refused unless 0 and False.
        cuda_aware, comm_backend_name: checked; the process group's backend carries the messages whatever they say, and
            one line tells where they say something else.
        process_group: who takes part; None: all ranks.
        compression: "on", or "off": exact steps for ever. Whether it saves time on some links is said by `dsx plan`.
        gradient_dtype: dtype in which gradients of exact steps travel; None: their own.
        scale: "rms" (the published scale) or "mean" (the least error per message).
        variance_floor: in compressed steps no element's sqrt(v) counts as less than this share of its tensor's root
            mean square; 0 is the published algorithm, 0.1 keeps the noise of one-bit momenta out of rarely used rows.
        variance_window: in so many steps before the freeze the variance goes over to their plain mean, b2 growing to 1
            - 1/k; 0 is the published algorithm. Half of `freeze_step` where b2 is below 0.99 or `freeze_step` small:
            what is frozen is then no average of a few steps.

    Raises:
        CommArgumentError: an argument that cannot be, with its name.
    """

    may_skip_freezing = True

    def __init__(
        self,
        params: Any,
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str | None = None,
        *,
        process_group: Any = None,
        compression: Compression = "on",
        gradient_dtype: torch.dtype | None = None,
        scale: str = "rms",
        variance_floor: float = 0.0,
        variance_window: int = 0,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "eps_inside_sqrt": eps_inside_sqrt, "weight_decay": weight_decay,
            "bias_correction": bias_correction, "max_grad_norm": max_grad_norm, "amsgrad": amsgrad, "non_freeze": False,
        }  # fmt: skip
        super().__init__(
            params, defaults, freeze_step, variance_window, process_group=process_group, compression=compression,
            gradient_dtype=gradient_dtype, scale=scale, variance_floor=variance_floor,
            comm_backend_name=comm_backend_name, cuda_aware=cuda_aware, deepspeed=deepspeed,
        )  # fmt: skip

    @property
    def adam_freeze_key(self) -> bool:
        """Whether the variance is frozen: `freeze_step` steps are done."""
        return self.frozen

    def _apply(self, kind: StepKind) -> None:
        exact = kind is StepKind.EXACT
        for group in self.param_groups:
            self._move(group, exact, kind)
        if not exact:
            for arena in self._arenas:
                arena.average()
            compressed = self._compressed()
            self._mask(compressed, self._states(compressed, "exp_avg"))
        for group in self.param_groups:
            self._descend(group)

    def _move(self, group: dict[str, Any], exact: bool, kind: StepKind) -> None:
        """The moments of one group."""
        h, both = self._hyper(group), exact or group["non_freeze"]
        # in steps with local gradients no other code averages those of groups that are never frozen
        averaged = self._exact_everywhere(kind) if exact else group["non_freeze"]
        for batch in batches(group["params"]):
            found = self._gradients(batch, averaged=averaged)
            gradients = [found[id(p)] for p in batch]
            move_first(self._states(batch, "exp_avg"), gradients, h.beta1)
            if both:
                move_second(self._states(batch, "exp_avg_sq"), gradients, h.beta2)

    def _descend(self, group: dict[str, Any]) -> None:
        h = self._hyper(group)
        for batch in batches(group["params"]):
            denominators = self._roots(batch, h)
            step = directions(batch, self._states(batch, "exp_avg"), denominators, h)
            self._descend_by(batch, batch, step, h.lr)
