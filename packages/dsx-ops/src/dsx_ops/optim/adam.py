"""Adam and AdamW in one pass, with fp32 or 16-bit states, and with or without fp32 master weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..errors import HyperparameterError, TensorError
from ..layouts import put_back
from ..spec import Algorithm, Hyper, name_of
from ._base import FusedOptimizer


class FusedAdam(FusedOptimizer):
    """Adam(W) as one call per dtype, whatever the number of tensors.

    m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  p -= lr/(1-b1^t) * m / (sqrt(v)/sqrt(1-b2^t) + eps). `adam_w_mode`:
    weight decay multiplies the parameter by 1 - lr*wd first (AdamW); otherwise wd*p is added to the gradient. Moments
    are in the parameter's dtype, or in `state_dtype` (float32, bfloat16, float16); arithmetic is fp32 always.
    `split_master` (bf16 parameters): the optimizer keeps the 16 bits that complete each weight to an fp32 master
    (`low_bits` in the state), and updates that master exactly: 12 bytes per parameter in all. The weight is the master
    rounded to nearest. Changing such a weight by hand changes its master too; the low bits stay.

    `stochastic_rounding` (moments in bfloat16): what is kept in bfloat16, moments and parameters without a master, is
    rounded up with the probability of what is cut off. Rounded to nearest, a second moment that changes by a thousandth
    per step stands still. The random bits are a function of `seed`, step and element index, so that they do not depend
    on ranks and pieces. These steps are torch operations on every device.

    DeepSpeed's signature; `set_grad_none` is what `zero_grad()` does by default. State dicts exchange with
    torch.optim.AdamW.
    """

    algorithm = Algorithm.ADAM
    state_names = ("exp_avg", "exp_avg_sq")
    own_options = ("set_grad_none", "algorithm", "row_major", "seed")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        split_master: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        self.set_grad_none, self.seed = set_grad_none, seed
        if stochastic_rounding:
            self.algorithm, self.row_major = Algorithm.ADAM_ROUNDED, True
        if state_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise HyperparameterError(f"state_dtype: got {state_dtype}, expected float32, bfloat16 or float16")
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": tuple(betas),
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
                "bias_correction": bias_correction,
                "adam_w_mode": adam_w_mode,
                "state_dtype": state_dtype,
                "split_master": split_master,
            },
        )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or set them to zero; the default is the constructor's `set_grad_none`."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def _hyper(self, group: dict[str, Any], step: int, grad_scale: float | Tensor) -> Hyper:
        return Hyper(
            lr=group["lr"],
            betas=(float(group["betas"][0]), float(group["betas"][1])),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
            decoupled=group["adam_w_mode"],
            bias_correction=group["bias_correction"],
            maximize=group["maximize"],
            grad_scale=grad_scale,
            seed=step_seed(self.seed, step),
        )

    def _state_dtype(self, param: Tensor, group: dict[str, Any]) -> torch.dtype:
        if group["state_dtype"] is not None:
            return group["state_dtype"]
        return torch.float32 if group["split_master"] else param.dtype

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        kept = self._state_dtype(param, group)
        if self.algorithm is Algorithm.ADAM_ROUNDED and kept != torch.bfloat16:
            raise TensorError(
                f"stochastic_rounding: got moments in {name_of(kept)}, expected bfloat16; set"
                " state_dtype=torch.bfloat16"
            )
        state = super()._new_state(param, group)
        if group["split_master"]:
            if param.dtype != torch.bfloat16:
                raise TensorError(f"split_master: got a {param.dtype} parameter, expected bfloat16")
            state["low_bits"] = self._zeros(param, torch.int16)
        return state

    @torch.no_grad()
    def rollback_flat(
        self,
        param: Tensor,
        grad: Tensor,
        state: dict[str, Any],
        *,
        group: int = 0,
        grad_scale: float | Tensor = 1.0,
    ) -> None:
        """Undo the last update of a flat buffer: `step_flat` backwards, with the same gradient and the same numbers.

        Parameter and moments become what they were, to the rounding of their dtypes (a bf16 parameter comes back to its
        last bit or so; with split masters it is the fp32 master that does), and `state["step"]` is counted down. For a
        step that was taken before it was known whether the gradients are finite or must be clipped. Raises
        `HyperparameterError` where nothing can be undone, and `TensorError`, before anything is written.
        """
        if self.algorithm is not Algorithm.ADAM:
            raise HyperparameterError(
                "rollback: got moments that are rounded at random or in codes, which do not say what they were; keep a"
                " copy of parameter and state"
            )
        numbers = self._hyper(self.param_groups[group], state.get("step", 0), grad_scale)
        numbers.check_reversible()
        slot = self._checked(self._slot(param, grad, state, "flat buffer"), self.param_groups[group])
        reference.adam_rollback(slot, numbers.lowered(self.algorithm))
        put_back(slot.copies)
        state["step"] -= 1


def _subgroup_key(number: int) -> Any:
    """The key of a subgroup in `state`. Not the number itself: state dicts number the parameters."""
    return f"subgroup {number}"


class _SubgroupStates(defaultdict[Any, Any]):
    """An optimizer's `state`, of which `state[number]` gives the state of a subgroup, as scripts read it."""

    def __missing__(self, key: Any) -> Any:
        if isinstance(key, int) and (named := _subgroup_key(key)) in self:
            return self[named]
        return super().__missing__(key)


