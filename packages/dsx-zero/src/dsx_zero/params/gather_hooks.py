"""Trained weights that say themselves in which form they are sent: FSDP2's `fsdp_pre_all_gather` and
`fsdp_post_all_gather` (torchao's float8 weights).

Such a weight is a tensor subclass around one ordinary tensor, which is trained. Its pre-hook makes the tensors to send
of this rank's rows, and its post-hook makes the weight that forwards see of what all ranks sent. `GatherHooks` knows
how to put the subclass around any rows again, so that dsx-zero can keep, step and save the ordinary tensor alone.

Left out: subclasses that train their codes (several inner tensors), and those without `__tensor_flatten__`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import ZeroModelError
from ..plan.units import GATHER_HOOKS
from .dtensors import is_dtensor
from .inner_tensors import Build, is_composed

__all__ = ["GatherHooks", "gather_hooks_of", "has_gather_hooks", "shown_for", "take_off"]


def has_gather_hooks(tensor: Any) -> bool:
    """Whether a weight has FSDP2's hooks. Frozen weights in codes are none: their codes are gathered as they are."""
    if is_dtensor(tensor) or not hasattr(tensor, "fsdp_pre_all_gather"):
        return False
    return tensor.requires_grad or _single(tensor) is not None or not is_composed(tensor)


def gather_hooks_of(parameter: Any) -> GatherHooks | None:
    """The hooks of a parameter whose subclass was taken off; None for any other."""
    return vars(parameter).get(GATHER_HOOKS)


@dataclass(eq=False)
class GatherHooks:
    """A weight's subclass without its values.

    Attributes:
        kind: the name of its class.
        inner: the name of the tensor in it.
        build, context: make it of that tensor.
        dtype: of the values.
        size: of the whole weight.
        attributes: are set on the tensor before its hooks run, such as a scale that is known already.
    """

    kind: str
    inner: str
    build: Build
    context: Any
    dtype: torch.dtype
    size: torch.Size
    attributes: dict[str, Any] = field(default_factory=dict)
    module: weakref.ref[nn.Module] | None = None

    def around(self, values: torch.Tensor) -> Any:
        """The subclass around these values. Nothing is copied."""
        made: Any = self.build({self.inner: values}, self.context, values.shape, values.stride())
        for name, value in self.attributes.items():
            setattr(made, name, value)
        return made

    def send(self, rows: Any, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        """The tensors that the pre-hook makes of this rank's rows (a tensor of `around`) to send, and what stays here.

        Args:
            mesh: of one dimension, over the ranks that share the weight; None where there is no process group.
        """
        hook = rows.fsdp_pre_all_gather
        if len(inspect.signature(hook).parameters) == 1:
            sent, kept = hook(mesh)
        else:
            from torch.distributed.fsdp import MixedPrecisionPolicy  # lazy import: only such hooks need it

            module = None if self.module is None else self.module()
            stride = torch.empty(self.size, device="meta").stride()
            sent, kept = hook(mesh, self.size, stride, module, MixedPrecisionPolicy(param_dtype=self.dtype))
        return tuple(tensor.detach() for tensor in sent), kept

    def __deepcopy__(self, memo: dict[int, Any]) -> GatherHooks:
        """A copied module's weight has values of its own, and so attributes of its own."""
        memo[id(self)] = made = GatherHooks(self.kind, self.inner, self.build, self.context, self.dtype, self.size)
        return made

    def __reduce__(self) -> Any:
        return GatherHooks, (self.kind, self.inner, self.build, self.context, self.dtype, self.size)


def take_off(weight: Any, name: str) -> tuple[GatherHooks, torch.Tensor]:
    """The hooks of a weight, and the ordinary tensor in it.

    Raises:
        ZeroModelError: there is no single tensor in it that could be trained.
    """
    kind = type(weight).__name__
    if not hasattr(weight, "fsdp_post_all_gather"):
        raise ZeroModelError(f"{name}: is a {kind} with fsdp_pre_all_gather and without fsdp_post_all_gather; add it")
    if not weight.dim():
        raise ZeroModelError(f"{name}: is a {kind} without dimensions, whose hooks have no rows; make it of shape [1]")
    values = _single(weight)
    if values is None:
        raise ZeroModelError(
            f"{name}: is a {kind} with fsdp_pre_all_gather; expected a subclass whose __tensor_flatten__ names one"
            f" tensor, of the shape and dtype of the weight ({tuple(weight.shape)}, {weight.dtype}), which is stepped."
            " Freeze it (requires_grad_(False)) and train adapters, or convert the model without that form"
        )
    (inner,), context = weight.__tensor_flatten__()
    build = type(weight).__tensor_unflatten__
    return GatherHooks(kind, inner, build, context, weight.dtype, weight.shape), values.detach()


def _single(weight: Any) -> torch.Tensor | None:
    """The one plain tensor in a weight that has the weight's shape and dtype; None if there is none."""
    if not is_composed(weight) or not hasattr(weight, "__tensor_flatten__"):
        return None
    names, _ = weight.__tensor_flatten__()
    found = [getattr(weight, name) for name in names]
    if len(found) != 1 or type(found[0]) not in (torch.Tensor, nn.Parameter):
        return None
    (values,) = found
    return values if values.shape == weight.shape and values.dtype == weight.dtype else None


class _Shown(torch.autograd.Function):
    """A tensor in the place of a parameter: its gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, plain: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.plain, ctx.version = weakref.ref(plain), plain._version
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        plain = ctx.plain()
        if plain is not None and plain._version != ctx.version:
            # What the module saved may be a copy, which tells autograd nothing of the parameter.
            raise RuntimeError(
                "a weight that is needed for gradient computation has been modified by an inplace operation (an"
                f" optimizer step): it is at version {plain._version}, expected version {ctx.version}; run the backward"
                " before the step, or the forward again"
            )
        return gradient, None


def shown_for(plain: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of `make`, with the gradient going to `plain`, also where gradients are off now and used later."""
    with torch.inference_mode(False), torch.enable_grad():
        return _Shown.apply(plain, make)
