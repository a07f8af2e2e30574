"""The simulated device is built once per session; programs on it run in processes of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="session")
def built() -> Path:
    """The folder of the built library; skips where nothing can be built."""
    import dsx_simcuda

    if os.environ.get("CXX") is None and not any(shutil.which(name) for name in ("g++", "c++", "clang++")):
        pytest.skip("no C++ compiler on this machine")
    return dsx_simcuda.build()


@pytest.fixture(scope="session")
def run_program(built) -> Run:
    """A function that runs `python -m dsx_simcuda` with Python's arguments, and returns what was said."""

    def run(*arguments: str, options: tuple[str, ...] = (), env: dict[str, str] | None = None, timeout: float = 120):
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("DSX_SIMCUDA_M", "RANK", "WORLD"))}
        command = [sys.executable, "-m", "dsx_simcuda", *options, *arguments]
        return subprocess.run(
            command,
            env={**variables, "OMP_NUM_THREADS": "1", **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., list[str]]:
    """A function that returns Python's arguments for a script on two ranks."""

    def arguments(script: Path, *rest: object) -> list[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        start = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
        return [*start, str(script), *map(str, rest)]

    return arguments
