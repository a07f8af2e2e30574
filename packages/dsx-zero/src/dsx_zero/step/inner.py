"""The user's optimizer as a step uses it: what it can do, what its parameter groups hold, and calls of it.

*Parts.* May some parameters be stepped now, and others later in the same step? That is safe if the rule treats each
parameter alone and keeps no step count outside of the parameters' states. Torch's element-wise optimizers and those
with `step_flat` are safe; others can say so with `steps_in_parts = True`. The rest take one call.

*Groups.* A user finds the model's parameters in `optimizer.param_groups` at every stage. The optimizer steps masters,
slices of which this rank holds: during a step they take the places of the parameters (`StepGroups`). States are kept by
master; `StateView` gives or refuses that of a parameter. The groups of an optimizer that communicates by itself (1-bit)
hold the masters all the time, because it reads them between steps.

*Calls.* `InnerStep` steps some masters, with unscaling and clipping as one factor, which a kernel may take. `step_flat`
is called for one master after the other; otherwise the groups hold only these masters during the call. `twin` makes a
second optimizer for another thread, on the same states with a copy of the settings.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ..errors import ZeroOptimizerError, ZeroStateError
from ..grads.averaging import averages_itself
from ..params.flat import FlatGroup, Part
from ..torch_names import foreach_mul_, global_optimizer_post_hooks, global_optimizer_pre_hooks
from .masters import Master
from .matrices import MatrixStep
from .matrix_rules import matrix_rule
from .sparse import takes_rows

__all__ = [
    "InnerStep", "ReadGradients", "Settings", "StateView", "StepGroups", "checked_state", "gradients_of",
    "has_reciprocal", "has_step_hooks", "may_be_cut", "runs_of", "same_settings", "settings_of", "takes_narrow", "twin",
    "why_at_once",
]  # fmt: skip

ReadGradients = Callable[[FlatGroup, Sequence[Part]], tuple[torch.Tensor, ...]]
"""Reads the reduced gradients of parts of a flat group, as `Reductions.parts` does."""

_TORCH = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")

Settings = list[dict[str, Any]]
"""The settings of an optimizer's parameter groups, without their parameters."""


def why_at_once(inner: Any) -> str | None:
    """The reason why all masters must be stepped in one call; None where there is no such reason."""
    name = type(inner).__name__
    if averages_itself(inner):
        return f"{name} communicates by itself"
    if hasattr(inner, "norm_reducer") or getattr(inner, "needs_tensor_norms", False):
        return f"{name} sums the norms of all tensors in one message"
    if matrix_rule(inner) is not None:
        return f"{name} brings matrices together for all tensors in the same messages"
    if type(inner).__module__.startswith("torch.optim") and name in _TORCH:
        return None
    if getattr(inner, "steps_in_parts", False) or hasattr(inner, "step_flat"):
        return None
    return f"{name} does not say that it can be stepped in parts (steps_in_parts = True)"


def may_be_cut(inner: Any) -> bool:
    """May a parameter be stepped in pieces, each with states of its own? Only if its rule is element-wise."""
    return why_at_once(inner) is None and getattr(inner, "elementwise", True)


def takes_narrow(inner: Any) -> bool:
    """Does `step_flat` of the optimizer take gradients in 16 bits for masters in 32, with the same result?"""
    return hasattr(inner, "step_flat") and getattr(inner, "takes_16_bit_gradients", False)


def has_step_hooks(inner: Any) -> bool:
    """Has the optimizer hooks, which expect one call of `step` per step?"""
    return bool(
        getattr(inner, "_optimizer_step_pre_hooks", None)
        or getattr(inner, "_optimizer_step_post_hooks", None)
        or global_optimizer_pre_hooks
        or global_optimizer_post_hooks
    )


