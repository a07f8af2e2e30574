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
from pathlib import Path

from dsx_testkit.sanitizers import run_under_sanitizers

PACKAGE = Path(__file__).resolve().parent.parent
FILES = sorted(p for p in (PACKAGE / "tests").glob("test_nvme_*.py") if p.name != "test_nvme_gds.py")


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
        code = thread() if kind == "thread" else run_under_sanitizers(PACKAGE, "dsx_nvme", FILES, rest)
        print(f"{kind}: {'no finding' if code == 0 else f'exit code {code}'}")
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
