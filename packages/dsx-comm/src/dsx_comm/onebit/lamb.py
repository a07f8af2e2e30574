"""1-bit LAMB (arXiv:2104.06069): LAMB until the variance is stable, then one-bit momenta with adapted layer
coefficients.

Warm-up, per tensor: u = m / (sqrt(v) + eps) + weight_decay p, coefficient c = clip(||p|| / ||u||, min_coeff, max_coeff)
(1 where a norm is 0), p = p - lr c u, and a running mean of those c that are not 1.

Afterwards m is averaged in one bit, all tensors in one message of one scale; so that the scale fits all, each tensor is
multiplied by (mean over tensors of rms(m)) / rms(m), taken at the freeze. The coefficient is the running mean times a
factor that follows how far the true variance has moved from the frozen one: from the averaged momenta the gradient is
reconstructed, g = (m_new - b1 m_old) / (1 - b1), a fresh variance goes on with it, and

    factor = max over elements of (sqrt(v_frozen) + eps) / (sqrt(v_fresh) + eps)

weighted with the share of u that is not weight decay, and clipped, to [factor_min, factor_max] and to within
`factor_threshold` of the step before.
"""

from __future__ import annotations

from typing import Any

import torch

from .adam import FreezingOptimizer
from .arithmetic import Hyper, batches, directions, move_first, move_second, roots, with_variance_floor
from .checks import Compression
from .schedule import StepKind


