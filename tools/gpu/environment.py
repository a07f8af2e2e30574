"""The environment of `tools/dev.py gpu`: the machine's own packages, and ours on top, without network.

The machine's python may itself be that of a virtual environment. `venv --system-site-packages` then shows the packages
of the interpreter below it, not those of the environment (`home` in pyvenv.cfg). So the new environment gets a file
that adds the site folders of the python which runs this: torch is used where it lies, and never installed. pip is found
there too, so that a Python without ensurepip is enough.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

from devenv import DevError, Environment, editable_arguments, fingerprint, say

PARENT = "dsx-parent.pth"
# Fails at the first of these that the machine lacks: the editable installs and the tests cannot do without.
NEEDED = ("torch", "hatchling", "editables", "pybind11", "ninja", "pytest", "pytest-timeout", "cloudpickle")
# What the known GPU machine lacks (it has torch, pybind11, ninja, pytest and no network); `gpu --prepare` fetches it.
CARRIED = """
hatchling editables trove-classifiers pathspec pluggy packaging pydantic pydantic-core typing-inspection annotated-types
typing-extensions rich markdown-it-py mdurl pygments safetensors psutil pytest pytest-timeout iniconfig cloudpickle
"""


def parent_folders() -> list[str]:
    """The site folders of the python that runs this, those of its own virtual environment first."""
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return [folder for folder in folders if Path(folder).is_dir()]


def make_over_parent(path: Path, folders: Iterable[str] | None = None) -> Environment:
    """A virtual environment at `path` that also sees the packages in `folders` (default: those of this python)."""
    environment = Environment(path)
    try:
        venv.EnvBuilder(with_pip=False, clear=path.exists(), symlinks=os.name != "nt").create(path)
    except (OSError, subprocess.CalledProcessError) as error:
        raise DevError(f"cannot make a virtual environment at {path}: {error}") from error
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(subprocess.check_output([str(environment.python), "-c", query], text=True).strip())
    # addsitedir and not the bare path: .pth files of the parent, such as editable installs, count as well.
    lines = [f"import site; site.addsitedir({folder!r})" for folder in folders or parent_folders()]
    (own / PARENT).write_text("\n".join(lines) + "\n")
    return environment


def normal(name: str) -> str:
    """The name of a distribution as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> list[str]:
    """Names of what our packages need from others at run time, and of what builds and tests them."""
    from workspace import TESTKIT, all_packages, read_toml, requirement_name

    ours = {*all_packages(), "dsx-testkit"}
    testkit = read_toml(TESTKIT / "pyproject.toml")["project"].get("dependencies", ())
    every = [r for p in all_packages().values() for r in p.requires] + list(testkit)
    # A marker such as `platform_system == 'Windows'` is not evaluated: what has one is not demanded.
    plain = [normal(requirement_name(r)) for r in every if ";" not in r]
    return list(dict.fromkeys([*NEEDED, *(name for name in plain if name not in ours)]))


def missing(environment: Environment, names: Iterable[str]) -> list[str]:
    """Those of `names` whose distribution the environment does not see."""
    query = (
        "import importlib.metadata as m, re, sys\n"
        "have = {re.sub(r'[-_.]+', '-', d.metadata['Name'] or '').lower() for d in m.distributions()}\n"
        "print(*[n for n in sys.argv[1:] if n not in have])"
    )
    found = subprocess.run(
        [str(environment.python), "-c", query, *names], capture_output=True, text=True, env=environment.variables()
    )
    if found.returncode != 0:
        raise DevError(f"the new environment's python does not run:\n{found.stderr[-2000:]}")
    return found.stdout.split()


def _carried(folder: Path, names: Iterable[str]) -> list[Path]:
    """The wheels in `folder` of what is missing, and of what those need: all that the machine has not."""
    wanted = set(names)
    return [wheel for wheel in sorted(folder.glob("*.whl")) if normal(wheel.name.split("-")[0]) in wanted]


