"""0/1 Adam (arXiv:2202.06009): fewer variance updates, one-bit rounds between them, and steps that send nothing.

While the variance moves, an EXACT step moves both moments with the exact mean gradient; between those, ONE_BIT steps
move m alone with the mean gradient in one bit. Afterwards ranks take LOCAL steps with their own momenta and add them
up:

    step = m / D + weight_decay p;  p = p - lr step;  u = u - lr step,  D = sqrt(v) + eps

and at SYNC the sum is averaged in one bit in momentum's units and applied to where the window of local steps began:
u = compressed mean(u D); m = -u / (sum of lr); p = p_begin + u / D; u = 0. When it happens is `schedule.py`. p_begin is
kept (4 bytes per parameter), not computed back, so that parameters are bitwise identical on all ranks after every SYNC.
Between two SYNCs they differ: `synchronize()` ends the window early, for evaluation or saving.

DeepSpeed skips momentum on one rank and drops intervals and errors on load; here one rank does the same steps with
exact means, and everything is saved. Left out: clipping and ZeRO stages, as in 1-bit Adam.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .arithmetic import Hyper, Tensors, batches, directions, move_first, move_second
from .base import CompressedOptimizer
from .checks import Compression
from .schedule import StepKind, ZeroOneClock, ZeroOnePolicy


class ZeroOneAdam(CompressedOptimizer):
    """0/1 Adam: fewer variance updates, one-bit rounds between them, and steps that send nothing; config name
    `ZeroOneAdam`. Arguments that are not listed: as in `OneBitAdam`.

    Args:
        var_freeze_step: the last step that may move the variance.
        var_update_scaler: EXACT steps until their interval doubles.
        local_step_scaler: steps until the interval between SYNCs doubles.
        local_step_clipper: the longest such interval.
    """

    clock_type = ZeroOneClock

    def __init__(
        self,
        params: Any,
        deepspeed: Any = None,
        lr: float = 1e-3,
        bias_correction: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str | None = None,
        *,
        process_group: Any = None,
        compression: Compression = "on",
        gradient_dtype: torch.dtype | None = None,
        scale: str = "rms",
        variance_floor: float = 0.0,
    ) -> None:
        self.policy = ZeroOnePolicy(var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "eps_inside_sqrt": eps_inside_sqrt, "weight_decay": weight_decay,
            "bias_correction": bias_correction, "max_grad_norm": max_grad_norm, "amsgrad": amsgrad,
        }  # fmt: skip
        self._begin: dict[int, torch.Tensor] = {}  # parameters where the running window began
        self._in_window = False
        super().__init__(
            params, defaults, process_group=process_group, compression=compression, gradient_dtype=gradient_dtype,
            scale=scale, variance_floor=variance_floor, comm_backend_name=comm_backend_name, cuda_aware=cuda_aware,
            deepspeed=deepspeed,
        )  # fmt: skip

    def state_template(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Adam's states and the sum of learning rates since the last SYNC."""
        return {**super().state_template(parameter), "lrs": 0.0}

    # The flat buffer holds what is on its way: the gradient of a ONE_BIT step, then the sum of local steps.

    def _bind(self, parameter: torch.Tensor) -> None:
        """Nothing: the moments are ordinary states."""

    def _coming(self) -> StepKind:
        return self.clock.coming(self.policy)

    def _advance(self) -> StepKind:
        if not self._compresses:
            return self.clock.without_compression()
        kind = self.clock.advance(self.policy)
        if self.clock.step == self.policy.var_freeze_step + 1:
            # what was kept back was in units of gradients; sums of steps are something else
            for arena in self._arenas:
                arena.reset_errors()
                arena.flat.zero_()
        return kind

    def _views(self, parameters: Tensors) -> Tensors:
        return [self._arena_of[id(p)].views[id(p)] for p in parameters]

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        return Hyper.of(group, self.clock.step, self.clock.variance_steps)

    def _batches(self) -> Iterator[tuple[Tensors, Hyper]]:
        return ((batch, self._hyper(group)) for group in self.param_groups for batch in batches(group["params"]))

    def _apply(self, kind: StepKind) -> None:
        if kind is StepKind.EXACT:
            self._exact_step()
        elif kind is StepKind.ONE_BIT:
            self._one_bit_step()
        else:
            self._local_step()
            if kind is StepKind.SYNC:
                self._exchange()

    def _exact_step(self) -> None:
        averaged = self._exact_everywhere(StepKind.EXACT)
        for batch, h in self._batches():
            found = self._gradients(batch, averaged=averaged)
            gradients = [found[id(p)] for p in batch]
            move_first(self._states(batch, "exp_avg"), gradients, h.beta1)
            move_second(self._states(batch, "exp_avg_sq"), gradients, h.beta2)
        self._masks = None  # elements may have had their first gradient
        self._descend()

    def _one_bit_step(self) -> None:
        for batch, _ in self._batches():
            found = self._gradients(batch, averaged=False)
            for parameter, view in zip(batch, self._views(batch)):
                view.copy_(found[id(parameter)])
        self._average()
        for batch, h in self._batches():
            move_first(self._states(batch, "exp_avg"), self._views(batch), h.beta1)
        self._descend()

    def _descend(self) -> None:
        for batch, h in self._batches():
            denominators = self._roots(batch, h)
            step = directions(batch, self._states(batch, "exp_avg"), denominators, h)
            self._descend_by(batch, batch, step, h.lr)

    def _local_step(self) -> None:
        self._open_window()
        for batch, h in self._batches():
            found = self._gradients(batch, averaged=False)
            m = self._states(batch, "exp_avg")
            move_first(m, [found[id(p)] for p in batch], h.beta1)
            self._mask(batch, m)
            step = directions(batch, m, self._roots(batch, h), h)
            self._descend_by(batch, batch, step, h.lr)
            self._descend_by(batch, self._views(batch), step, h.lr)
            for parameter in batch:
                self.state[parameter]["lrs"] += h.lr / h.m_correction

    def _open_window(self) -> None:
        if self._in_window:
            return
        self._in_window = True
        for parameter in self.parameters():
            kept = self._begin.get(id(parameter))
            self._begin[id(parameter)] = parameter.clone() if kept is None else kept.copy_(parameter)

    def _average(self) -> None:
        for arena in self._arenas:
            arena.average()
        compressed = self._compressed()
        self._mask(compressed, self._views(compressed))

    def _exchange(self) -> None:
        """The SYNC itself; see the module's text."""
        for batch, h in self._batches():
            denominators = self._roots(batch, h)
            torch._foreach_mul_(self._views(batch), denominators)  # pyright: ignore[reportPrivateImportUsage]
        self._average()
        for batch, h in self._batches():
            u = self._views(batch)
            for parameter, sent in zip(batch, u):
                state = self.state[parameter]
                if state["lrs"]:
                    state["exp_avg"].copy_(sent).div_(-state["lrs"])
                state["lrs"] = 0.0
                parameter.copy_(self._begin[id(parameter)])
            denominators = self._roots(batch, h)
            step = list(torch._foreach_div(u, denominators))  # pyright: ignore[reportPrivateImportUsage]
            self._descend_by(batch, batch, step, -1.0)
        for arena in self._arenas:
            arena.flat.zero_()
        self._in_window = False

    def communication_tensors(self) -> list[torch.Tensor]:
        """Also where the window of local steps began."""
        return [*super().communication_tensors(), *self._begin.values()]

    # - between two SYNCs

    @torch.no_grad()
    def synchronize(self) -> None:
        """End the running window of local steps now, so that parameters and moments are the same on all ranks
        (collective).

        Nothing happens right after a SYNC and while the variance still moves.
        """
        if self._in_window:
            self._floors = bool(self._floor)
            self._exchange()

    def states_loaded(self) -> None:
        """See `CompressedOptimizer.states_loaded`; what was saved through states was saved between two windows."""
        super().states_loaded()
        self._in_window = False
        for arena in self._arenas:
            arena.flat.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The state of a compressed optimizer; within a window of local steps also this rank's part of it."""
        saved = super().state_dict()
        if self._in_window:
            begin = [self._begin[id(p)] for p in self.parameters()]
            saved["window"] = {"sums": [arena.flat for arena in self._arenas], "begin": begin}
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `CompressedOptimizer.load_state_dict`."""
        saved = dict(state_dict)
        window = saved.pop("window", None)
        super().load_state_dict(saved)
        self._in_window = window is not None
        if window is None:
            return
        for arena, values in zip(self._arenas, window["sums"]):
            arena.flat.copy_(values)
        self._begin = {id(p): v.to(p, copy=True) for p, v in zip(self.parameters(), window["begin"])}
