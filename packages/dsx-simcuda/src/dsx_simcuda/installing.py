"""Puts the simulated device in the place of CUDA, in this process."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from types import FunctionType
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
    _start_without_compiler()
    atexit.register(native.lib.sim_stop_stacks)


def _start_without_compiler() -> None:
    """Lets torch's Python meta kernels, which give the shapes of results here, run without torch's compiler.

    Some are marked "not to be compiled" by a function that imports the compiler at their first call, which takes 2 s at
    the start of each program. They get the same marks without the import. Where torch has changed, they stay as they
    are.
    """
    import torch
    from torch import _compile, _decomp, _refs

    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if not all(hasattr(frames, name) for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")):
        return
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    importing = _compile._disable_dynamo(lambda: None).__code__  # the code of all functions that it has wrapped

    def outside(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        marked: Any = run
        frames.set_code_exec_strategy(marked.__code__, skip)
        marked._torchdynamo_disable = marked._torchdynamo_disable_recursive = True
        return marked

    tables = (*_decomp.global_decomposition_table.values(), vars(_refs))
    left = [value for table in tables for value in table.values() if isinstance(value, FunctionType)]
    seen: set[int] = set()
    while left:
        function = left.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        # what a decorated function calls is in its closure; its `__wrapped__` may be another one
        inside = [cell.cell_contents for cell in function.__closure__ or ()]
        inside = [value for value in inside if isinstance(value, FunctionType)]
        if function.__code__ is importing:
            inside[0].__dynamo_disable = outside(inside[0])  # where torch keeps what it made at the first call
        left += inside


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
