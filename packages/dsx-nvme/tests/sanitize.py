"""Runs the native code under sanitizers: address and undefined behaviour (the whole test suite), threads (a program).

    python packages/dsx-nvme/tests/sanitize.py [address|thread] [pytest arguments]

address: builds an instrumented wheel into a temporary folder (the installed module stays as it is), puts it first on
the path, loads the sanitizer's runtime into Python and runs the tests here. thread: compiles the engine with
`native/stress/stress.cpp` and runs that, without Python, whose own locks the thread sanitizer does not know. Needs g++
with libasan and libtsan, and hatchling, pybind11, ninja. Exit code 0 means: no finding, no failure.
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
FILES = sorted(p for p in (PACKAGE / "tests").glob("test_nvme_*.py") if p.name != "test_nvme_gds.py")


def runtime(name: str) -> str:
    """The shared library of the compiler's sanitizer runtime."""
    found = subprocess.check_output([os.environ.get("CXX", "g++"), f"-print-file-name={name}"], text=True).strip()
    if not os.path.isabs(found):
        sys.exit(f"{name} is not installed; install your compiler's sanitizer libraries")
    return os.path.realpath(found)


def address(arguments: list[str]) -> int:
    """Build, check that the instrumented module is the one that runs, test."""
    with tempfile.TemporaryDirectory(prefix="dsx-sanitize-") as folder:
        build_env = {**os.environ, "DSX_BUILD_SANITIZE": "address,undefined", "DSX_BUILD_NATIVE": "1"}
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
        check = "import sys, dsx_nvme; s = dsx_nvme.native_status(); print(s); sys.exit(s['sanitizer'] != 'address')"
        subprocess.check_call([sys.executable, "-c", check], cwd=folder, env=env)
        options = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(PACKAGE)]
        files = [a for a in arguments if not a.startswith("-")] or [str(f) for f in FILES]
        flags = [a for a in arguments if a.startswith("-")]
        return subprocess.call([sys.executable, "-m", "pytest", *options, *flags, *files], cwd=folder, env=env)


def thread() -> int:
    """Compile the engine and the stress program under the thread sanitizer, and run it."""
    with tempfile.TemporaryDirectory(prefix="dsx-sanitize-") as folder:
        program = Path(folder) / "stress"
        sources = [
            str(p) for pattern in ("src/*.cpp", "stress/*.cpp") for p in sorted((PACKAGE / "native").glob(pattern))
        ]
        flags = ["-std=c++17", "-g", "-O1", "-fsanitize=thread", f"-I{PACKAGE / 'native' / 'include'}", "-pthread"]
        subprocess.check_call([os.environ.get("CXX", "g++"), *flags, "-o", str(program), *sources])
        return subprocess.call(
            [str(program), folder], env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1:exitcode=66"}
        )


def main() -> int:
    """Both, or the one that is named."""
    kinds = [a for a in sys.argv[1:] if a in ("address", "thread")] or ["thread", "address"]
    rest = [a for a in sys.argv[1:] if a not in ("address", "thread")]
    for kind in kinds:
        code = thread() if kind == "thread" else address(rest)
        print(f"{kind}: {'no finding' if code == 0 else f'exit code {code}'}")
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
