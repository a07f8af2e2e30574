"""`clip_grad_norm_`, `CheckOverflow` and others of `deepspeed.runtime.utils`: norms and checks that all ranks agree on.

`dsx_ops` has the passes over the gradients of one process. Here their results are added up over the ranks, as
`dsx_comm.RankSet` says for each parameter: what several ranks hold counts once, and so does each expert and each slice
of a tensor, whichever rank holds it. So every rank gets the same norm, and clips what all ranks hold by one factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dsx_comm
import dsx_ops
import torch
from dsx_comm import ParameterMarks, RankSets, parallel_groups
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["CheckOverflow", "clip_grad_norm_", "get_grad_zeros", "get_weight_norm"]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, mpu: Any = None
) -> Tensor:
    """Scale gradients so that the norm of the whole model is at most `max_norm`. Collective.

    Call it after the gradients were averaged. The ranks use one factor even if gradients differ between data-parallel
    ranks: then the mean of their powers counts. DeepSpeed takes the mean of the ranks' norms, in which each rank counts
    the experts that it holds; for averaged gradients without experts that is the same number.

    Args:
        parameters: one parameter or several; those without a gradient are left out.
        max_norm: the largest norm, at least 0.
        norm_type: 2, infinity, or any p > 0.
        mpu: tells the model-parallel and data-parallel groups; None: those of `deepspeed.utils.groups`.

    Returns:
        The norm before, a float64 tensor without dimensions.

    Raises:
        dsx_ops.errors.HyperparameterError: `max_norm` is negative, or `norm_type` is not positive.
        dsx_comm.errors.TopologyError: an expert's parameter names a group that does not exist, or the mpu has none.
    """
    if not max_norm >= 0:
        raise dsx_ops.errors.HyperparameterError(f"max_norm: got {max_norm}, expected a number >= 0")
    found = [p for p in _listed(parameters) if p.grad is not None]
    if not all(_is_plain(p.grad) for p in found):  # gradients of a sharded model: their norms are those of all ranks
        total = torch.nn.utils.clip_grad_norm_(found, max_norm, norm_type)
        return (total.full_tensor() if isinstance(total, DTensor) else total).double()
    total = _norm(found, [p.grad for p in found], float(norm_type), mpu, shared=True)
    coefficient = max_norm / (float(total) + 1e-6)
    if coefficient < 1.0:
        dsx_ops.scale_([p.grad for p in found if p.grad is not None], coefficient)
    return total


def get_weight_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0, mpu: Any = None) -> float:
    """The norm of the parameters as one vector, -1 if it is not finite. With an mpu: of all model-parallel ranks
    (collective).
    """
    found = _listed(parameters)
    total = float(_norm(found, [p.detach() for p in found], float(norm_type), mpu, shared=False))
    return total if math.isfinite(total) else -1.0


def get_grad_zeros(parameters: Tensor | Iterable[Tensor], mpu: Any = None) -> float:
    """The number of elements of the gradients that are 0. With an mpu: of all model-parallel ranks (collective)."""
    found = [p for p in _listed(parameters) if p.grad is not None]
    if mpu is None:
        return float(dsx_ops.get_grad_zeros(found))
    with _rank_sets(mpu) as sets:
        mine = [p for p in found if sets.of(ParameterMarks.read(p)).counts_in_norm]
        total = torch.tensor(float(dsx_ops.get_grad_zeros(mine)), dtype=torch.float64, device=_device(found))
        _reduce(total, _groups(sets, shared=False), dsx_comm.ReduceOp.SUM)
    return float(total)


class CheckOverflow:
    """Whether gradients have an infinity or a NaN.

    All ranks get the same answer (and all have to ask) if there are experts' parameters, an mpu, `zero_reduce_scatter`,
    or an engine that does not average gradients in the backward. Else this process alone is checked: averaged dense
    gradients are the same on all ranks.

    Args:
        param_groups: lists of parameters, or parameter groups of an optimizer.
        mpu: tells the model-parallel and data-parallel groups.
        zero_reduce_scatter: each rank has other gradients.
        deepspeed: an engine.
    """

    def __init__(
        self,
        param_groups: Iterable[Any] | None = None,
        mpu: Any = None,
        zero_reduce_scatter: bool = False,
        deepspeed: Any = None,
    ) -> None:
        self.mpu, self.zero_reduce_scatter, self.deepspeed = mpu, zero_reduce_scatter, deepspeed
        self.params = _of_groups(param_groups)
        self.has_moe_params = _has_experts(self.params)

    def check(self, param_groups: Iterable[Any] | None = None) -> bool:
        """`has_overflow` of the parameters of these groups; None: of those given when this object was made."""
        return self.has_overflow(self.params if param_groups is None else _of_groups(param_groups))

    def has_overflow(self, params: Iterable[Tensor], has_moe_params: bool | None = None) -> bool:
        """Whether a gradient of `params` is not finite, on any of the ranks that have to agree.

        Args:
            params: parameters.
            has_moe_params: some of them are experts'; None: their marks say so.
        """
        found = list(params)
        experts = _has_experts(found) if has_moe_params is None else has_moe_params
        return self._agreed(self.has_overflow_serial(found), experts, _device(found))

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of `params` is not finite in this process."""
        found = [p for p in params if p.grad is not None]
        over = dsx_ops.CheckOverflow().has_overflow(p for p in found if _is_plain(p.grad))
        norms = [float(p.grad.norm()) for p in found if p.grad is not None and not _is_plain(p.grad)]
        return over or not all(map(math.isfinite, norms))

    def check_using_norm(self, norm_group: Iterable[Any], reduce_overflow: bool = True) -> bool:
        """Whether one of these norms is not a finite number of at least 0: the ranks agree if `reduce_overflow`."""
        norms = list(norm_group)
        over = any(not 0 <= float(norm) < math.inf for norm in norms)
        tensors = [norm for norm in norms if isinstance(norm, Tensor)]
        return self._agreed(over, reduce_overflow or self.has_moe_params, _device(tensors or self.params))

    @staticmethod
    def _has_inf_or_nan(x: Tensor, i: int | None = None) -> bool:
        return not bool(torch.isfinite(x).all())

    def _agreed(self, over: bool, everywhere: bool, device: torch.device) -> bool:
        averages = getattr(self.deepspeed, "enable_backward_allreduce", True)
        if not (everywhere or self.mpu is not None or self.zero_reduce_scatter or averages is False):
            return over
        with _rank_sets(self.mpu) as sets:
            flag = torch.tensor(float(over), device=device)
            _reduce(flag, _groups(sets, shared=True), dsx_comm.ReduceOp.MAX)
        return bool(flag)


