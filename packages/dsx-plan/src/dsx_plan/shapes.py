"""Shapes of operators' results, found on the meta device, and calls of operators below torch's dispatch modes.

Left out: operators whose results' shapes depend on values; the meta device cannot say them.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["call_key", "map_tensors", "result_on_meta", "run_below"]


def run_below(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator as without a mode: subclasses have had their word before it was dispatched."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def map_tensors(value: Any, of: Any) -> Any:
    """A value with `of(tensor)` in the place of each tensor, also in lists and tuples."""
    if isinstance(value, torch.Tensor):
        return of(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, of) for item in value) if type(value) in (list, tuple) else value
    return value


def call_key(value: Any) -> Any:
    """Arguments as something that can be looked up; None where that is not possible."""
    try:
        found = _frozen(value)
        hash(found)
    except (TypeError, NotImplementedError, RuntimeError):
        return None
    return found


def _frozen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    return (type(value), value)


_META = torch.device("meta")


def result_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """(size, stride, dtype) of a result, a list of such for several, None where the meta device cannot say."""
    if func._overloadpacket.__name__ == "_grouped_mm" and args[0].dtype != torch.bfloat16:
        # The meta device takes bf16 only, the CPU every type (torch 2.13).
        narrow = tuple(torch.empty_strided(a.shape, a.stride(), dtype=torch.bfloat16, device=_META) for a in args[:2])
        found = result_on_meta(func, (*narrow, *args[2:]), {**kwargs, "out_dtype": None})
        return None if found is None else (*found[:2], kwargs.get("out_dtype") or args[0].dtype)
    to_meta: Any = lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=_META)  # noqa: E731
    moved = {key: map_tensors(value, to_meta) for key, value in kwargs.items()}
    if "device" in moved or not _has_tensor(args, kwargs):
        moved["device"] = _META
        moved.pop("pin_memory", None)
    if func._overloadpacket.__name__ == "index" and _has_mask(args):
        return None
    try:
        with torch.no_grad():
            result = run_below(func, map_tensors(args, to_meta), moved)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return None
    if isinstance(result, (list, tuple)):
        return [_spec(item) for item in result]
    return _spec(result)


def _spec(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), tuple(value.stride()), value.dtype)
    return value


def _has_tensor(args: Any, kwargs: Any) -> bool:
    return any(
        isinstance(item, torch.Tensor)
        for value in (*args, *kwargs.values())
        for item in (value if isinstance(value, (list, tuple)) else (value,))
    )


def _has_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 else ()
    return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
