"""Builds the native library against the installed torch, once, into a cache folder.

The folder's name holds a hash of torch's version and place, of the Python, of the compiler's command and of the
sources, so that a change of any of them builds anew. A lock lets one process build while the others wait, and the
folder appears by one rename: no process ever sees half a build.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .errors import BuildFailed, RefusedHere

TESTED = ("2.13",)
"""Versions of torch with which the test suite of this package has passed."""
SOURCES = Path(__file__).resolve().parent / "csrc"
DEVICE = "libdsx_simcuda.so"
GROUP = "_dsx_simnccl.so"
GROUP_SOURCES = ("collectives.cpp", "group.cpp")  # these need torch's Python library
COMPILED_TOGETHER = (
    GROUP_SOURCES,
    ("cells.cpp", "copies.cpp", "device.cpp", "operators.cpp", "shapes.cpp", "tensors.cpp"),
)
"""Sources of one compilation each: torch's headers are two thirds of the time of a file that includes them."""


def torch_folder() -> Path:
    """The folder of the installed torch, found without importing it. Raises `RefusedHere` if it does not fit."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RefusedHere(f"{sys.executable} has no torch; install the CPU build of torch {TESTED[-1]} first")
    root = Path(spec.origin).parent
    version = importlib.metadata.version("torch")
    if (root / "lib" / "libtorch_cuda.so").exists():
        raise RefusedHere(
            f"torch {version} in {root} is a CUDA build, and the simulated device takes the place of CUDA in a CPU"
            " build; install the CPU build of torch into an environment of its own"
        )
    minor = ".".join(version.split("+")[0].split(".")[:2])
    if minor not in TESTED and os.environ.get("DSX_SIMCUDA_ANY_TORCH") != "1":
        raise RefusedHere(
            f"torch {version} was never tested with dsx-simcuda, expected {' or '.join(TESTED)} (torch's internal"
            " headers differ between versions); install the CPU build of that version, or set"
            " DSX_SIMCUDA_ANY_TORCH=1 to try"
        )
    return root


def refuse_real_gpu() -> None:
    """Raises `RefusedHere` on a machine with an NVIDIA driver, unless DSX_SIMCUDA_FORCE=1."""
    gpus = Path("/proc/driver/nvidia/gpus")
    found = os.path.exists("/dev/nvidia0") or (gpus.is_dir() and any(gpus.iterdir()))
    if found and os.environ.get("DSX_SIMCUDA_FORCE") != "1":
        raise RefusedHere(
            "this machine has a real GPU, which the simulated device would hide; run the program on it, or set"
            " DSX_SIMCUDA_FORCE=1 to simulate all the same"
        )


def cache_folder() -> Path:
    """The folder of the builds: $DSX_SIMCUDA_CACHE, or dsx-simcuda in the user's cache folder."""
    own = os.environ.get("DSX_SIMCUDA_CACHE")
    if own:
        return Path(own).resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsx-simcuda"


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX") or "")
    candidates = [command] if command else [["g++"], ["c++"], ["clang++"]]
    for candidate in candidates:
        if shutil.which(candidate[0]):
            return candidate
    raise BuildFailed(
        f"no C++ compiler found ({', '.join(c[0] for c in candidates)}), and one with C++20 is needed; install it"
        " (Debian: apt-get install g++), or name it in CXX"
    )


def _sources() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))


def _compile_command(root: Path) -> list[str]:
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").exists():
        raise BuildFailed(
            f"Python.h is not in {include}; install Python's headers (Debian: apt-get install python3-dev)"
        )
    version = importlib.metadata.version("torch").split("+")[0].split(".")
    flags = [
        "-std=c++20",
        "-O0",
        "-g0",
        "-fPIC",
        "-DNDEBUG",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        f"-DTORCH_MINOR={version[1]}",
    ]
    for folder in (root / "include", root / "include/torch/csrc/api/include", include):
        flags += ["-isystem", str(folder)]
    return [*_compiler(), *flags, *shlex.split(os.environ.get("DSX_SIMCUDA_CXXFLAGS", ""))]


def _key(root: Path, command: list[str]) -> str:
    digest = hashlib.sha256()
    for part in (str(root), shlex.join(command)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:12]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildFailed(
            f"the compiler failed with exit status {done.returncode}: {shlex.join(command)}\n{done.stderr[-4000:]}"
        )


def _build_into(folder: Path, command: list[str], root: Path) -> None:
    """Compiles the sources side by side and links the two libraries."""
    names = [path.name for path in _sources() if path.suffix == ".cpp"]
    together = {name for unit in COMPILED_TOGETHER for name in unit}
    units = [*COMPILED_TOGETHER, *((name,) for name in names if name not in together)]
    objects = {unit: folder / f"{Path(unit[0]).stem}.o" for unit in units}
    largest_first = sorted(units, key=lambda unit: -sum((SOURCES / name).stat().st_size for name in unit))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(lambda unit: _compile(command, unit, objects[unit]), largest_first))
    library = root / "lib"
    link = [*_compiler(), "-shared"]
    torch_found = [f"-L{library}", f"-Wl,-rpath,{library}"]
    device = [str(target) for unit, target in objects.items() if unit != GROUP_SOURCES]
    _run([*link, *device, "-o", str(folder / DEVICE), *torch_found, "-ltorch_cpu", "-lc10"])
    beside = ["-Wl,-rpath,$ORIGIN", f"-L{folder}", f"-l:{DEVICE}"]
    needs = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    _run([*link, str(objects[GROUP_SOURCES]), "-o", str(folder / GROUP), *beside, *torch_found, *needs])
    for target in objects.values():
        target.unlink()


def _compile(command: list[str], unit: tuple[str, ...], target: Path) -> None:
    """Compiles the files of one unit as one; the compiler's messages name the files."""
    source = target.with_suffix(".cpp")
    source.write_text("".join(f'#include "{SOURCES / name}"\n' for name in unit))
    _run([*command, "-c", str(source), "-o", str(target)])
    source.unlink()


def build() -> Path:
    """Builds the native library for the installed torch if the cache has none; returns its folder.

    Takes half a minute on two cores the first time. Of several processes that come at once, one builds and the others
    wait. Raises `BuildFailed` without a compiler, and `RefusedHere` for a torch that does not fit.
    """
    root = torch_folder()
    version = importlib.metadata.version("torch")
    cache = cache_folder()
    # The compiler is asked for only if something must be compiled: a cache from elsewhere is enough to run.
    try:
        command = _compile_command(root)
    except BuildFailed:
        found = sorted(cache.glob(f"{version}-{sys.implementation.cache_tag}-{_source_hash()}-*/{GROUP}"))
        if not found:
            raise
        return found[0].parent
    target = cache / f"{version}-{sys.implementation.cache_tag}-{_source_hash()}-{_key(root, command)}"
    if (target / GROUP).exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f"{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (target / GROUP).exists():
            return target
        sys.stderr.write(f"dsx-simcuda: building for torch {version} (half a minute, once) in {cache}\n")
        work = Path(tempfile.mkdtemp(prefix="build-", dir=cache))
        try:
            _build_into(work, command, root)
            shutil.rmtree(target, ignore_errors=True)  # what a broken disk or a hand has left there
            work.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def _source_hash() -> str:
    digest = hashlib.sha256()
    for source in _sources():
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:12]
