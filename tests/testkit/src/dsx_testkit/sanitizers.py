"""Run the tests of a package with its native code built under the address and undefined-behaviour sanitizers.

`run_under_sanitizers` builds an instrumented wheel into a temporary folder (the installed module stays as it is), puts
it first on the path, loads the sanitizers' runtime into Python and runs the tests. Needs g++ with libasan, and
hatchling, pybind11 and ninja. `packages/*/tests/sanitize.py` are the commands.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["run_under_sanitizers", "sanitizer_runtime"]


def sanitizer_runtime(name: str) -> str:
    """The path of the compiler's sanitizer library `name`. Ends the program with a message if it is not installed."""
    found = subprocess.check_output([os.environ.get("CXX", "g++"), f"-print-file-name={name}"], text=True).strip()
    if not os.path.isabs(found):
        sys.exit(f"{name} is not installed; install your compiler's sanitizer libraries")
    return os.path.realpath(found)


def run_under_sanitizers(package: Path, module: str, files: Sequence[Path], arguments: Sequence[str]) -> int:
    """Build the package, check that the instrumented module is the one that runs, and run pytest.

    Args:
        package: the package's folder.
        module: the name by which it is imported; `native_status()` of it names the sanitizer.
        files: the test files that run if `arguments` name none.
        arguments: options and test files for pytest.

    Returns:
        pytest's exit code: 0 means no finding and no failure.
    """
    with tempfile.TemporaryDirectory(prefix="dsx-sanitize-") as folder:
        build = {"DSX_BUILD_SANITIZE": "address,undefined", "DSX_BUILD_NATIVE": "1", "DSX_BUILD_CUDA": "0"}
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
        subprocess.check_call(command, cwd=package, env={**os.environ, **build})
        (wheel,) = Path(folder).glob("*.whl")
        site = Path(folder) / "site"
        zipfile.ZipFile(wheel).extractall(site)
        env = {
            **os.environ,
            "PYTHONPATH": str(site),
            "LD_PRELOAD": f"{sanitizer_runtime('libasan.so')} {sanitizer_runtime('libubsan.so')}",
            # Python and torch keep memory until the end of the process.
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
            "OMP_NUM_THREADS": "1",
        }
        check = f"import sys, {module} as m; s = m.native_status(); print(s); sys.exit(s['sanitizer'] != 'address')"
        subprocess.check_call([sys.executable, "-c", check], cwd=folder, env=env)
        chosen = [os.path.abspath(a) if os.path.exists(a.split("::")[0]) else a for a in arguments]
        if not any(os.path.exists(a.split("::")[0]) for a in chosen):  # options alone choose no files
            chosen += [str(f) for f in files]
        settings = package.parent.parent / "pyproject.toml"
        options = ["-q", "-p", "no:cacheprovider", "-c", str(settings), "--rootdir", str(package)]
        return subprocess.call([sys.executable, "-m", "pytest", *options, *chosen], cwd=folder, env=env)
