"""Reading and writing single parameters, gradients and optimizer states of a sharded model.

Full accessors take and give whole tensors in their logical shape and are collective: every rank calls them, with the
same value. Local ones take and give this rank's 1-D slice (empty where it owns nothing). A parameter is named by the
object that `model.named_parameters()` gives, or by its name together with `optimizer=`.

Gradients can be read between a backward and the step. They are as backward left them: under loss scaling they are
scaled. Gradients that are not reduced yet (earlier micro-batches at stages 0 and 1, backwards inside `no_sync`) are
read as this rank's own sum so far, not averaged over the ranks; they cannot be written. The names of the arguments are
those that scripts use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .errors import ZeroStateError
from .view import Parameter, View, is_frozen

if TYPE_CHECKING:
    from .optimizer import ZeroOptimizer

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]

# Whole tensors --------------------------------------------------------------------------------------------------------


def safe_get_full_fp32_param(param: Parameter, *, optimizer: ZeroOptimizer | None = None) -> torch.Tensor | None:
    """The whole master value (collective): a new tensor of the parameter's shape in the dtype of masters (fp32).

    Args:
        param: a parameter of a sharded model, or its name together with `optimizer`.
        optimizer: what `shard` returned; needed for a name only.

    Returns:
        The value; None for a frozen parameter, which has no master.

    Raises:
        ZeroStateError: the parameter belongs to no sharded model.
    """
    if is_frozen(param, optimizer):
        return None
    view = View(param, optimizer)
    return view.whole(view.master_slice() if view.masters else None)


def safe_set_full_fp32_param(param: Parameter, value: torch.Tensor, *, optimizer: ZeroOptimizer | None = None) -> None:
    """Set the whole master value and the parameter with it (collective).

    Args:
        param: a parameter of a sharded model, or its name together with `optimizer`.
        value: of the parameter's shape, any floating dtype and device; the same on all ranks.
        optimizer: what `shard` returned; needed for a name only.

    Raises:
        ZeroStateError: the shape is another one, or the parameter belongs to no sharded model.
    """
    view = View(param, optimizer)
    view.set_master_slice(view.cut(value))
    view.show(view.own(value))


def safe_get_full_optimizer_state(
    param: Parameter, optim_state_key: str, *, optimizer: ZeroOptimizer | None = None
) -> torch.Tensor | None:
    """A whole optimizer state (collective): a new tensor of the parameter's shape.

    Args:
        param: a parameter of a sharded model, or its name together with `optimizer`.
        optim_state_key: as the optimizer calls it: "exp_avg", "momentum_buffer", ...
        optimizer: what `shard` returned; needed for a name only.

    Returns:
        The state; None before the first step, and for a frozen parameter.

    Raises:
        ZeroStateError: the state is a single value, such as a step count, or has a shape of its own.
    """
    if is_frozen(param, optimizer):
        return None
    view = View(param, optimizer)
    state = view.state(optim_state_key)
    if state is not None and (not isinstance(state, torch.Tensor) or state.numel() != view.part.numel):
        raise ZeroStateError(
            f"{view.name}: the state {optim_state_key!r} has not one value per element; read a single value in"
            " optimizer.state, and a tensor of another shape with dsx_zero.full_state_dict"
        )
    return view.whole(state)


def safe_set_full_optimizer_state(
    param: Parameter, value: torch.Tensor, optim_state_key: str, *, optimizer: ZeroOptimizer | None = None
) -> None:
    """Set a whole optimizer state (collective). It must exist: the optimizer has stepped, or a checkpoint was loaded.

    Args:
        param: a parameter of a sharded model, or its name together with `optimizer`.
        value: of the parameter's shape, any floating dtype and device; the same on all ranks.
        optim_state_key: as the optimizer calls it: "exp_avg", "momentum_buffer", ...
        optimizer: what `shard` returned; needed for a name only.

    Raises:
        ZeroStateError: there is no such state yet, or the shape is another one.
    """
    view = View(param, optimizer)
    part = view.cut(value)
    view.set_state(optim_state_key, part)


def safe_get_full_grad(param: Parameter, *, optimizer: ZeroOptimizer | None = None) -> torch.Tensor | None:
    """The whole gradient (collective): a new fp32 tensor of the parameter's shape, averaged over the ranks as far as it
    has been reduced. None when there is none, and for a frozen parameter.

    Read it after the backward of an update's last micro-batch and before the step. Before that, at stages 0 and 1 and
    inside `no_sync`, it is this rank's own sum.
    """
    if is_frozen(param, optimizer):
        return None
    view = View(param, optimizer, gradient=True)
    view.complete_gradients()
    reduced = view.joined(view.grad_slice() if view.part.numel else None)
    return view.of_global(_sum(reduced, view.unreduced()))


def safe_set_full_grad(param: Parameter, value: torch.Tensor, *, optimizer: ZeroOptimizer | None = None) -> None:
    """Set the whole reduced gradient (collective): `value` has the parameter's shape and is the same on all ranks.

    Raises:
        ZeroStateError: there is no reduced gradient now, or the shape is another one.
    """
    view = View(param, optimizer, gradient=True)
    part = view.cut(value)
    view.complete_gradients()
    _write_grad(view, part)


def safe_update_full_grad_vectorized(
    param_list: Sequence[Parameter],
    update_func: Callable[[torch.Tensor, Any], torch.Tensor],
    *,
    optimizer: ZeroOptimizer | None = None,
) -> None:
    """Replace the whole gradient g of each parameter p by `update_func(g, p)` (collective); those without a gradient
    are left out. Both g and the result are fp32 tensors of the parameter's shape.

    Args:
        param_list: parameters of a sharded model, in the same order on all ranks.
        update_func: called on every rank; must return the same on all.
        optimizer: what `shard` returned; needed where `param_list` has names.

    Raises:
        ZeroStateError: see `safe_set_full_grad`.
    """
    for param in param_list:
        grad = safe_get_full_grad(param, optimizer=optimizer)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param), optimizer=optimizer)


# This rank's slices ---------------------------------------------------------------------------------------------------


def safe_get_local_fp32_param(param: Parameter, *, optimizer: ZeroOptimizer | None = None) -> torch.Tensor | None:
    """This rank's part of the master, 1-D, a copy (no communication); empty where this rank holds no element of it,
    None for a frozen parameter, which has no master.
    """
    if is_frozen(param, optimizer):
        return None
    return View(param, optimizer).master_slice().clone()


def safe_set_local_fp32_param(param: Parameter, value: torch.Tensor, *, optimizer: ZeroOptimizer | None = None) -> None:
    """Set this rank's part of the master and make it visible in the parameter (collective; ranks may give different
    values). `value`: 1-D, with as many elements as `safe_get_local_fp32_param` gives.

    Raises:
        ZeroStateError: another number of elements.
    """
    view = View(param, optimizer)
    view.set_master_slice(view.check_local(value))
    joined = view.joined(view.master_slice() if view.masters else None)
    if joined is not None:
        view.show(joined)


def safe_get_local_optimizer_state(
    param: Parameter, optim_state_key: str, *, optimizer: ZeroOptimizer | None = None
) -> torch.Tensor | None:
    """This rank's part of an optimizer state ("exp_avg", ...), 1-D, a copy (no communication); a state that is a
    single value as it is; None when there is none.
    """
    if is_frozen(param, optimizer):
        return None
    state = View(param, optimizer).state(optim_state_key)
    return state.detach().reshape(-1).clone() if isinstance(state, torch.Tensor) else state


def safe_set_local_optimizer_state(
    param: Parameter, value: torch.Tensor, optim_state_key: str, *, optimizer: ZeroOptimizer | None = None
) -> None:
    """Set this rank's part of an optimizer state (no communication). `value`: 1-D, with as many elements as
    `safe_get_local_optimizer_state` gives.

    Raises:
        ZeroStateError: another number of elements, or there is no such state yet.
    """
    view = View(param, optimizer)
    part = view.check_local(value)
    view.set_state(optim_state_key, part)


def safe_get_local_grad(param: Parameter, *, optimizer: ZeroOptimizer | None = None) -> torch.Tensor | None:
    """This rank's slice of what `safe_get_full_grad` gives, in the dtype of accumulation, a copy; None when there is
    none.
    """
    if is_frozen(param, optimizer):
        return None
    view = View(param, optimizer, gradient=True)
    own = view.unreduced()
    slices = (view.grad_slice(), None if own is None else own.detach().reshape(-1)[view.part.start : view.part.stop])
    there = [piece for piece in slices if piece is not None]
    return sum(there[1:], there[0].clone()) if there else None


def safe_set_local_grad(param: Parameter, value: torch.Tensor, *, optimizer: ZeroOptimizer | None = None) -> None:
    """Set this rank's part of the reduced gradient (no communication). `value`: 1-D, with as many elements as
    `safe_get_local_grad` gives.

    Raises:
        ZeroStateError: there is no reduced gradient now, or another number of elements.
    """
    view = View(param, optimizer, gradient=True)
    part = view.check_local(value)
    _write_grad(view, part)


def _write_grad(view: View, part: torch.Tensor) -> None:
    if view.unreduced() is not None or (view.part.numel and view.grad_slice() is None):
        raise ZeroStateError(
            f"{view.name}: has no reduced gradient now; write between the backward of an update's last micro-batch and"
            " the step"
        )
    if view.part.numel:
        view.runtime.gradients.reductions.write(view.group, view.index, view.part, part)
    view.runtime.gradients.reductions.changed()


def _sum(reduced: torch.Tensor | None, own: torch.Tensor | None) -> torch.Tensor | None:
    there = [piece.detach().float() for piece in (reduced, own) if piece is not None]
    return sum(there[1:], there[0].clone()) if there else None
