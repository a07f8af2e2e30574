"""Reads files of `torch.save` without running code in them.

A pickle is a program; `find_class` decides what it can do. Here a fixed list of names gives real classes (tensors,
storages, containers, dtypes). Every other name gives `Opaque`: an object that keeps its arguments and does nothing. So
an optimizer state with objects of a program that is not installed can be read, and a file that wants to call
`os.system` only makes an `Opaque`.

What is on the list cannot be made larger than the file either: `limits.py` looks at zip files and pickles before they
are read, and storages and tensors are compared with what is there.

`read_file` maps a zip file into memory: a tensor's bytes are read when they are used.
"""

from __future__ import annotations

import collections
import importlib
import io
import mmap
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from ..errors import CheckpointCorruptError, CheckpointError, shown, words_of
from ..files import opened
from .limits import Bytes, check_expansion, check_pickle, check_view, records_of

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


# What a pickle is given are tuples: an instruction of pickles sets attributes of whatever it is given, where it has any
# or a method `__setstate__` (which frozen dataclasses with slots have).


class _StorageKind(NamedTuple):
    """In the place of a class of storages, of which torch asks the dtype. It cannot be called: it would make room."""

    dtype: torch.dtype


class _Function(NamedTuple):
    """A function of this file."""

    call: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128, "UntypedStorage": torch.uint8,
}  # fmt: skip
_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "complex128", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64",
)  # fmt: skip


def _allowed() -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("collections", "defaultdict"): _Function(_plain_dict),
        ("builtins", "set"): set,
        ("builtins", "frozenset"): frozenset,
        ("builtins", "complex"): complex,
        ("builtins", "bytearray"): _Function(_bytearray),
        ("builtins", "slice"): slice,
        ("torch", "Size"): torch.Size,
        ("torch", "device"): torch.device,
        ("torch._utils", "_rebuild_tensor"): _Function(_rebuild_tensor),
        ("torch._utils", "_rebuild_tensor_v2"): _Function(_rebuild_tensor),
        ("torch._utils", "_rebuild_tensor_v3"): _Function(_rebuild_tensor_of_dtype),
        ("torch._utils", "_rebuild_parameter"): _Function(_rebuild_parameter),
        ("torch._utils", "_rebuild_parameter_with_state"): _Function(_rebuild_parameter),
        ("torch._tensor", "_rebuild_from_type_v2"): _Function(_rebuild_from_type),
        ("torch.storage", "UntypedStorage"): _StorageKind(torch.uint8),
    }
    found |= {("torch", name): _StorageKind(dtype) for name, dtype in _STORAGES.items()}
    return found | {("torch", name): getattr(torch, name) for name in _DTYPES}


def _plain_dict(*_: Any) -> dict[Any, Any]:
    return {}


def _bytearray(*given: Any) -> bytearray:
    """Of bytes, or of text and its encoding; a number would be a size."""
    if not given or isinstance(given[0], bytes) or (isinstance(given[0], str) and len(given) == 2):
        return bytearray(*given)
    raise ValueError(f"a bytearray of {type(given[0]).__name__}")


def _rebuild_tensor(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any = None, hooks: Any = None, metadata: Any = None
) -> torch.Tensor:
    """A tensor in its storage, without what it was marked with (whether it needs a gradient, hooks)."""
    return _view(storage, storage.dtype, offset, size, stride, metadata)


def _rebuild_tensor_of_dtype(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: torch.dtype, metadata: Any = None
) -> torch.Tensor:
    """The same of a storage that does not know its dtype."""
    return _view(storage, dtype, offset, size, stride, metadata)


def _view(storage: Any, dtype: torch.dtype, offset: Any, size: Any, stride: Any, metadata: Any) -> torch.Tensor:
    untyped = storage._untyped_storage
    check_view(untyped.nbytes(), dtype.itemsize, offset, size, stride)
    made: Any = torch.empty((0,), dtype=dtype, device="cpu")
    made.set_(untyped, offset, tuple(size), tuple(stride))
    if metadata:  # conjugated, or negated
        utils: Any = importlib.import_module("torch._utils")
        utils.set_tensor_metadata(made, metadata)
    made.__setstate__ = _no_state
    _made.get().append(made)
    return made


_made: ContextVar[list[torch.Tensor]] = ContextVar("tensors of the file that is being read")