class OneBitLamb(FreezingOptimizer):
    """LAMB until the variance is stable, then one-bit momenta with adapted layer coefficients; config name
    `OneBitLamb`, other name `OnebitLamb`. Arguments that are not listed: as in `OneBitAdam`.

    Args:
        bias_correction: multiply lr by sqrt(1 - b2^s) / (1 - b1^t), as LAMB implementations do.
        max_coeff, min_coeff: limits of the coefficient during warm-up.
        coeff_beta: decay of the running mean of coefficients.
        factor_max, factor_min: limits of the factor.
        factor_threshold: how far the factor may move in one step, as a share of itself.
    """

    one_scale = True

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
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str | None = None,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
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
            "bias_correction": bias_correction, "max_grad_norm": max_grad_norm, "amsgrad": amsgrad,
            "max_coeff": max_coeff, "min_coeff": min_coeff, "coeff_beta": coeff_beta,
            "factor_max": factor_max, "factor_min": factor_min, "factor_threshold": factor_threshold,
        }  # fmt: skip
        self._coefficients: list[float] = []
        super().__init__(
            params, defaults, freeze_step, variance_window, process_group=process_group, compression=compression,
            gradient_dtype=gradient_dtype, scale=scale, variance_floor=variance_floor,
            comm_backend_name=comm_backend_name, cuda_aware=cuda_aware, deepspeed=deepspeed,
        )  # fmt: skip

    @property
    def lamb_freeze_key(self) -> bool:
        """Whether the variance is frozen: `freeze_step` steps are done."""
        return self.frozen

    def get_lamb_coeffs(self) -> list[float]:
        """The coefficients of the last step, one per parameter tensor; empty before the first."""
        return list(self._coefficients)

    def state_template(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Adam's states and three numbers; the fresh variance comes with the freeze."""
        numbers = {"lamb_coeff_freeze": 0.0, "last_factor": 1.0, "scaling_coeff": 0.0}
        return {**super().state_template(parameter), **numbers}

    def _apply(self, kind: StepKind) -> None:
        self._coefficients = []
        if kind is StepKind.EXACT:
            averaged = self._exact_everywhere(kind)
            for group in self.param_groups:
                self._warm_up(group, averaged)
        else:
            self._freeze()
            self._compressed_step()

    @staticmethod
    def _rate(h: Hyper) -> float:
        return h.lr * h.v_correction**0.5 / h.m_correction

    @staticmethod
    def _plain(h: Hyper) -> Hyper:
        """Without corrections: LAMB's coefficient is taken of uncorrected moments."""
        return Hyper(h.lr, h.beta1, h.beta2, h.eps, h.eps_inside_sqrt, h.weight_decay)

    # - warm-up

    def _warm_up(self, group: dict[str, Any], averaged: bool) -> None:
        h = self._hyper(group)
        for batch in batches(group["params"]):
            found = self._gradients(batch, averaged=averaged)
            gradients = [found[id(p)] for p in batch]
            m, v = self._states(batch, "exp_avg"), self._states(batch, "exp_avg_sq")
            move_first(m, gradients, h.beta1)
            move_second(v, gradients, h.beta2)
            update = directions(batch, m, roots(v, self._plain(h)), self._plain(h))
            sizes = [_norms(batch).tolist(), _norms(update).tolist()]
            for p, u, size, step in zip(batch, update, *sizes):
                c = min(max(size / step, group["min_coeff"]), group["max_coeff"]) if size and step else 1.0
                state = self.state[p]
                if c != 1.0:
                    state["lamb_coeff_freeze"] += (1 - group["coeff_beta"]) * (c - state["lamb_coeff_freeze"])
                self._descend_by([p], [p], [u], self._rate(h) * c)
                self._coefficients.append(c)

    # - compression

    def _freeze(self) -> None:
        """At the first compressed step: what scales momenta to one size, and where the fresh variance begins."""
        compressed = self._compressed()
        if all(self.state[p]["scaling_coeff"] for p in compressed):
            return
        counts = torch.tensor([max(p.numel(), 1) for p in compressed], dtype=torch.float32, device="cpu")
        sizes = (_norms(self._states(compressed, "exp_avg")).cpu() / counts.sqrt()).tolist()
        united = sum(sizes) / len(sizes)
        for parameter, size in zip(compressed, sizes):
            state = self.state[parameter]
            state["scaling_coeff"] = united / size if size and united else 1.0
            state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()

    def _compressed_step(self) -> None:
        compressed = self._compressed()
        momenta, scaling = self._states(compressed, "exp_avg"), [self.state[p]["scaling_coeff"] for p in compressed]
        before = [m.clone() for m in momenta]
        for group in self.param_groups:
            h = self._hyper(group)
            for batch in batches(group["params"]):
                found = self._gradients(batch, averaged=False)
                move_first(self._states(batch, "exp_avg"), [found[id(p)] for p in batch], h.beta1)
        torch._foreach_mul_(momenta, scaling)  # pyright: ignore[reportPrivateImportUsage]
        for arena in self._arenas:
            arena.average()
        torch._foreach_div_(momenta, scaling)  # pyright: ignore[reportPrivateImportUsage]
        self._mask(compressed, momenta)
        earlier = {id(p): m for p, m in zip(compressed, before)}
        for group in self.param_groups:
            self._descend(group, earlier)

    def _descend(self, group: dict[str, Any], earlier: dict[int, torch.Tensor]) -> None:
        h = self._hyper(group)
        for batch in batches(group["params"]):
            m, fresh = self._states(batch, "exp_avg"), self._states(batch, "exp_avg_sq_fresh")
            gradients = [(new - h.beta1 * earlier[id(p)]) / (1 - h.beta1) for p, new in zip(batch, m)]
            move_second(fresh, gradients, h.beta2)
            frozen = self._roots(batch, self._plain(h))
            real = roots(with_variance_floor(fresh, self._floor) if self._floor else fresh, self._plain(h))
            ratios = [(f / r).max() if f.numel() else f.new_ones(()) for f, r in zip(frozen, real)]
            raw = directions(batch, m, frozen, Hyper(h.lr, h.beta1, h.beta2, h.eps, h.eps_inside_sqrt, 0.0))
            update = [r.add(p, alpha=h.weight_decay) for r, p in zip(raw, batch)] if h.weight_decay else raw
            numbers = torch.stack([torch.stack(ratios), _norms(raw), _norms(update)]).tolist()
            for p, u, ratio, bare, size in zip(batch, update, *numbers):
                coefficient = self._coefficient(group, self.state[p], ratio, bare, size)
                self._descend_by([p], [p], [u], self._rate(h) * coefficient)
                self._coefficients.append(coefficient)

    @staticmethod
    def _coefficient(group: dict[str, Any], state: dict[str, Any], factor: float, bare: float, size: float) -> float:
        """The frozen mean times the factor; remembers the factor."""
        if group["weight_decay"]:
            share = min(1.0, bare / size) if size else 1.0
            factor = factor * share + (1 - share)
        factor = min(max(factor, group["factor_min"]), group["factor_max"])
        last, reach = state["last_factor"], group["factor_threshold"]
        factor = min(max(factor, last * (1 - reach)), last * (1 + reach))
        state["last_factor"] = factor
        return state["lamb_coeff_freeze"] * factor


def _norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    """L2 norms, one float32 number per tensor, on the tensors' device."""
    return torch.stack([torch.linalg.vector_norm(t, dtype=torch.float32) for t in tensors])
