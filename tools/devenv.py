"""The development environment: a virtual environment that is made, kept up to date and used by `tools/dev.py`.

The idea: a stamp file holds a hash of everything the environment was made from (all `pyproject.toml` files, the
native sources, the pinned tools). When the stamp fits, nothing is installed; when it does not, the missing part is.
Torch is installed first and by an exact version: any range, asked for by name or by another package, would let pip
draw the newest CUDA build. Standard library only, so that it runs on a bare Python >= 3.10.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "ci"))

from workspace import TESTKIT, all_packages, read_toml, requirement_name  # noqa: E402

TORCH = os.environ.get("DSX_TORCH", "torch==2.13.0")
BUILD_TOOLS = ("hatchling>=1.24", "editables>=0.5", "pybind11>=2.13,<4", "ninja>=1.11", "numpy")
TEST_TOOLS = ("pytest>=8", "pytest-timeout>=2.3")
LINT_TOOLS = ("ruff>=0.14", "import-linter>=2.5", "pyright>=1.1.400", "clang-format>=23,<24")
DOCS_TOOLS = ("mkdocs>=1.6,<2", "mkdocs-material>=9.5", "mkdocstrings[python]>=1,<2")
NATIVE_SUFFIXES = {".cpp", ".h", ".hpp", ".cu", ".cuh", ".inc"}


class DevError(RuntimeError):
    """A step of the set-up failed; the text says which, and what to do."""


@dataclass(frozen=True)
class Environment:
    """One virtual environment of the workspace."""

    path: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    def variables(self, env: dict[str, str] | None = None) -> dict[str, str]:
        """This process' environment variables as they are inside; the environment's own scripts come first on PATH."""
        merged = {**os.environ, **(env or {}), "VIRTUAL_ENV": str(self.path)}
        merged["PATH"] = f"{self.python.parent}{os.pathsep}{merged.get('PATH', '')}"
        merged.pop("PYTHONHOME", None)
        # without compiled files every process that a test starts compiles 700 sources again, which takes 1.4 s
        merged.pop("PYTHONDONTWRITEBYTECODE", None)
        return merged

    def run(self, *args: str, env: dict[str, str] | None = None, check: bool = True, cwd: Path = ROOT) -> int:
        """Run `python *args` inside."""
        code = subprocess.call([str(self.python), *args], cwd=cwd, env=self.variables(env))
        if check and code != 0:
            raise DevError(f"`python {' '.join(args)}` ended with exit code {code}")
        return code

    def pip(self, *args: str, env: dict[str, str] | None = None) -> None:
        """`pip install`, quietly; pip's own text is shown when it fails."""
        command = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *args]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **(env or {})}, capture_output=True, text=True)
        if done.returncode != 0:
            raise DevError(f"pip install {' '.join(args)} failed:\n{done.stdout[-2000:]}{done.stderr[-6000:]}")


def say(text: str) -> None:
    """One line of progress."""
    print(f"[dev] {text}", flush=True)


def third_party_requirements() -> list[str]:
    """What the packages and their tests need from others, torch left out (it is installed first, pinned)."""
    packages = all_packages()
    found: dict[str, None] = {}
    testkit = read_toml(TESTKIT / "pyproject.toml")["project"].get("dependencies", ())
    for requirements in [*(p.requires + p.test_requires for p in packages.values()), testkit]:
        for requirement in requirements:
            if requirement_name(requirement) not in {*packages, "torch", "dsx-testkit"}:
                found[requirement] = None
    return list(found)


def fingerprint(extra: Iterable[str]) -> str:
    """Hash of everything an environment is made from."""
    digest = hashlib.sha256()
    for text in (sys.version, TORCH, *BUILD_TOOLS, *TEST_TOOLS, *LINT_TOOLS, *extra):
        digest.update(text.encode())
    for switch in sorted(k for k in os.environ if k.startswith("DSX_BUILD_")):
        digest.update(f"{switch}={os.environ[switch]}".encode())
    files = [
        TESTKIT / "pyproject.toml",
        *ROOT.glob("packages/*/pyproject.toml"),
        *ROOT.glob("packages/*/hatch_build.py"),
    ]
    files += [p for p in ROOT.glob("packages/*/native/**/*") if p.suffix in NATIVE_SUFFIXES]
    files += [ROOT / "tools" / "dsx_build.py", *(ROOT / "tools" / "native").glob("*/*.h")]
    for path in sorted(p for p in files if p.is_file()):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def editable_arguments(without: Iterable[str] = ()) -> list[str]:
    """`-e` for every package of ours but those in `without`, in one command, so that siblings come from the tree."""
    paths = [*(p.path for p in all_packages().values() if p.name not in set(without)), TESTKIT]
    return [part for path in paths for part in ("-e", str(path))]


def ensure(name: str = ".venv", *, extra: Iterable[str] = (), without: Iterable[str] = ()) -> Environment:
    """The environment `name`, made or brought up to date; a second call with nothing changed does nothing.

    `extra` are requirements beyond those of the packages (clients, peers of a bench); packages of ours in `without` are
    left out. Raises `DevError`.
    """
    environment = Environment(ROOT / name)
    extra = [*extra, *LINT_TOOLS, *DOCS_TOOLS]
    stamp = environment.path / "dsx-stamp"
    wanted = fingerprint(extra)
    if stamp.is_file() and wanted in stamp.read_text().split() and environment.python.exists():
        return environment
    if not environment.python.exists():
        say(f"making the virtual environment {name}")
        try:
            venv.EnvBuilder(with_pip=True, clear=environment.path.exists()).create(environment.path)
        except (OSError, subprocess.CalledProcessError) as error:
            raise DevError(
                f"cannot make a virtual environment: {error}; install your system's venv package (python3-venv)"
            ) from error
    say(f"installing {TORCH} (once)")
    environment.pip(TORCH)
    say("installing build tools and what the packages need")
    environment.pip(TORCH, *BUILD_TOOLS, *TEST_TOOLS, *third_party_requirements(), *extra)
    say("installing the workspace's packages, editable")
    environment.pip("--no-build-isolation", "--no-deps", *editable_arguments(without))
    stamp.write_text(wanted + "\n")
    return environment
