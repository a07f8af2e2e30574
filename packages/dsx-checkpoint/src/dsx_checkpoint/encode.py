"""Python state to JSON and back, without pickle.

Numbers, strings, booleans, None, lists, tuples, dicts (any such keys), `argparse.Namespace`, `torch.dtype`,
`torch.device`, paths and numpy scalars are written into the JSON; tensors and numpy arrays are stored as safetensors
under their path. Any other value is refused by name, because it could not be read back without running code.

A value that JSON cannot express is a dictionary with one marker as its key, such as `{"__tuple__": [...]}`.
Dictionaries whose own keys begin with two underscores are written as lists of items, so that no value can be mistaken
for a marker.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .errors import CheckpointArgumentError, CheckpointCorruptError, CheckpointError, shown
from .format import dtype_name

_TENSOR, _TUPLE, _ITEMS, _FLOAT, _ARRAY = "__tensor__", "__tuple__", "__items__", "__float__", "__ndarray__"
_NUMPY, _NAMESPACE, _DTYPE, _DEVICE, _PATH = "__numpy__", "__namespace__", "__dtype__", "__device__", "__path__"
_LONGEST_KEY = 60  # characters of a key in a tensor's path


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON-able form of `value`; its tensors and arrays are added to `tensors` under their path.

    Raises:
        CheckpointArgumentError: names the path and type of what cannot be stored.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}  # JSON has no inf and nan
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return _encode_dict(value, path, tensors)
    if isinstance(value, torch.Tensor):
        return {_TENSOR: _put(_checked(value.detach(), path), path, tensors)}
    if isinstance(value, argparse.Namespace):
        return {_NAMESPACE: _encode_dict(vars(value), path, tensors)}
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {_DEVICE: str(value)}
    if isinstance(value, pathlib.PurePath):
        return {_PATH: str(value)}
    numpy = sys.modules.get("numpy")  # a numpy value can only exist if numpy was imported
    if numpy is not None and isinstance(value, numpy.generic):
        return _encode_numpy_scalar(value, path)
    if numpy is not None and isinstance(value, numpy.ndarray):
        return {_ARRAY: _put(_array_as_tensor(value, path), path, tensors)}
    for plain in (int, float, str):  # their subclasses: enumerations with a value, ...
        if isinstance(value, plain):
            return encode(plain(value), path, tensors)
    raise _refused(value, path)


def _refused(value: object, path: str, why: str = "") -> CheckpointArgumentError:
    return CheckpointArgumentError(
        f"{path}: got a {type(value).__module__}.{type(value).__qualname__}{why}; expected numbers, strings, None, "
        "lists, tuples, dicts, tensors, numpy values or a Namespace; convert it (for instance with its state_dict()) "
        "before saving"
    )


def _encode_dict(value: dict[Any, Any], path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if all(type(key) is str and not key.startswith("__") for key in value):
        return {key: encode(item, f"{path}.{key[:_LONGEST_KEY]}", tensors) for key, item in value.items()}
    items = [
        [encode(key, f"{path}.key{i}", tensors), encode(item, f"{path}.{i}", tensors)]
        for i, (key, item) in enumerate(value.items())
    ]
    return {_ITEMS: items}


def _put(tensor: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> str:
    name, number = path, 1
    while name in tensors:  # keys that contain dots, or were cut, can give two values the same path
        number += 1
        name = f"{path}#{number}"
    tensors[name] = tensor
    return name


def _checked(tensor: torch.Tensor, path: str) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise _refused(tensor, path, " that is sparse, quantized or without data")
    try:
        dtype_name(tensor.dtype)
    except Exception as error:
        raise CheckpointArgumentError(f"{path}: {error}") from error
    return tensor


def _encode_numpy_scalar(value: Any, path: str) -> Any:
    plain = value.item()
    if type(plain) not in (bool, int, float, str):
        raise _refused(value, path)
    return {_NUMPY: [value.dtype.name if value.dtype.kind != "U" else "str", encode(plain, path, {})]}


def _array_as_tensor(array: Any, path: str) -> torch.Tensor:
    try:
        return _checked(torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C", copy=True)), path)
    except TypeError as error:
        raise _refused(array, path, f" of dtype {array.dtype}") from error


def decode(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The inverse of `encode`.

    Args:
        tensor: returns the tensor of a name.

    Raises:
        CheckpointCorruptError: `value` is not a result of `encode`.
    """
    try:
        return _decode(value, tensor)
    except RecursionError as error:
        raise CheckpointCorruptError("the state is nested deeper than any that was saved") from error


def _decode(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    marker = next((key for key in value if key.startswith("__")), None)
    if marker is None:
        return {key: _decode(item, tensor) for key, item in value.items()}
    if len(value) != 1 or marker not in _DECODERS:
        raise CheckpointCorruptError(f"the state holds {shown(marker)}, which means nothing to this version of dsx")
    try:
        return _DECODERS[marker](value[marker], tensor)
    except (ArithmeticError, TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        if isinstance(error, (CheckpointError, RecursionError)):
            raise
        raise CheckpointCorruptError(f"the state holds a damaged {marker}: {error}") from error


_Tensors = Callable[[str], torch.Tensor]


def _decode_tuple(value: Any, tensor: _Tensors) -> tuple[Any, ...]:
    return tuple(_decode(item, tensor) for item in _expect(value, list))


def _decode_items(value: Any, tensor: _Tensors) -> dict[Any, Any]:
    return {_decode(key, tensor): _decode(item, tensor) for key, item in _expect(value, list)}


def _decode_numpy(value: Any, tensor: _Tensors) -> Any:
    import numpy  # lazy import: only checkpoints with numpy values need it

    name, plain = _expect(value, list)
    dtype, number = numpy.dtype(_expect(name, str)), _decode(plain, tensor)
    if dtype.kind in "SO" or dtype.type is numpy.void:  # bytes_(n) and void(n) would be n bytes
        raise TypeError(f"got numpy's {name}, expected a number or text")
    return dtype.type(number)


def _decode_namespace(value: Any, tensor: _Tensors) -> argparse.Namespace:
    namespace = argparse.Namespace()
    vars(namespace).update(_expect(_decode(value, tensor), dict))
    return namespace


def _decode_dtype(value: Any, tensor: _Tensors) -> torch.dtype:
    return _expect(getattr(torch, _expect(value, str)), torch.dtype)


def _expect(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"got {type(value).__name__}, expected {kind.__name__}")
    return value


_DECODERS: Mapping[str, Callable[[Any, _Tensors], Any]] = {
    _TENSOR: lambda value, tensor: tensor(_expect(value, str)),
    _ARRAY: lambda value, tensor: tensor(_expect(value, str)).numpy(),
    _TUPLE: _decode_tuple,
    _ITEMS: _decode_items,
    _FLOAT: lambda value, tensor: float(_expect(value, str)),
    _NUMPY: _decode_numpy,
    _NAMESPACE: _decode_namespace,
    _DTYPE: _decode_dtype,
    _DEVICE: lambda value, tensor: torch.device(_expect(value, str)),
    _PATH: lambda value, tensor: pathlib.Path(_expect(value, str)),
}
