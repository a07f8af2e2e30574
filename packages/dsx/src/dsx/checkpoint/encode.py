"""Python state to JSON and back, without pickle.

Numbers, strings, booleans, None, lists, tuples and dicts (any such keys) go into the JSON; tensors are taken out and
stored as safetensors under their path. Anything else is refused by name: what cannot be read back without running
code has no place in a checkpoint.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .errors import CheckpointError

_TENSOR, _TUPLE, _ITEMS, _FLOAT = "__tensor__", "__tuple__", "__items__", "__float__"


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON-able form of `value`; its tensors are added to `tensors` under their path.

    Raises `CheckpointError` naming the path and type of what cannot be stored.
    """
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {_TENSOR: path}
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(value)}  # JSON has no inf and nan
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, tuple):
        return {_TUPLE: [encode(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [encode(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]
    if isinstance(value, dict):
        plain = all(isinstance(k, str) and not k.startswith("__") for k in value)
        if plain:
            return {k: encode(v, f"{path}.{k}", tensors) for k, v in value.items()}
        items = [
            [encode(k, f"{path}.key{i}", tensors), encode(v, f"{path}.{k}", tensors)]
            for i, (k, v) in enumerate(value.items())
        ]
        return {_ITEMS: items}
    if isinstance(value, (int, float, str)):  # subclasses: numpy floats, enums with a value, ...
        return encode(next(t for t in (int, float, str) if isinstance(value, t))(value), path, tensors)
    raise CheckpointError(
        f"{path}: got a {type(value).__module__}.{type(value).__qualname__}; expected numbers, strings, None, lists, "
        "tuples, dicts or tensors; convert it (for instance with its state_dict()) before saving"
    )


def decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(decode(v, tensors) for v in value[_TUPLE])
    if _ITEMS in value:
        return {decode(k, tensors): decode(v, tensors) for k, v in value[_ITEMS]}
    if _FLOAT in value:
        return float(value[_FLOAT])
    return {k: decode(v, tensors) for k, v in value.items()}
