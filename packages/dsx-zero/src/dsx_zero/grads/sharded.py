"""The value of `.grad` of a parameter when no rank has the whole gradient.

From stage 1 on a rank keeps a shard of the averaged gradients; and if the accumulation has another dtype than the
parameters, `.grad` cannot show them. Then `.grad` is a ``ShardedGradient``: a wrapper tensor with the logical shape,
dtype and device of the gradient, and without values. So code that uses gradients finds them, and none of its operations
is ignored:

1. facts and factories (``shape``, ``torch.zeros_like(g)``) work, as for a ``PartitionedParameter``;
2. norms of whole gradients (``torch.nn.utils.clip_grad_norm_``, ``g.norm()``) are computed over all ranks;
3. in-place writes change the gradient that the optimizer steps with: element-wise ones with a number (``g.mul_(0.5)``,
   ``clip_grad_value_``) on each rank's shard, all others on the whole gradient, of which all ranks keep rank 0's
   result;
4. ``p.grad = None`` and ``zero_grad()`` remove the wrapper, which its owner notices;
5. a gradient that autograd accumulates is passed to the owner;
6. everything else is computed with the values if a rank has them (stage 0, one rank), and else raises
   ``ShardedGradientError`` with the parameter's name and the way to the values.

2, 3 and 6 are collective: every rank calls them. The ``GradientSource`` knows where the gradient is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..errors import ZeroStateError
from ..params.conversions import CONVERSIONS, conversion_target
from ..params.tensor_kinds import FACTORIES, FACTS, is_write, stand_in
from ..torch_names import (
    DisableTorchFunctionSubclass,
    amp_foreach_non_finite_check_and_unscale_,
    current_graph_task_id,
    make_wrapper_subclass,
    tree_map_only,
)

__all__ = ["GradientSource", "ShardedGradient", "ShardedGradientError"]


class ShardedGradientError(ZeroStateError):
    """A gradient was used in a way that needs values which this rank does not have."""

    code = "DSX305"


class GradientSource(Protocol):
    """Gives access to a gradient."""

    @property
    def name(self) -> str:
        """The first name of its parameter."""
        ...

    def refusal(self, what: str) -> ShardedGradientError:
        """The error for a use that is not possible. Its text says what was tried (`what`), and what to do instead."""
        ...

    def norm(self, order: float, *, added_up: bool) -> torch.Tensor:
        """The norm of the whole gradient, a 0-D tensor. Collective.

        Args:
            order: order of the norm.
            added_up: the caller may add it to those of other parameters (`torch.nn.utils.clip_grad_norm_` calls
                `torch.linalg.vector_norm`).
        """
        ...

    def edit_shard(self, edit: Callable[[torch.Tensor], object]) -> None:
        """Apply an element-wise `edit` to this rank's part of the averaged gradient. Collective."""
        ...

    def edit_whole(self, edit: Callable[[torch.Tensor], object]) -> None:
        """Apply `edit` to the whole averaged gradient on every rank. All ranks keep rank 0's result. Collective."""
        ...

    def whole(self) -> torch.Tensor | None:
        """The averaged gradient's values if every rank has them, else None. Collective."""
        ...

    def unscale(self, others: Sequence[GradientSource], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        """Unscale this gradient and `others` as `torch.amp.GradScaler` does. `found_inf` is the same on all ranks.

        Collective.
        """
        ...

    def zero(self) -> None:
        """Set the gradient to zeros, also contributions that have not been reduced yet. Not collective."""
        ...


_BY_NUMBER = frozenset(
    {
        "mul_",
        "multiply_",
        "div_",
        "divide_",
        "true_divide_",
        "add_",
        "sub_",
        "subtract_",
        "pow_",
        "fill_",
        "neg_",
        "negative_",
    }
    | {
        "clamp_",
        "clip_",
        "clamp_min_",
        "clamp_max_",
        "nan_to_num_",
        "abs_",
        "absolute_",
        "sign_",
        "sgn_",
        "sqrt_",
        "square_",
    }
    | {
        "reciprocal_",
        "rsqrt_",
        "round_",
        "floor_",
        "ceil_",
        "trunc_",
        "tanh_",
        "sigmoid_",
        "relu_",
        "hardtanh_",
        "threshold_",
    }
    | {"__imul__", "__itruediv__", "__iadd__", "__isub__", "__ipow__"}
)
"""In-place operations that change each element separately, if their other arguments are numbers."""

_NORMS = frozenset({torch.linalg.vector_norm, torch.norm, torch.Tensor.norm})


class ShardedGradient(torch.Tensor):
    """A gradient of which this rank has a shard only, as a tensor with the logical shape and without values.

    `.grad` of a sharded parameter refers to it while the parameter has a gradient.
    """

    _source: GradientSource
    _arrived: torch.Tensor | None

    @staticmethod
    def __new__(cls, source: GradientSource, like: torch.Tensor) -> ShardedGradient:
        self = make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        self._source, self._arrived = source, None
        return self

    def __init__(self, source: GradientSource, like: torch.Tensor) -> None:
        """Everything is set in ``__new__``, as for all tensors."""

    @property
    def source(self) -> GradientSource:
        """The object that has access to the gradient."""
        return self._source

    def take_arrived(self) -> torch.Tensor | None:
        """Return the gradient that autograd has just added to this one, and forget it. None if there is none."""
        arrived, self._arrived = self._arrived, None
        return arrived

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """The name and the logical facts, without values."""
        return (
            f"ShardedGradient({self._source.name!r}, shape={tuple(self.shape)}, dtype={self.dtype},"
            f" device='{self.device}')"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Raises `ShardedGradientError`: the copy would have no values."""
        raise self._source.refusal("copied with deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises `ShardedGradientError`: a pickle would have no values."""
        raise self._source.refusal("pickled")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do one of the six things that the module's text lists."""
        kwargs = kwargs or {}
        if func in FACTS:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in FACTORIES:
            args, kwargs = tree_map_only(cls, stand_in, (args, kwargs))
            return func(*args, **kwargs)
        if func in _SAME:
            return args[0]
        if func in CONVERSIONS:
            return _convert(func, args, kwargs)
        if func == _SET_DATA:
            return None if args[1] is args[0] else _edit(args[0], torch.Tensor.copy_, "copy_", args[1:], {})
        what = getattr(func, "__name__", str(func))
        if func in _NORMS and (found := _norm_order(args, kwargs)) is not None:
            return args[0]._source.norm(found, added_up=func is torch.linalg.vector_norm)
        if func is amp_foreach_non_finite_check_and_unscale_:
            sources = [_source_of(gradient, what) for gradient in args[0]]
            return sources[0].unscale(sources[1:], *args[1:])
        if what == "_foreach_norm":
            order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
            return tuple(torch.linalg.vector_norm(gradient, order) for gradient in args[0])
        if what.startswith("_foreach_") and is_write(func):
            return _edit_each(what.removeprefix("_foreach_"), args, kwargs)
        if is_write(func) and args and isinstance(args[0], cls):
            return _edit(args[0], func, what, args[1:], kwargs)
        args, kwargs = tree_map_only(
            cls, lambda gradient: _values(gradient, f"used by {what}()"), (tuple(args), kwargs)
        )
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take what autograd accumulates. Other operations that bypass ``__torch_function__`` are refused by name."""
        gradient = _first(args, kwargs or {})
        if func is torch.ops.aten.detach.default:
            return gradient
        if current_graph_task_id() != -1 and args[0] is gradient and not isinstance(args[1], ShardedGradient):
            if func is torch.ops.aten.add_.Tensor:
                gradient._arrived = args[1]
                return gradient
            # with `create_graph=True` autograd replaces this gradient by what is returned here
            if func is torch.ops.aten.add.Tensor:
                with DisableTorchFunctionSubclass():
                    successor = ShardedGradient(gradient._source, gradient)
                successor._arrived = args[1]
                return successor
        raise gradient._source.refusal(f"used by {func}")


def _values(gradient: ShardedGradient, what: str) -> torch.Tensor:
    whole = gradient._source.whole()
    if whole is None:
        raise gradient._source.refusal(what)
    return whole


def _source_of(gradient: torch.Tensor, what: str) -> GradientSource:
    if not isinstance(gradient, ShardedGradient):
        raise ShardedGradientError(f"{what}(): got sharded gradients and others in one list; call it for each kind")
    return gradient._source


def _first(args: Any, kwargs: Any) -> ShardedGradient:
    found: list[ShardedGradient] = []
    tree_map_only(ShardedGradient, found.append, (args, kwargs))
    return found[0]


_SAME: frozenset[Callable[..., Any]] = frozenset(
    {torch.Tensor.detach, torch.detach, torch.Tensor.detach_, torch.Tensor.requires_grad_, torch.Tensor.contiguous}
    | {torch.Tensor.data.__get__}  # type: ignore[attr-defined]
)
"""Functions that return the gradient itself: it never has a graph."""
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _convert(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Convert a gradient, as `model.to(...)` does. If nothing changes, the result is the gradient itself."""
    gradient, rest = args[0], args[1:]
    if not isinstance(gradient, ShardedGradient):  # `x.to(g)` asks for g's dtype and device only
        rest, kwargs = tree_map_only(ShardedGradient, stand_in, (rest, kwargs))
        return func(gradient, *rest, **kwargs)
    rest, kwargs = tree_map_only(ShardedGradient, stand_in, (rest, kwargs))
    if func is torch.Tensor.type and not rest and "dtype" not in kwargs:
        return stand_in(gradient).type()  # type: ignore[return-value]  # a question, not a conversion
    if conversion_target(func, rest, kwargs, dtype=gradient.dtype, device=gradient.device) == (
        gradient.dtype,
        gradient.device,
    ):
        return gradient
    raise gradient._source.refusal(f"converted with {func.__name__}()")


def _norm_order(args: Sequence[Any], kwargs: dict[str, Any]) -> float | None:
    """The order, if the call is a norm over all elements of one gradient; None for any other call."""
    options = dict(kwargs)
    order = args[1] if len(args) > 1 else options.pop("ord", options.pop("p", 2))
    if (
        len(args) > 2
        or not isinstance(args[0], ShardedGradient)
        or any(v not in (None, False) for v in options.values())
    ):
        return None
    if order in (None, "fro"):
        return 2.0
    return float(order) if isinstance(order, (int, float)) else None


def _is_number(value: Any) -> bool:
    """Whether `value` is a Python number, a 0-D tensor, or an option that is not a tensor."""
    if isinstance(value, torch.Tensor):
        return not isinstance(value, ShardedGradient) and value.dim() == 0
    return not isinstance(value, (list, tuple))


def _edit(
    gradient: ShardedGradient, func: Any, what: str, rest: Sequence[Any], kwargs: dict[str, Any]
) -> ShardedGradient:
    """Apply an in-place function to a gradient."""
    rest, kwargs = tree_map_only(
        ShardedGradient, lambda other: _values(other, f"used by {what}()"), (tuple(rest), kwargs)
    )
    source = gradient._source
    with torch.no_grad():
        if what == "zero_":
            source.zero()
        elif what in _BY_NUMBER and all(map(_is_number, (*rest, *kwargs.values()))):
            source.edit_shard(lambda part: func(part, *rest, **kwargs))
        else:
            source.edit_whole(lambda whole: func(whole, *rest, **kwargs))
    return gradient


def _edit_each(method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Apply `torch._foreach_*_` to gradients: the same in-place operation on each, with its item of every list."""
    func = getattr(torch.Tensor, method)
    for place, gradient in enumerate(args[0]):
        rest = [value[place] if isinstance(value, (list, tuple)) else value for value in args[1:]]
        func(gradient, *rest, **kwargs)
