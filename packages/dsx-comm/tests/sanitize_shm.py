"""Runs the native core of the shared-memory transport under the thread, address and undefined-behaviour sanitizers.

    python packages/dsx-comm/tests/sanitize_shm.py

Compiles `native/test/stress.cpp` (ranks as threads of one process, random calls on ordinary and on symmetric memory,
mixed among the ranks of a call, checked against exact results) with the core, once per sanitizer, and runs it. Needs
g++ or clang++ with the sanitizers' libraries. Exit code 0 means: no finding, no wrong result.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

NATIVE = Path(__file__).resolve().parent.parent / "native"
SHARED = NATIVE.parents[2] / "tools" / "native"
INCLUDE = f"-I{NATIVE / 'include'} -I{SHARED}"
FLAGS = f"-std=c++17 -O1 -g -fno-omit-frame-pointer -fno-sanitize-recover=all -ffp-contract=off {INCLUDE} -lpthread"
ISAS = {
    "base": "",
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq",
}


def main() -> int:
    """Compile and run each."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    x86 = platform.machine() in ("x86_64", "AMD64")
    known = ["-DDSX_X86=1"] if x86 else []
    for sanitizer in ("thread", "address,undefined"):
        with tempfile.TemporaryDirectory(prefix="dsx-sanitize-") as folder:
            objects = []
            for isa, flags in ISAS.items() if x86 else [("base", "")]:
                objects.append(str(Path(folder) / f"reduce.{isa}.o"))
                own = [f"-DDSX_ISA={isa}", f"-DDSX_ISA_{isa.upper()}=1", *flags.split()]
                source = str(NATIVE / "cpu" / "reduce.cpp")
                # lanes of vector code under the undefined-behaviour sanitizer take minutes to compile
                command = [*compiler, *FLAGS.split(), *known, *own, f"-fsanitize={sanitizer.split(',')[0]}"]
                subprocess.check_call([*command, "-c", source, "-o", objects[-1]])
            program = str(Path(folder) / "stress")
            sources = [*map(str, sorted((NATIVE / "core").glob("*.cpp"))), str(NATIVE / "test" / "stress.cpp")]
            subprocess.check_call(
                [*compiler, *FLAGS.split(), *known, f"-fsanitize={sanitizer}", *sources, *objects, "-o", program]
            )
            for ranks in ("2", "4"):
                print(sanitizer, flush=True)
                code = subprocess.call([program, ranks, "300"])
                if code != 0:
                    return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
