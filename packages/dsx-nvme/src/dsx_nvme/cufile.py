"""NVIDIA's cuFile (GPUDirect Storage), found and loaded at run time. Only the functions that are needed are declared.

Without nvidia-fs, cuFile itself copies through host memory. The declarations follow NVIDIA's cuFile API reference; its
headers are not used. The calls use the calling thread's current CUDA device; `gds.py` sets it.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import EndOfFileError, NvmeError, TransferError

LIBRARY_VARIABLE = "DSX_CUFILE_LIBRARY"
OPAQUE_FD = 1


class _Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("cuda", ctypes.c_int)]


class _Handle(ctypes.Union):
    _fields_ = [("fd", ctypes.c_int), ("pointer", ctypes.c_void_p)]


class _Descriptor(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handle", _Handle), ("operations", ctypes.c_void_p)]


class CuFile:
    """An open cuFile driver. Make it with `load()`."""

    def __init__(self, library: ctypes.CDLL, where: str) -> None:
        self.where = where
        move = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_longlong, ctypes.c_longlong]
        self._open = _declare(library, "cuFileDriverOpen", _Error, [])
        self._register = _declare(library, "cuFileHandleRegister", _Error, [ctypes.c_void_p, ctypes.c_void_p])
        self._deregister = _declare(library, "cuFileHandleDeregister", None, [ctypes.c_void_p])
        self._pin = _declare(library, "cuFileBufRegister", _Error, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int])
        self._unpin = _declare(library, "cuFileBufDeregister", _Error, [ctypes.c_void_p])
        self._move = {
            "read": _declare(library, "cuFileRead", ctypes.c_ssize_t, move),
            "write": _declare(library, "cuFileWrite", ctypes.c_ssize_t, move),
        }
        self._check(self._open(), "cuFileDriverOpen")

    def register_file(self, fd: int) -> int:
        """Register an open file; returns its handle, which `deregister_file` releases."""
        descriptor = _Descriptor(OPAQUE_FD, _Handle(fd=fd), None)
        handle = ctypes.c_void_p()
        self._check(self._register(ctypes.byref(handle), ctypes.byref(descriptor)), "cuFileHandleRegister")
        return handle.value or 0

    def deregister_file(self, handle: int) -> None:
        """Release a handle."""
        self._deregister(handle)

    def pin(self, address: int, nbytes: int) -> None:
        """Register device memory, so that transfers reach it without a copy."""
        self._check(self._pin(address, nbytes, 0), "cuFileBufRegister")

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        self._check(self._unpin(address), "cuFileBufDeregister")

    def transfer(
        self, op: str, handle: int, base: int, start: int, nbytes: int, offset: int, path: str,
        end_before: Callable[[int], int],
    ) -> int:  # fmt: skip
        """Move `nbytes` between device memory at base + start and the file at `offset`.

        Returns nbytes, or raises TransferError. `end_before` gives the file's end for the error at an offset.
        """
        done = 0
        while done < nbytes:
            count = self._move[op](handle, base, nbytes - done, offset + done, start + done)
            about = {"op": op, "offset": offset + done, "nbytes": nbytes}
            if count == 0 and op == "read":
                where = offset + done
                raise EndOfFileError.at(end_before(where), path, offset=offset, where=where, nbytes=nbytes)
            if count == 0:
                raise TransferError.of(errno.ENOSPC, path, **about)
            if count == -1:
                number = ctypes.get_errno() or errno.EIO
                if number == errno.EINTR:
                    continue
                raise TransferError.of(number, path, **about)
            if count < 0:
                raise TransferError(
                    errno.EIO, f"cuFile answered code {-count} at file offset {offset + done}", path, **about
                )
            done += count
        return done

    @staticmethod
    def _check(error: _Error, call: str) -> None:
        if error.code != 0:
            raise NvmeError(
                f"{call} answered code {error.code} (CUDA {error.cuda}); see cufile.log and NVIDIA's GDS guide"
            )


def _declare(library: ctypes.CDLL, name: str, result: type | None, arguments: list) -> Any:
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function


def candidates() -> Iterator[str]:
    """Yield the paths and names under which the library may be found, best first."""
    if os.environ.get(LIBRARY_VARIABLE):
        yield os.environ[LIBRARY_VARIABLE]
        return
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        yield from sorted(str(p) for p in Path(root).glob("**/lib/libcufile.so*"))
    yield from ("libcufile.so.0", "libcufile.so")


def load() -> tuple[CuFile | None, str]:
    """cuFile with its driver open, or None and the reason."""
    reasons = []
    for where in candidates():
        try:
            return CuFile(ctypes.CDLL(where, use_errno=True), where), ""
        except (OSError, AttributeError, NvmeError) as error:
            reasons.append(f"{where}: {error}")
    return None, "; ".join(reasons)
