"""Calls of the user's optimizer for some of its masters, with unscaling and clipping as one factor.

Where the optimizer's kernel takes the factor, gradients stay as they are. An optimizer that offers `step_flat` is
called for one master after the other. Any other optimizer is given the gradients of these masters, and its groups hold
only these masters during the call.

`twin` makes a second optimizer for another thread: of the same class, on the same states, with a copy of the settings
of that moment. The other thread does not touch the user's object, which schedulers and scripts read and change at the
same time.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .masters import Master
from .param_groups import StepGroups
from .sparse import takes_rows

__all__ = ["InnerStep", "Settings", "has_reciprocal", "same_settings", "settings_of", "twin"]

Settings = list[dict[str, Any]]
"""What an optimizer's parameter groups say, without their parameters."""


class InnerStep:
    """Steps masters of one optimizer.

    Args:
        inner: the optimizer.
        groups: exchanges the tensors in its parameter groups; None for a twin, whose groups are simply overwritten.
        numbers: the number of each master's parameter group, by the `id` of its tensor.
        copies: where the optimizer is to write low-precision copies, by master tensor.
        device: the device of the masters.
    """

    def __init__(
        self,
        inner: Any,
        groups: StepGroups | None,
        numbers: Mapping[int, int],
        copies: Mapping[torch.Tensor, torch.Tensor],
        device: torch.device,
    ) -> None:
        self.inner = inner
        self._groups, self._numbers, self._device = groups, numbers, device
        parameters = inspect.signature(inner.step).parameters
        self._takes_scale = "grad_scale" in parameters
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
            found = [grad for grad in grads if grad is not None]
            torch._foreach_mul_(found, factor)  # pyright: ignore[reportPrivateImportUsage]
        for master, grad in zip(masters, grads):
            if grad is None:
                continue
            number, tensor = self._numbers[id(master.tensor)], master.tensor
            state = self.inner.state[tensor]
            if not state:
                state.update(self.inner.new_flat_state(tensor, group=number))
            copy = self.copies.get(tensor)
            self.inner.step_flat(tensor, grad, state, group=number, grad_scale=scale, copy_out=copy)

    def _call(self, factor: float | torch.Tensor, grads: list[torch.Tensor], masters: Sequence[Master]) -> None:
        inner, keywords = self.inner, {}
        if self.copies:
            keywords["copy_out"] = {m.tensor: self.copies[m.tensor] for m in masters if m.tensor in self.copies}
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
                torch._foreach_mul_(values, factor)  # pyright: ignore[reportPrivateImportUsage]
            inner.step(**keywords)

    def _torch_scales(self) -> bool:
        """Do the kernels of torch's own fused optimizers take the factor (as they do for `torch.amp.GradScaler`)?"""
        return (
            type(self.inner).__module__.startswith("torch.optim")
            and getattr(self.inner, "_step_supports_amp_scaling", False)
            and all(group.get("fused") for group in self.inner.param_groups)
        )


def has_reciprocal(factor: float) -> bool:
    """Does `1 / factor` exist, so that gradients can be divided by it? Clipping an infinite norm gives a factor of 0,
    and a norm of NaN gives NaN.
    """
    return factor != 0.0 and math.isfinite(factor) and math.isfinite(1.0 / factor)


def settings_of(inner: Any) -> Settings:
    """A copy of the settings in the parameter groups (all entries but their parameters)."""
    return [{key: _copied(value) for key, value in group.items() if key != "params"} for group in inner.param_groups]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def same_settings(some: Settings, others: Settings) -> bool:
    """Are the settings of two lists of parameter groups equal?"""
    return len(some) == len(others) and all(
        a.keys() == b.keys() and all(_equal(value, b[key]) for key, value in a.items()) for a, b in zip(some, others)
    )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    return a is b or bool(a == b)


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
