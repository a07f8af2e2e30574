"""Loads the native library before torch, so that torch finds the device's hooks at its first look."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

from .building import DEVICE, build, refuse_real_gpu, torch_folder
from .errors import ImportedTooLate
from .options import FIXED, Options, mode_number

lib: Any = None
"""The native library, once `load` has loaded it; its functions run without Python's lock."""
folder: Path | None = None
"""The path of the library."""
_with_lock: Any = None  # the same library for functions that make Python objects


def load(options: Options) -> None:
    """Builds if it must be, loads, and sets the options. Raises `ImportedTooLate` if torch is imported already."""
    global lib, folder, _with_lock  # noqa: PLW0603  one device per process
    if "torch" in sys.modules:
        raise ImportedTooLate(
            "torch is imported already, and looks for its CUDA device only once; install the simulated device before"
            " `import torch`: put `import dsx_simcuda; dsx_simcuda.install()` first, or start the program with"
            " `python -m dsx_simcuda train.py`"
        )
    refuse_real_gpu()
    folder = build()
    root = torch_folder()
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(os.path.join(root, "lib", name), ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(folder / DEVICE), ctypes.RTLD_GLOBAL)
    _with_lock = ctypes.PyDLL(str(folder / DEVICE))
    _declare(library)
    lib = library
    for name in sorted(vars(options), key=lambda name: name not in FIXED):
        set_option(name, getattr(options, name))


def set_option(name: str, value: Any) -> None:
    """Sets one switch of the native library."""
    number = mode_number(value) if name == "mode" else value
    if lib.sim_option(name.encode(), float(number)) != 0:
        raise ValueError(f"unknown option {name!r}")


def read(function: str, *arguments: Any) -> Any:
    """The value of a function that returns JSON."""
    return json.loads(getattr(lib, function)(*arguments).decode("utf-8", "replace"))


def stack(number: int) -> list[tuple[str, int, str]]:
    """A Python stack that the library has taken: (file, line, function), the innermost first."""
    return _with_lock.sim_stack(number) if number else []


def _declare(library: Any) -> None:
    """Types of the C functions whose arguments or results are no plain int."""
    text, size, pointer, number = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_double
    for name in ("report_count", "host_sync_count", "launches", "intervals"):
        getattr(library, f"sim_{name}").restype = size
    for name in (
        "reports",
        "host_syncs",
        "flights",
        "streams",
        "history",
        "synchronize",
        "stats",
        "elapsed",
        "unraised_error",
    ):
        getattr(library, f"sim_{name}").restype = text
    library.sim_reports.argtypes = [size]
    library.sim_option.argtypes = [text, number]
    library.sim_report.argtypes = [text, text]
    library.sim_name_stream.argtypes = [ctypes.c_int, ctypes.c_int, text]
    library.sim_set_limit.argtypes = [ctypes.c_int, size]
    library.sim_pin.argtypes = [pointer, size]
    library.sim_unpin.argtypes = [pointer]
    library.sim_host_access.argtypes = [pointer, size, ctypes.c_int, text]
    library.sim_elapsed.argtypes = [pointer, pointer, ctypes.POINTER(number)]
    library.sim_sleep.argtypes = [number]
    _with_lock.sim_stack.restype = ctypes.py_object
    _with_lock.sim_stack.argtypes = [ctypes.c_int]
