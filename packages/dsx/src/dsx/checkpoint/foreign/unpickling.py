"""Reads files of `torch.save` without running code in them.

A pickle is a program; `find_class` decides what it can do. Here a fixed list of names gives real classes (tensors,
storages, containers, dtypes). Every other name gives `Opaque`: an object that keeps its arguments and does nothing. So
an optimizer state with objects of a program that is not installed can be read, and a file that wants to call
`os.system` only makes an `Opaque`.

`read_file` maps the file into memory: a tensor's bytes are read when they are used.
"""

from __future__ import annotations

import collections
import importlib
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointCorruptError

__all__ = ["Opaque", "read_bytes", "read_file", "unpickle"]


class Opaque:
    """Stands for an object whose class is not on the list."""

    made_from: Any = ((), {})
    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.made_from = (args, kwargs)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """Items of unknown lists are dropped."""

    def extend(self, items: Any) -> None:
        """Items of unknown lists are dropped."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Items of unknown dictionaries are dropped."""

    def value(self, name: str, default: Any = None) -> Any:
        """An attribute that the object was saved with."""
        state = self.state[1] if isinstance(self.state, tuple) and len(self.state) == 2 else self.state
        return state.get(name, default) if isinstance(state, dict) else default


_STORAGES = (
    "DoubleStorage", "FloatStorage", "HalfStorage", "BFloat16Storage", "LongStorage", "IntStorage", "ShortStorage",
    "CharStorage", "ByteStorage", "BoolStorage", "ComplexFloatStorage", "ComplexDoubleStorage",
)  # fmt: skip
_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "complex128", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64",
)  # fmt: skip


def _allowed() -> dict[tuple[str, str], Any]:
    utils: Any = importlib.import_module("torch._utils")
    found: dict[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("collections", "defaultdict"): _plain_dict,
        ("builtins", "set"): set,
        ("builtins", "frozenset"): frozenset,
        ("builtins", "complex"): complex,
        ("builtins", "bytearray"): bytearray,
        ("builtins", "slice"): slice,
        ("torch", "Size"): torch.Size,
        ("torch", "device"): torch.device,
        ("torch._utils", "_rebuild_tensor_v2"): utils._rebuild_tensor_v2,
        ("torch._utils", "_rebuild_tensor"): utils._rebuild_tensor,
        ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
        ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
        ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
        ("torch", "UntypedStorage"): torch.UntypedStorage,
    }
    found |= {("torch", name): getattr(torch, name) for name in (*_STORAGES, *_DTYPES)}
    return found


def _plain_dict(*_: Any) -> dict[Any, Any]:
    return {}


def _rebuild_parameter(data: torch.Tensor, *_: Any) -> torch.Tensor:
    return data


def _rebuild_from_type(make: Callable[..., Any], kind: object, arguments: tuple[Any, ...], *_: Any) -> Any:
    """A tensor with attributes, or of a subclass, becomes a plain tensor. `make` is from the list, like every class."""
    return make(*arguments)


class _Unpickler(pickle.Unpickler):
    """Makes objects of classes on the list, and `Opaque` for all others."""

    extra: Callable[[str, str], Any] = staticmethod(lambda module, name: None)

    def find_class(self, module: str, name: str, /) -> Any:
        return _ALLOWED.get((module, name)) or type(self).extra(module, name) or Opaque


_ALLOWED = _allowed()


class _PickleModule:
    """The `pickle_module` for `torch.load`."""

    Unpickler = _Unpickler
    __name__ = "dsx.checkpoint.foreign.unpickling"

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        return _Unpickler(file, **options).load()


def read_file(path: Path) -> Any:
    """Read a file of `torch.save`; tensors are on the host.

    Raises:
        CheckpointCorruptError: the file is not one of `torch.save`, or is damaged.
    """
    try:
        return torch.load(
            str(path), map_location="cpu", mmap=_is_zip(path), weights_only=False, pickle_module=_PickleModule
        )
    except Exception as error:
        raise CheckpointCorruptError(
            f"{path}: cannot be read as a file of torch.save ({type(error).__name__}: {error})"
        ) from error


def read_bytes(data: bytes, where: str) -> Any:
    """The same for bytes. Raises `CheckpointCorruptError`; `where` names them in the message."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False, pickle_module=_PickleModule)
    except Exception as error:
        raise CheckpointCorruptError(f"{where}: cannot be read ({type(error).__name__}: {error})") from error


def unpickle(path: Path, extra: Callable[[str, str], Any]) -> Any:
    """Read a plain pickle. `extra(module, name)` returns the class for a name that is not on the list, or None."""
    kind = type("Unpickler", (_Unpickler,), {"extra": staticmethod(extra)})
    try:
        with path.open("rb") as file:
            return kind(file).load()
    except Exception as error:
        raise CheckpointCorruptError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"
