"""Builds the CUDA sources for the host: g++ against `cuda_emu.h`, as a module that takes host tensors."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[3]
EMULATED = "-x c++ -DDSX_CUDA_EMULATED=1 -O1 -Wno-unknown-pragmas -Wno-unused-variable -Wno-unused-parameter"


def build() -> Path:
    """The compiled module's file; only what changed since the last call is compiled. Needs the repository."""
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


def load(path: Path) -> Any:
    """The module in a file that `build` made."""
    spec = importlib.util.spec_from_file_location("_cuda", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
