"""The CUDA kernels on the host: their own sources, compiled by g++ against native/cuda/emulator, as a module that takes
host tensors.
"""

import importlib.util
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1]
EMULATED = "-x c++ -DDSX_CUDA_EMULATED=1 -O1 -Wno-unknown-pragmas -Wno-unused-variable -Wno-unused-parameter"


def build_emulator() -> Path:
    """The compiled module; only what changed since the last call is compiled."""
    sys.path.insert(0, str(PACKAGE.parents[1] / "tools"))
    try:
        import dsx_build
        import pybind11
    finally:
        sys.path.pop(0)
    compiler, _ = dsx_build.find_compiler()
    folder = PACKAGE / "build" / f"cuda-emulator-{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "inc_pybind11"
    if not link.is_symlink():
        link.symlink_to(pybind11.get_include())
    ninja_file = dsx_build.NinjaFile(PACKAGE, folder, ["native/include"], compiler)
    sources = [*sorted((PACKAGE / "native" / "cuda").glob("*.cu")), PACKAGE / "native" / "cuda" / "module.cpp"]
    objects = [ninja_file.compile(source, f"{source.stem}.o", EMULATED) for source in sources]
    ninja_file.link("_cuda.so", objects, "-lpthread")
    ninja_file.run("the CUDA emulator", "the compiler's own words follow")
    return folder / "_cuda.so"


@pytest.fixture(scope="session")
def emulator_module():
    """The module, compiled once per session."""
    if not (PACKAGE / "native" / "cuda").is_dir() or not (PACKAGE.parents[1] / "tools" / "dsx_build.py").is_file():
        pytest.skip("the CUDA sources are part of the repository, not of the wheel")
    if missing := [m for m in ("hatchling", "pybind11", "ninja") if importlib.util.find_spec(m) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    if not any(shutil.which(c) for c in ("g++", "clang++")):
        pytest.skip("needs a C++ compiler")
    spec = importlib.util.spec_from_file_location("_cuda", build_emulator())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
