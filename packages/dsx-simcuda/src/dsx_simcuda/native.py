"""Loads the native library before torch, so that torch finds the device's hooks at its first look."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from .building import DEVICE, build, refuse_real_gpu, torch_folder
from .errors import ImportedTooLate
from .options import FIXED, Options, mode_number

lib: Any = None
"""The native library (`ctypes.PyDLL`), once `load` has loaded it."""
folder: Path | None = None
"""Where the library lies."""


def load(options: Options) -> None:
    """Builds if it must be, loads, and sets the options. Raises `ImportedTooLate` if torch is imported already."""
    global lib, folder  # noqa: PLW0603  one device per process
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
    _declare(library)
    lib = library
    for name in FIXED:
        set_option(name, getattr(options, name))
    for name in vars(options):
        if name not in FIXED:
            set_option(name, getattr(options, name))


def set_option(name: str, value: Any) -> None:
    """Sets one switch of the native library."""
    number = mode_number(value) if name == "mode" else value
    if lib.sim_option(name.encode(), float(number)) != 0:
        raise ValueError(f"unknown option {name!r}")


def _declare(library: Any) -> None:
    """Types of the C functions whose arguments or results are no plain int."""
    for name in ("sim_host_syncs", "sim_stat"):
        getattr(library, name).restype = ctypes.c_size_t
    library.sim_reports.restype = ctypes.c_char_p
    library.sim_option.argtypes = [ctypes.c_char_p, ctypes.c_double]
    library.sim_set_limit.argtypes = [ctypes.c_int, ctypes.c_size_t]
    library.sim_pin.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.sim_unpin.argtypes = [ctypes.c_void_p]
    library.sim_elapsed.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.sim_elapsed.restype = ctypes.c_double
    library.sim_sleep.argtypes = [ctypes.c_double]