def _norm(parameters: list[Tensor], tensors: list[Any], p: float, mpu: Any, *, shared: bool) -> Tensor:
    """The p-norm of `tensors`, one per parameter, over the ranks.

    Args:
        parameters: their marks say which ranks hold them.
        tensors: this rank's values.
        p: order of the norm.
        mpu: see `clip_grad_norm_`.
        shared: sum over data-parallel ranks, too. False: only over the model-parallel ranks of an mpu.
    """
    if not p > 0:
        raise dsx_ops.errors.HyperparameterError(f"norm_type: got {p}, expected 2, infinity or a number > 0")
    powers = _power_sums(tensors, p)
    if mpu is None and not shared:
        return powers.amax() if math.isinf(p) and len(powers) else powers.sum() ** (1.0 / p)
    with _rank_sets(mpu) as sets:
        if math.isinf(p):
            total = powers.amax() if len(powers) else powers.sum()
            _reduce(total, _groups(sets, shared=shared), dsx_comm.ReduceOp.MAX)
            return total
        ranks = [sets.of(ParameterMarks.read(parameter)) for parameter in parameters]
        weights = [(1.0 / r.size if shared else 1.0) if r.counts_in_norm else 0.0 for r in ranks]
        counted = torch.where(torch.tensor(weights) == 0, 0.0, powers.cpu())  # 0 * inf of an uncounted copy is NaN
        total = (counted * torch.tensor(weights, dtype=torch.float64)).sum().to(powers.device)
        _reduce(total, _groups(sets, shared=shared), dsx_comm.ReduceOp.SUM)
    return total ** (1.0 / p)


def _power_sums(tensors: list[Tensor], p: float) -> Tensor:
    """The sum of |x|^p of each tensor in float64; for infinity the largest |x|, where a NaN counts as infinity: a
    maximum over ranks may lose a NaN.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    if p == 2.0:
        return dsx_ops.update.squared_norms(tensors)
    device, inf = tensors[0].device, math.isinf(p)
    norms = [torch.linalg.vector_norm(t.detach().to_dense().double(), p).to(device) for t in tensors]
    return torch.stack(norms).nan_to_num(nan=math.inf, posinf=math.inf) if inf else torch.stack(norms) ** p


@contextmanager
def _rank_sets(mpu: Any) -> Iterator[RankSets]:
    """The rank sets of an mpu, which is in use only inside; None: those in use."""
    if mpu is None:
        yield RankSets.current()
        return
    let_go = parallel_groups.hold(mpu) if dsx_comm.is_initialized() else None
    try:
        yield RankSets.of_mpu(mpu)
    finally:
        if let_go is not None:
            let_go()


def _groups(sets: RankSets, *, shared: bool) -> tuple[Any, ...]:
    data = sets.data
    return data.norm_groups if shared else tuple(group for group in data.norm_groups if group != data.group)


def _reduce(value: Tensor, groups: tuple[Any, ...], op: Any) -> None:
    for group in groups:
        dsx_comm.all_reduce(value, op=op, group=group)


def _is_plain(gradient: Tensor | None) -> bool:
    return type(gradient) in (Tensor, torch.nn.Parameter)


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _of_groups(param_groups: Iterable[Any] | None) -> list[Tensor]:
    groups = [group["params"] if isinstance(group, Mapping) else group for group in param_groups or ()]
    return [p for group in groups for p in group]


def _has_experts(parameters: Iterable[Tensor]) -> bool:
    return any(ParameterMarks.read(p).expert is not None for p in parameters)


def _device(parameters: list[Tensor]) -> torch.device:
    return parameters[0].device if parameters else torch.device("cpu")