class CPUAdam(FusedAdam):
    """Adam(W) for parameters in host memory: moments in fp32 whatever the parameter's dtype.

    `fp32_optimizer_states=False` keeps them in the parameter's dtype. Numbers and rule as `FusedAdam`. `step_subgroup`
    and `rollback_subgroup` are for callers that put the buffers of an offloaded model into `param_groups` one after
    another: what belongs to a buffer is kept by the number of its subgroup (`state[number]`), and is part of the state
    dict.

    Args:
        model_params: parameters in host memory (float32, bfloat16, float16), or groups of them.
        lr: a number, or a tensor of one element that is read in every step.
        bias_correction: divide the moments by 1 - beta^step.
        betas, eps, weight_decay: as in `torch.optim.AdamW`; the decay's default here is 0.
        amsgrad: refused if True.
        adamw_mode: decoupled weight decay; False adds it to the gradient.
        split_master: bf16 parameters keep the low 16 bits of their fp32 masters (2 bytes per parameter).

    Raises:
        HyperparameterError: a number out of its range.
        TensorError: a parameter of another dtype or device.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        *,
        split_master: bool = False,
    ) -> None:
        super().__init__(
            model_params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            adam_w_mode=adamw_mode,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            state_dtype=torch.float32 if fp32_optimizer_states else None,
            split_master=split_master,
        )
        self.state = _SubgroupStates(dict, self.state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # torch calls it with the loaded states, too
        self.state = _SubgroupStates(dict, self.state)

    def step_subgroup(self, subgroup_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Update the one parameter that has a gradient, with the state of subgroup `subgroup_id`; returns the closure's
        loss.

        Raises `TensorError` when no parameter or several have a gradient.
        """
        loss, group, param, grad = self._subgroup_buffer("step_subgroup", closure)
        key = _subgroup_key(subgroup_id)
        state = self.state.get(key) or self.new_flat_state(param, group=group)
        self.step_flat(param, grad, state, group=group)
        self.state[key] = state
        return loss

    def rollback_subgroup(self, sub_group_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Undo the last `step_subgroup` of `sub_group_id`, whose parameter and gradient are still there; see
        `rollback_flat`.

        Raises `HyperparameterError` when there was none.
        """
        loss, group, param, grad = self._subgroup_buffer("rollback_subgroup", closure)
        self.rollback_flat(param, grad, self.state.get(_subgroup_key(sub_group_id)) or {}, group=group)
        return loss

    def _subgroup_buffer(self, what: str, closure: Callable[[], Any] | None) -> tuple[Any, int, Tensor, Tensor]:
        """(the closure's loss, number of the parameter group, parameter, gradient)"""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = [(i, p, p.grad) for i, g in enumerate(self.param_groups) for p in g["params"] if p.grad is not None]
        if len(found) != 1:
            raise TensorError(
                f"{what}: got {len(found)} parameters with a gradient, expected one: the buffer of that subgroup; "
                "for all parameters at once use step()"
            )
        return loss, *found[0]


def step_seed(seed: int, step: int) -> int:
    """A well-mixed 32-bit number for this seed and step (splitmix64's finaliser)."""
    x = (seed * 0x9E3779B97F4A7C15 + step + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 31)) & 0xFFFFFFFF