def supply(environment: Environment, wheels: Path) -> None:
    """Install what the machine lacks from carried wheels. Raises `DevError` that names what is in neither place."""
    lacking = missing(environment, requirements())
    if lacking and wheels.is_dir():
        also = missing(environment, [normal(name) for name in CARRIED.split()])
        found = _carried(wheels, [*lacking, *also])
        if found:
            say(f"from {wheels.name}: {', '.join(w.name.split('-')[0] for w in found)}")
            environment.pip("--no-index", "--no-deps", *map(str, found))
        lacking = missing(environment, requirements())
    if "torch" in lacking:
        raise DevError(f"{sys.executable} has no torch; start this command with the python that has it")
    if lacking:
        raise DevError(
            f"this machine has no {', '.join(lacking)}; on one with network run `tools/dev.py gpu --prepare` and carry"
            " the folder .whl here (git ignores it), or install them into the python that runs this"
        )


def install_ours(environment: Environment) -> str:
    """Our packages, editable, with native code for the CPU. Returns why that code is missing, or nothing."""
    arguments = ["--no-index", "--no-build-isolation", "--no-deps", *editable_arguments()]
    try:
        # The CUDA modules have a stage of their own, so that trouble with nvcc costs the kernels only.
        environment.pip(*arguments, env={"DSX_BUILD_CUDA": "0"})
    except DevError as error:
        say("the native code for the CPU does not compile; going on without it")
        environment.pip(*arguments, env={"DSX_BUILD_CUDA": "0", "DSX_BUILD_NATIVE": "0"})
        return str(error)[-4000:]
    return ""


def ensure_gpu(root: Path) -> tuple[Environment, str]:
    """The environment, made or brought up to date, and why native code is missing. Raises `DevError`."""
    environment = Environment(root / ".venvs" / "gpu")
    stamp = environment.path / "dsx-stamp"
    wanted = fingerprint(["gpu", sys.executable, *parent_folders()])
    if stamp.is_file() and environment.python.exists():
        made, _, trouble = stamp.read_text().partition("\n")
        if made == wanted:
            return environment, trouble
    say(f"making an environment over the packages of {sys.executable}")
    make_over_parent(environment.path)
    if missing(environment, ["pip"]):
        raise DevError(f"{sys.executable} has no pip; install it there (python3 -m ensurepip)")
    supply(environment, root / ".whl")
    say("installing the workspace's packages, editable")
    trouble = install_ours(environment)
    stamp.write_text(f"{wanted}\n{trouble}")
    return environment, trouble


def prepare(environment: Environment, target: Path) -> int:
    """Fetch the wheels that the GPU machine lacks, in the versions that `environment` has, into `target`."""
    target.mkdir(exist_ok=True)
    platforms = [p for v in ("2_28", "2_17") for p in ("--platform", f"manylinux_{v}_x86_64")]
    platforms += ["--platform", "manylinux2014_x86_64"]
    kind = ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:", "--no-deps"]
    pinned = [_pinned(environment, name) for name in CARRIED.split()]
    return environment.run("-m", "pip", "download", "-q", *kind, *platforms, "-d", str(target), *pinned, check=False)


def _pinned(environment: Environment, name: str) -> str:
    query = f"import importlib.metadata as m; print(m.version({name!r}))"
    done = subprocess.run([str(environment.python), "-c", query], capture_output=True, text=True)
    return f"{name}=={done.stdout.strip()}" if done.returncode == 0 else name


def cuda_toolkit() -> dict[str, str] | None:
    """What the build needs in its environment to find nvcc: nothing where it is in CUDA_HOME or on PATH, the usual
    place where it lies there, None where it is missing.
    """
    home = os.environ.get("CUDA_HOME")
    if shutil.which("nvcc", path=str(Path(home, "bin"))) if home else shutil.which("nvcc"):
        return {}
    usual = "/usr/local/cuda"
    return {"CUDA_HOME": usual} if shutil.which("nvcc", path=f"{usual}/bin") else None