class StepGroups:
    """Exchanges the tensors in the groups of `optimizer`, which holds masters when this object is made.

    Args:
        optimizer: the user's optimizer.
        parameters: the model's parameters of each group, as the user put them there.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[Sequence[torch.Tensor]]) -> None:
        self._optimizer = optimizer
        self._masters = [group["params"] for group in optimizer.param_groups]
        keeps_masters = averages_itself(optimizer)
        self._shown = self._masters if keeps_masters else [list(group) for group in parameters]
        self._known = [[id(tensor) for tensor in group] for group in self._shown]
        self._put(self._shown)

    @property
    def shown(self) -> list[list[torch.Tensor]]:
        """The tensors of each group as the user sees them."""
        return self._shown

    def _put(self, tensors: Sequence[list[torch.Tensor]]) -> None:
        for group, members in zip(self._optimizer.param_groups, tensors):
            group["params"] = members

    def check(self) -> None:
        """Raises ZeroOptimizerError if tensors were added to the groups, taken away or exchanged."""
        groups = self._optimizer.param_groups
        for index, (group, known) in enumerate(zip(groups, self._known)):
            found = [id(tensor) for tensor in group["params"]]
            if found != known:
                raise ZeroOptimizerError(
                    f"param_groups[{index}]['params'] was changed: got {len(found)} tensors, expected the {len(known)}"
                    " that were there when the model was sharded, in their order. Parameters that shall train too come"
                    " with optimizer.add_param_group({'params': [...]}) on every rank; those that shall not are frozen"
                    " with requires_grad_(False)"
                )
        if len(groups) != len(self._known):
            raise ZeroOptimizerError(
                f"param_groups: got {len(groups)} groups, expected {len(self._known)}. A group that comes later is"
                " added with optimizer.add_param_group(group) on every rank, which makes places for its gradients and"
                " states"
            )

    def numbers(self) -> dict[int, int]:
        """The number of the group that a master belongs to, by the `id` of its tensor."""
        return {id(tensor): number for number, group in enumerate(self._masters) for tensor in group}

    def subset(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """For each group, its masters that are among `tensors`."""
        wanted = {id(tensor) for tensor in tensors}
        return [[tensor for tensor in group if id(tensor) in wanted] for group in self._masters]

    @contextmanager
    def masters(self, members: Sequence[list[torch.Tensor]] | None = None) -> Iterator[None]:
        """Inside the context the groups hold this rank's masters: all of them, or those of a `subset`."""
        self._put(self._masters if members is None else members)
        try:
            yield
        finally:
            self._put(self._shown)