def _no_state(state: Any) -> None:
    """In the place of `Tensor.__setstate__`, which would give the tensor another size than its storage has."""
    raise ValueError("a tensor is to be changed after it was made")


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
    """The `pickle_module` for `torch.load`, for one file.

    Args:
        data: the file.
        records: bytes of each record of a zip file; None: it is not a zip file, and pickles and storages lie in it one
            after the other.
    """

    __name__ = "dsx_checkpoint.foreign.unpickling"

    def __init__(self, data: Bytes, records: Mapping[str, int] | None) -> None:
        self.Unpickler = type("Unpickler", (_Limited,), {"_whole": data, "_records": records})

    def load(self, file: Any, **options: Any) -> Any:
        """As `pickle.load`."""
        return self.Unpickler(file, **options).load()


class _Limited(_Unpickler):
    """Pickles and storages are looked at first."""

    _whole: Bytes = b""
    _records: Mapping[str, int] | None = None

    def __init__(self, file: Any, **options: Any) -> None:
        if self._records is None:
            check_pickle(self._whole, file.tell())
        else:
            check_pickle(file.getvalue())  # a record, which torch has read
        super().__init__(file, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, self._checked(value) if name == "persistent_load" else value)

    def _checked(self, load: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """torch's function that makes a storage, with a look at its size before."""
        made: dict[Any, int] = {}

        def checked(saved: Any) -> Any:
            kind, *given = saved
            if kind in ("module", b"module"):  # torch would compare the source code, and may write a file
                return given[0]
            of, key, location, numel = given[:4]
            if not all(isinstance(text, (str, bytes)) for text in (kind, key, location)):
                raise ValueError(f"a storage called {shown([kind, key, location])}")
            if type(numel) is not int or numel < 0:
                raise ValueError(f"a storage of {shown(numel)} elements")
            made[key] = numel * of.dtype.itemsize
            room = len(self._whole) if self._records is None else self._records.get(f"data/{key}", 0)
            if (sum(made.values()) if self._records is None else made[key]) > room:
                raise ValueError(f"a storage of {made[key]} bytes, of which {room} can be there")
            return load(saved)

        return checked


class _Stream(io.RawIOBase):
    """A file for torch's reader of what was written before 2020, without a descriptor: with one it would look for an
    archive of tar in it, and unpack that.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer from the place where the descriptor is."""
        return os.readv(self._fd, [buffer])

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to another place."""
        return os.lseek(self._fd, offset, whence)


def read_file(path: Path) -> Any:
    """Read a file of `torch.save`; tensors are on the host.

    Raises:
        CheckpointCorruptError: the file is not one of `torch.save`, or is damaged.
    """
    with _named(path), opened(path, os.O_RDONLY) as fd, _mapped(fd) as data:
        if data[:4] == _ZIP:
            return _load(str(path), data, records_of(str(path)), maps=True)
        with io.BufferedReader(_Stream(fd)) as file:
            return _load(file, data, None)


def read_bytes(data: bytes, where: str) -> Any:
    """The same for bytes. Raises `CheckpointCorruptError`; `where` names them in the message."""
    with _named(where):
        return _load(io.BytesIO(data), data, records_of(io.BytesIO(data)) if data[:4] == _ZIP else None)


def unpickle(path: Path, extra: Callable[[str, str], Any]) -> Any:
    """Read a plain pickle. `extra(module, name)` returns the class for a name that is not on the list, or None."""
    kind = type("Unpickler", (_Unpickler,), {"extra": staticmethod(extra)})
    with _named(path), opened(path, os.O_RDONLY) as fd, _mapped(fd) as data, os.fdopen(fd, "rb", closefd=False) as file:
        check_pickle(data)
        return kind(file).load()  # an object, whose parts are looked at one by one


_ZIP = b"PK\x03\x04"


def _load(file: str | IO[bytes], data: Bytes, records: Mapping[str, int] | None, *, maps: bool = False) -> Any:
    module: Any = _PickleModule(data, records)
    before = _made.set([])
    try:
        found = torch.load(file, map_location="cpu", mmap=maps, weights_only=False, pickle_module=module)
        for tensor in _made.get():
            vars(tensor).pop("__setstate__", None)
    finally:
        _made.reset(before)
    check_expansion(found)
    return found


@contextmanager
def _mapped(fd: int) -> Iterator[Bytes]:
    if not os.fstat(fd).st_size:
        yield b""
        return
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as data:
        yield data


@contextmanager
def _named(where: object) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointCorruptError(f"{where}: cannot be read as a file of torch.save ({words_of(error)})") from error
