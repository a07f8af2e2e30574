"""Runs the tests of the native code with it built under the address and undefined-behaviour sanitizers.

    python packages/dsx-sparse-attn/tests/sanitize.py [pytest arguments]

Builds an instrumented wheel into a temporary folder (the installed module stays as it is), puts it first on the path,
loads the sanitizer's runtime into Python and runs every test file here that touches kernels. Needs g++ with libasan,
and hatchling, pybind11 and ninja. Exit code 0 means: no finding, no failure.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
ROOT = PACKAGE.parent.parent
SKIPPED = ("triton", "flex", "huggingface", "causal_models", "dispatch")  # they run no native code, or through others
FILES = sorted(
    p
    for p in (PACKAGE / "tests").glob("test_sparse_*.py")
    if not p.name.removeprefix("test_sparse_").startswith(SKIPPED)
)


def runtime(name: str) -> str:
    """The shared library of the compiler's sanitizer runtime."""
    found = subprocess.check_output([os.environ.get("CXX", "g++"), f"-print-file-name={name}"], text=True).strip()
    if not os.path.isabs(found):
        sys.exit(f"{name} is not installed; install your compiler's sanitizer libraries")
    return os.path.realpath(found)


def main() -> int:
    """Build, check that the instrumented module is the one that runs, test."""
    with tempfile.TemporaryDirectory(prefix="dsx-sanitize-") as folder:
        build_env = {
            **os.environ,
            "DSX_BUILD_SANITIZE": "address,undefined",
            "DSX_BUILD_NATIVE": "1",
            "DSX_BUILD_CUDA": "0",
        }
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
        subprocess.check_call(command, cwd=PACKAGE, env=build_env)
        (wheel,) = Path(folder).glob("*.whl")
        site = Path(folder) / "site"
        zipfile.ZipFile(wheel).extractall(site)
        env = {
            **os.environ,
            "PYTHONPATH": str(site),
            "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')}",
            # Python and torch keep memory until the end of the process.
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
            "OMP_NUM_THREADS": "1",
        }
        check = (
            "import sys, dsx_sparse_attn; s = dsx_sparse_attn.native_status(); print(s); "
            "sys.exit(s['sanitizer'] != 'address')"
        )
        subprocess.check_call([sys.executable, "-c", check], cwd=folder, env=env)
        arguments = sys.argv[1:] or [str(f) for f in FILES]
        options = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(PACKAGE)]
        return subprocess.call([sys.executable, "-m", "pytest", *options, *arguments], cwd=folder, env=env)


if __name__ == "__main__":
    sys.exit(main())