class StateView(MutableMapping[Any, Any]):
    """The state of the user's optimizer, which is kept by master. For a parameter of the model it gives the master's
    state or raises; it never gives an empty state.

    Args:
        state: the optimizer's own mapping.
        find: gives the master of a parameter of the model and the parameter's name; None for other keys.
        whole: whether masters are whole tensors, whose state is the parameter's.
    """

    def __init__(
        self,
        state: MutableMapping[Any, Any],
        find: Callable[[Any], tuple[torch.Tensor | None, str] | None],
        *,
        whole: bool,
    ) -> None:
        self._state, self._find, self._whole = state, find, whole

    def _key(self, key: Any) -> Any:
        found = self._find(key) if isinstance(key, torch.Tensor) else None
        if found is None:
            return key
        master, name = found
        if self._whole and master is not None:
            return master
        raise ZeroStateError(
            f"optimizer.state[{name!r}]: the states of a sharded parameter are divided among the ranks; read them with"
            " dsx_zero.safe_get_full_optimizer_state(p, key) on every rank (this rank's slice:"
            " safe_get_local_optimizer_state), write them with safe_set_full_optimizer_state(p, value, key)"
        )

    def __getitem__(self, key: Any) -> Any:
        return self._state[self._key(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._state[self._key(key)] = value

    def __delitem__(self, key: Any) -> None:
        del self._state[self._key(key)]

    def __contains__(self, key: object) -> bool:
        found = self._find(key) if isinstance(key, torch.Tensor) else None
        return (key if found is None else found[0]) in self._state

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __repr__(self) -> str:
        return repr(self._state)


def checked_state(state: Any, find: Callable[[Any], object | None]) -> Mapping[Any, Any]:
    """Check what a script assigns to `optimizer.state`. Raises ZeroStateError if keys are parameters of the model."""
    if not isinstance(state, MutableMapping) or any(isinstance(k, torch.Tensor) and find(k) is not None for k in state):
        raise ZeroStateError(
            "optimizer.state = ...: got states of whole parameters, expected an empty mapping, which starts them again;"
            " to load states use load_state_dict, or set them one by one with dsx_zero.safe_set_full_optimizer_state"
        )
    return state


class InnerStep:
    """Steps masters of one optimizer.

    Args:
        inner: the optimizer.
        groups: exchanges the tensors in its parameter groups; None for a twin, whose groups are simply overwritten.
        numbers: the number of each master's parameter group, by the `id` of its tensor.
        copies: where the optimizer is to write low-precision copies, by master tensor.
        device: of the masters.
        matrices: steps the optimizer in the place of its own `step`, if its rule takes whole matrices.
    """

    def __init__(
        self,
        inner: Any,
        groups: StepGroups | None,
        numbers: Mapping[int, int],
        copies: Mapping[torch.Tensor, torch.Tensor],
        device: torch.device,
        matrices: MatrixStep | None = None,
    ) -> None:
        self.inner, self._matrices = inner, matrices
        self._groups, self._numbers, self._device = groups, numbers, device
        parameters = inspect.signature(inner.step).parameters
        self._takes_scale = "grad_scale" in parameters
        self._by_element = "offsets" in parameters and inner.row_major  # its blocks and random bits go by index
        self.copies = dict(copies) if "copy_out" in parameters else {}
        """Masters whose low-precision copies the optimizer itself writes."""

    def for_twin(self, settings: Settings) -> InnerStep:
        """A step of the same masters for another thread, with these settings; it writes no low-precision copies."""
        return InnerStep(twin(self.inner, settings), None, self._numbers, {}, self._device)

    def step(
        self,
        masters: Sequence[Master],
        grads: Sequence[torch.Tensor | None],
        factor: float | torch.Tensor,
        members: list[list[torch.Tensor]],
        *,
        by_flat: bool,
    ) -> None:
        """Update `masters` from `grads` times `factor`. A master whose gradient is None is left alone.

        Args:
            members: for each parameter group, those of its masters that are among `masters`.
            by_flat: call `step_flat` for one master after the other.
        """
        if by_flat:
            self._step_flat(masters, grads, factor)
            return
        grads = [self._of_rows(g, m) if g is not None and g.is_sparse else g for g, m in zip(grads, masters)]
        for master, grad in zip(masters, grads):
            master.tensor.grad = grad
        try:
            with self._entered(members):
                self._call(factor, [grad for grad in grads if grad is not None], masters)
        finally:
            for master in masters:
                master.tensor.grad = None

    def _of_rows(self, grad: torch.Tensor, master: Master) -> torch.Tensor:
        """A sparse gradient in the form that the optimizer takes: sparse or dense."""
        group = self.inner.param_groups[self._numbers[id(master.tensor)]]
        return grad if takes_rows(self.inner, group) else grad.to_dense()

    def _entered(self, members: list[list[torch.Tensor]]) -> AbstractContextManager[None]:
        if self._groups is not None:
            return self._groups.masters(members)
        for group, tensors in zip(self.inner.param_groups, members):
            group["params"] = tensors
        return nullcontext()

    def _step_flat(
        self, masters: Sequence[Master], grads: Sequence[torch.Tensor | None], factor: float | torch.Tensor
    ) -> None:
        scale: float | torch.Tensor = 1.0
        if isinstance(factor, torch.Tensor) or has_reciprocal(factor):
            scale = 1.0 / factor
        else:
            foreach_mul_([grad for grad in grads if grad is not None], factor)
        for master, grad in zip(masters, grads):
            if grad is None:
                continue
            number, tensor, copy = self._numbers[id(master.tensor)], master.tensor, self.copies.get(master.tensor)
            state = self.inner.state[tensor]
            if not state:
                state.update(self.inner.new_flat_state(tensor, group=number))
            own = {"offset": master.slice.start} if self._by_element else {}
            self.inner.step_flat(tensor, grad, state, group=number, grad_scale=scale, copy_out=copy, **own)

    def _call(self, factor: float | torch.Tensor, grads: list[torch.Tensor], masters: Sequence[Master]) -> None:
        if self._matrices is not None:
            return self._matrices.step(grads, factor)
        inner, keywords = self.inner, dict[str, Any]()
        if self.copies:
            keywords["copy_out"] = {m.tensor: self.copies[m.tensor] for m in masters if m.tensor in self.copies}
        if self._by_element:
            keywords["offsets"] = {m.tensor: m.slice.start for m in masters}
        if isinstance(factor, float) and factor == 1.0:
            inner.step(**keywords)
        elif self._takes_scale and (isinstance(factor, torch.Tensor) or has_reciprocal(factor)):
            inner.step(**{**keywords, "grad_scale": 1.0 / factor})
        elif self._torch_scales():
            # Filling does not make the host wait for the device, as an upload of the number would.
            scale = factor if isinstance(factor, torch.Tensor) else torch.full((), factor, device=self._device)
            inner.grad_scale = scale.reciprocal()
            try:
                inner.step()
            finally:
                del inner.grad_scale
        else:
            if grads:  # a rank may own nothing
                values = [grad._values() if grad.is_sparse else grad for grad in grads]
                foreach_mul_(values, factor)
            inner.step(**keywords)

    def _torch_scales(self) -> bool:
        """Do the kernels of torch's own fused optimizers take the factor (as they do for `torch.amp.GradScaler`)?"""
        return (
            type(self.inner).__module__.startswith("torch.optim")
            and getattr(self.inner, "_step_supports_amp_scaling", False)
            and all(group.get("fused") for group in self.inner.param_groups)
        )


def has_reciprocal(factor: float) -> bool:
    """Does `1 / factor` exist? Clipping an infinite norm gives a factor of 0, and a norm of NaN gives NaN."""
    return factor != 0.0 and math.isfinite(factor) and math.isfinite(1.0 / factor)


def settings_of(inner: Any) -> Settings:
    """A copy of the settings in the parameter groups (all entries but their parameters)."""
    groups = ({key: value for key, value in group.items() if key != "params"} for group in inner.param_groups)
    return [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items()} for group in groups]


def same_settings(some: Settings, others: Settings) -> bool:
    """Are the settings of two lists of parameter groups equal?"""
    return len(some) == len(others) and all(
        a.keys() == b.keys() and all(_equal(value, b[key]) for key, value in a.items()) for a, b in zip(some, others)
    )


def _equal(a: Any, b: Any) -> bool:
    tensors = isinstance(a, torch.Tensor), isinstance(b, torch.Tensor)
    return all(tensors) and torch.equal(a, b) if any(tensors) else a is b or bool(a == b)


def twin(inner: Any, settings: Settings) -> Any:
    """An optimizer of the same class and on the same states as `inner`, with its own parameter groups, which hold no
    parameters yet.

    Its constructor is not called; it gets all attributes of `inner`, except a `step` that was set on the object:
    schedulers set one to count the user's calls.
    """
    made = object.__new__(type(inner))
    made.__dict__.update(inner.__dict__)
    made.__dict__.pop("step", None)
    made.param_groups = [{**group, "params": []} for group in settings]
    return made


def runs_of(masters: Sequence[Master]) -> list[tuple[int, int]]:
    """Ranges of neighbouring masters that lie in one flat group."""
    runs, start = [], 0
    for place in range(1, len(masters) + 1):
        if place == len(masters) or masters[place].group is not masters[start].group:
            runs, start = [*runs, (start, place)], place
    return runs if masters else []


def gradients_of(masters: Sequence[Master], read: ReadGradients) -> list[torch.Tensor]:
    """The gradients of these masters, in their shapes."""
    grads: list[torch.Tensor] = []
    for start, stop in runs_of(masters):
        parts = []
        for master in masters[start:stop]:  # a loop instead of one function call per group
            parts.append(Part(master.name, master.slice))
        grads.extend(read(masters[start].group, parts))
    return [g if g.is_sparse else g.view(m.shape) for m, g in zip(masters, grads, strict=True)]
