"""Puts the simulated device in the place of CUDA, in this process."""

from __future__ import annotations

import atexit
from typing import Any

from . import findings, native
from .options import FIXED, Options


def install(**options: Any) -> Options:
    """Makes "cuda" the simulated device in this process; call it before torch is imported.

    The keywords are the fields of `Options`; what is not given comes from the environment (`DSX_SIMCUDA_MODE` ...).
    The first call in a cache folder builds the native library (half a minute). A second call sets the options that can
    still change. Returns the options. Raises `ImportedTooLate`, `BuildFailed`, `RefusedHere`, or `ValueError` for a
    wrong option.
    """
    if is_installed():
        for name, value in options.items():
            set_option(name, value)
        return Options.from_environment(**options)
    wanted = load(**options)
    take_over()
    return wanted


def load(**options: Any) -> Options:
    """The first half of `install`: loads the native library, before torch."""
    wanted = Options.from_environment(**options)
    native.load(wanted)
    _set.update(vars(wanted))
    return wanted


def take_over() -> None:
    """The second half: replaces what torch has in Python for CUDA. torch may be imported from here on."""
    from . import cuda, nccl  # they import torch, which finds the device now

    findings.install()
    cuda.install()
    nccl.install()
    atexit.register(native.lib.sim_stop_stacks)


def is_installed() -> bool:
    """Whether "cuda" is the simulated device in this process."""
    return native.lib is not None


def set_option(name: str, value: Any) -> None:
    """Changes one option of `Options` while the program runs; `seed`, `devices` and `memory_mib` are fixed."""
    if name in FIXED:
        raise ValueError(f"{name} is fixed once the device is installed; give it to install()")
    Options.from_environment(**{name: value})
    native.set_option(name, value)
    _set[name] = value


def get_option(name: str) -> Any:
    """The value of an option of `Options` in this process."""
    return _set[name]


def synchronize() -> None:
    """Waits for all devices; not counted as a wait of the host."""
    native.lib.sim_synchronize_all()
    native.lib.sim_deliver()


_set: dict[str, Any] = {}
