"""Does one package install and pass its tests by itself?

`python ci/alone.py dsx-zero`: for the package and every package of ours it needs: build the sdist, build the wheel from
the unpacked sdist (which proves the sdist complete), check the wheel's content; make a clean virtual environment in a
temporary folder; install torch (pinned), the wheels and the test tools; check that exactly the closure is installed;
copy the tests out of the tree and run them there. Packages with native code go through it a second time built with
`DSX_BUILD_NATIVE=0`.

Needs hatchling, pybind11 and ninja in the interpreter that runs it (`tools/dev.py alone` provides them).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from workspace import ROOT, TESTKIT, Package, all_packages, closure, read_toml, requirement_name

TORCH = os.environ.get("DSX_TORCH", "torch==2.13.0")


class AloneError(RuntimeError):
    """The package does not stand alone; the text says at which step."""


def call(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> None:
    """Run; raise with the command's own output when it fails."""
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise AloneError(f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}{done.stderr[-6000:]}")


def build_wheel(package: Path, out: Path, env: dict[str, str]) -> Path:
    """sdist, then the wheel from the unpacked sdist; returns the wheel."""
    work = Path(tempfile.mkdtemp(dir=out))
    call(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", work, cwd=package, env=env)
    (archive,) = work.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(work, filter="data")
    (source,) = (d for d in work.iterdir() if d.is_dir())
    call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out / "wheels", cwd=source, env=env)
    return max((out / "wheels").glob("*.whl"), key=lambda p: p.stat().st_mtime_ns)


def check_wheel(package: Package, wheel: Path, native: bool) -> None:
    """A typed wheel without tests; a platform tag only where there is native code."""
    names = zipfile.ZipFile(wheel).namelist()
    if f"{package.module}/py.typed" not in names:
        raise AloneError(f"{wheel.name} has no py.typed")
    ours = (f"{package.module}/", f"{package.module}-")
    strangers = [n for n in names if not n.startswith(ours) and n != f"{package.module}.pth"]
    if strangers:
        raise AloneError(f"{wheel.name} carries files outside {package.module}/: {strangers[:5]}")
    compiled = any(n.endswith((".so", ".pyd")) for n in names)
    if compiled != native or compiled == wheel.name.endswith("-any.whl"):
        raise AloneError(f"{wheel.name}: native code expected: {native}, found: {compiled}")


def fresh_environment(folder: Path, wheels: list[Path], packages: list[Package]) -> Path:
    """A new virtual environment with torch, the wheels and the tests' own requirements; returns its python."""
    venv.EnvBuilder(with_pip=True).create(folder)
    python = folder / "bin" / "python"
    install = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    ours = {p.name for p in packages}
    needs = {r for p in packages for r in p.requires if requirement_name(r) not in {*ours, "torch"}}
    needs |= {r for r in packages[-1].test_requires if requirement_name(r) not in {*all_packages(), "dsx-testkit"}}
    needs |= {
        r for r in read_toml(TESTKIT / "pyproject.toml")["project"]["dependencies"] if requirement_name(r) != "torch"
    }
    call(*install, TORCH, *sorted(needs))
    call(*install, "--no-deps", *wheels)  # paths, not names: nothing of ours can come from an index
    call(python, "-m", "pip", "check")
    return python


def check_installed(python: Path, expected: set[str]) -> None:
    """Exactly the closure (and the test kit) of our distributions is there."""
    query = (
        "import importlib.metadata as m; print(*sorted({d.name for d in m.distributions() if"
        " d.name.startswith('dsx')}))"
    )
    found = set(subprocess.check_output([str(python), "-c", query], text=True, cwd="/").split())
    if found != expected:
        raise AloneError(f"installed {sorted(found)}, expected {sorted(expected)}")


def check_import(python: Path, module: str) -> None:
    """Importing says nothing and touches no device. (torch itself warns where there is no numpy.)"""
    code = f"import {module}, sys; t = sys.modules.get('torch'); sys.exit(bool(t and t.cuda.is_initialized()))"
    command = [str(python), "-W", "ignore:Failed to initialize NumPy:UserWarning", "-c", code]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True)
    if done.returncode or done.stdout or done.stderr:
        raise AloneError(f"import {module}: exit {done.returncode}, printed {done.stdout + done.stderr!r}")


def check(name: str, native: bool) -> None:
    """The whole check of one package, with or without native code."""
    packages = all_packages()
    members = [packages[n] for n in closure(name, packages)]
    env = {} if native else {"DSX_BUILD_NATIVE": "0"}
    with tempfile.TemporaryDirectory(prefix="dsx-alone-") as folder:
        out = Path(folder)
        (out / "wheels").mkdir()
        wheels = []
        for member in members:
            wheel = build_wheel(member.path, out, env)
            check_wheel(member, wheel, native and member.native)
            wheels.append(wheel)
        wheels.append(build_wheel(TESTKIT, out, env))
        python = fresh_environment(out / "venv", wheels, members)
        check_installed(python, {*(m.name for m in members), "dsx-testkit"})
        check_import(python, packages[name].module)
        place = out / "outside"
        shutil.copytree(packages[name].path / "tests", place / "tests")
        for extra in ("README.md", "examples"):  # documents whose examples the tests run
            source = packages[name].path / extra
            if source.is_dir():
                shutil.copytree(source, place / extra)
            elif source.is_file():
                shutil.copy(source, place / extra)
        shutil.copy(ROOT / "pyproject.toml", place / "pyproject.toml")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DSX_ALONE": "1"}
        code = subprocess.call(
            [str(python), "-m", "pytest", "-q", "-m", "not slow", "tests"], cwd=place, env=environment
        )
        if code != 0:
            raise AloneError(f"{name}: its tests end with exit code {code}")


def main() -> int:
    """`alone.py PACKAGE`."""
    (name,) = sys.argv[1:]
    packages = all_packages()
    if name not in packages:
        print(f"no package {name!r}; there are {', '.join(packages)}", file=sys.stderr)
        return 2
    has_native = any(packages[n].native for n in closure(name, packages))
    for native in (True, False) if has_native else (False,):
        print(f"[alone] {name}, {'with' if native else 'without'} native code", flush=True)
        try:
            check(name, native)
        except AloneError as error:
            print(f"[alone] {name}: {error}", file=sys.stderr)
            return 1
    print(f"[alone] {name} stands alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
