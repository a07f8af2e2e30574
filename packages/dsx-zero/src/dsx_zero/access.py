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

import dsx_comm
import torch

from .errors import ZeroStateError
from .homes.home import read, write
from .owners import Owners
from .params.restored import current_parameter
from .plan.units import first_name

if TYPE_CHECKING:
    from .optimizer import ZeroOptimizer
    from .params.flat import FlatGroup
    from .step.masters import Master

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

Parameter = torch.Tensor | str


OWNERS: Owners[ZeroOptimizer] = Owners()
"""Of all models of the process."""


class View:
    """One trainable parameter as this rank holds it. `gradient`: only its gradient is asked for, which may be read
    while masters and states are stepped.
    """

    def __init__(self, parameter: Parameter, optimizer: ZeroOptimizer | None, *, gradient: bool = False) -> None:
        self.optimizer, self.name = _resolve(parameter, optimizer)
        self.optimizer.moved.check()
        if not gradient:
            self.optimizer.update.check_ended()
        self.runtime = self.optimizer.runtime
        self.group: FlatGroup = self.optimizer.layout.group_of(self.name)
        if not self.group.trainable:
            raise ZeroStateError(
                f"{self.name}: is frozen and has no master, gradient or optimizer state; change the parameter itself"
                " (at stage 3 inside dsx_zero.GatheredParameters)"
            )
        self.masters: tuple[Master, ...] = self.optimizer.layout.masters_of(self.name)
        self.index = self.group.layout.index(self.name)
        self.shape = self.group.layout.shapes[self.index]
        self.tensor = self.group.global_of(self.name)
        self.part, _ = self.optimizer.layout.part_of(self.name, whole=self.runtime.stage == 0)

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device=self.group.key.device)

    def master_slice(self) -> torch.Tensor:
        if not self.masters or self.group.master is None:
            return self.empty(self.group.master_dtype)
        return read(self.group.master, self.part.offset, self.part.offset + self.part.numel).detach()

    def set_master_slice(self, values: torch.Tensor) -> None:
        if self.masters and self.group.master is not None:
            write(self.group.master, values, self.part.offset)

    def show(self, whole: torch.Tensor) -> None:
        """Make the parameter show its master's new value, of which `whole` is the whole."""
        self.runtime.publisher.write(self.group, self.index, whole)

    def complete_gradients(self) -> None:
        """Reduce what the last backward should have reduced (collective)."""
        self.runtime.gradients.complete(due=True)

    def grad_slice(self) -> torch.Tensor | None:
        """This rank's reduced gradient, to be read; None when there is none."""
        return self.runtime.gradients.reductions.read(self.group, self.index, self.part)

    def unreduced(self) -> torch.Tensor | None:
        """This rank's own gradient that no reduction has taken, in the parameter's shape."""
        return self.runtime.gradients.reductions.unreduced(self.group, self.index)

    def state(self, key: str) -> Any:
        """This rank's part of a state, 1-D, to be read; a single value as it is; None where there is none."""
        found = [value for m in self.masters if (value := self.optimizer.states.of(m).get(key)) is not None]
        if not found or not isinstance(found[0], torch.Tensor) or found[0].shape != self.masters[0].shape:
            return found[0] if found else None
        flat = [value.reshape(-1) for value in found]
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def set_state(self, key: str, values: torch.Tensor) -> None:
        """Write this rank's part of an existing state."""
        for master in self.masters:
            if not isinstance(self.optimizer.states.of(master).get(key), torch.Tensor):
                known = self.optimizer.states.names(master)
                raise ZeroStateError(
                    f"{self.name}: has no optimizer state {key!r} (it has {known}); states appear with the first step"
                )
            start = master.slice.start - self.part.start
            with self.optimizer.states.opened(master, key) as state:
                state.copy_(values.reshape(-1)[start : start + master.numel])

    def whole(self, piece: torch.Tensor | None) -> torch.Tensor | None:
        """The whole tensor from every rank's piece, the global one of a DTensor; None when no rank has one."""
        return self.of_global(self.joined(piece))

    def of_global(self, joined: torch.Tensor | None) -> torch.Tensor | None:
        """The global tensor of this rank's part of it, where the parameter was a DTensor (collective)."""
        return joined if joined is None or self.tensor is None else self.tensor.whole(joined)

    def joined(self, piece: torch.Tensor | None) -> torch.Tensor | None:
        """The parameter's values, or others like them, from every rank's piece; None when no rank has one."""
        ranks, layout = self.group.ranks, self.group.layout
        if self.runtime.stage == 0 or ranks.size == 1:
            return None if piece is None else piece.detach().reshape(self.shape).clone()
        slices = [layout.local_slice(self.name, rank) for rank in range(ranks.size)]
        longest = max((part.numel for part in slices if part is not None), default=0)
        found: list[Any] = [None] * ranks.size
        mine = None if piece is None else str(piece.dtype)
        dsx_comm.all_gather_object(found, mine, group=ranks.group)
        kind = next((text for text in found if text is not None), None)
        if kind is None or not longest:
            return None if kind is None else torch.empty(self.shape, device=self.group.key.device)
        dtype = getattr(torch, kind.removeprefix("torch."))
        sent = torch.zeros(longest, dtype=dtype, device=self.group.key.device)
        if piece is not None:
            sent[: piece.numel()] = piece.detach().reshape(-1)
        gathered = sent.new_empty(longest * ranks.size)
        dsx_comm.all_gather_into_tensor(gathered, sent, group=ranks.group)
        flat = torch.empty(layout.sizes[self.index], dtype=dtype, device=sent.device)
        for rank, part in enumerate(slices):
            if part is not None:
                flat[part.start : part.stop] = gathered[rank * longest : rank * longest + part.numel]
        return flat.view(self.shape)

    def cut(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor."""
        expected = self.group.global_shape(self.name)
        if tuple(value.shape) != expected:
            raise ZeroStateError(f"{self.name}: got a value of shape {tuple(value.shape)}, expected {expected}")
        return self.own(value).detach().reshape(-1)[self.part.start : self.part.stop]

    def own(self, value: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor that this rank's parameter has: all of it, or the part that tensor parallelism
        gave it.
        """
        return value if self.tensor is None else self.tensor.part_of(value)

    def check_local(self, value: torch.Tensor) -> torch.Tensor:
        if value.numel() != self.part.numel:
            raise ZeroStateError(f"{self.name}: got {value.numel()} elements, expected this rank's {self.part.numel}")
        return value.detach().reshape(-1)


def _resolve(parameter: Parameter, optimizer: ZeroOptimizer | None) -> tuple[ZeroOptimizer, str]:
    if isinstance(parameter, str):
        if optimizer is None:
            raise ZeroStateError(
                f"{parameter!r}: a name alone does not say which model; pass optimizer= or the parameter object"
            )
        return optimizer, first_name(optimizer.runtime.infos, parameter)
    found = OWNERS.find(current_parameter(parameter))
    if found is None:
        raise ZeroStateError(
            "the tensor is not a parameter of a model sharded by dsx_zero.shard (take it from model.named_parameters())"
        )
    return found


def _is_frozen(parameter: Parameter, optimizer: ZeroOptimizer | None) -> bool:
    """Whether the parameter has neither gradient nor states, on any rank. Scripts ask for those of every parameter."""
    owner, name = _resolve(parameter, optimizer)
    return not owner.layout.group_of(name).trainable


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
    if _is_frozen(param, optimizer):
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
    if _is_frozen(param, optimizer):
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
    if _is_frozen(param, optimizer):
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
    if _is_frozen(param, optimizer):
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
    if _is_frozen(param, optimizer):
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
    if _is_frozen(param, optimizer):
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
