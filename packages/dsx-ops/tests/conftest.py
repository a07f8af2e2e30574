"""The CUDA kernels on the host: their own sources, compiled by g++ against native/cuda/emulator, as a module that takes
host tensors.
"""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1]
EMULATOR = PACKAGE / "native" / "cuda" / "emulator"


def emulator_part(name):
    """A file of native/cuda/emulator as a module: build, resources or traffic."""
    known = sys.modules.get(f"dsx_ops_emulator_{name}")
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location(f"dsx_ops_emulator_{name}", EMULATOR / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def emulator_module():
    """The module, compiled once per session."""
    if not (PACKAGE / "native" / "cuda").is_dir() or not (PACKAGE.parents[1] / "tools" / "dsx_build.py").is_file():
        pytest.skip("the CUDA sources are part of the repository, not of the wheel")
    if missing := [m for m in ("hatchling", "pybind11", "ninja") if importlib.util.find_spec(m) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    if not any(shutil.which(c) for c in ("g++", "clang++")):
        pytest.skip("needs a C++ compiler")
    build = emulator_part("build")
    return build.load(build.build())


@pytest.fixture(scope="session")
def traffic(emulator_module):
    """Counts what kernels move."""
    return emulator_part("traffic")


@pytest.fixture(scope="session")
def resources():
    """Asks nvcc for registers and spills."""
    if not EMULATOR.is_dir() or not (PACKAGE.parents[1] / "tools" / "native").is_dir():
        pytest.skip("the CUDA sources are part of the repository, not of the wheel")
    return emulator_part("resources")


@pytest.fixture
def emulator(emulator_module):
    """The module, with threads and blocks in a shuffled order."""
    emulator_module.set_order(7)
    yield emulator_module
    emulator_module.set_order(0)


@pytest.fixture(params=[0, 1, 11], ids=["forward", "backward", "shuffled"])
def each_order(request, emulator_module):
    """The module, once per order of threads and blocks: for kernels whose threads wait for each other."""
    emulator_module.set_order(request.param)
    yield emulator_module
    emulator_module.set_order(0)
