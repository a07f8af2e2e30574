#!/usr/bin/env python3
"""clang-format over the native code that follows `.clang-format`: python tools/format_native.py [--check]

`--check` changes nothing and fails where something would change. Needs clang-format in this interpreter's environment
(the lint tools have it). Its output depends on the version, which is therefore pinned there.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tools/native", "packages/dsx-ops/native", "packages/dsx-comm/native", "packages/dsx-simcuda/src")
SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}


def main(arguments: list[str]) -> int:
    """Format, or check."""
    if arguments not in ([], ["--check"]):
        print(__doc__)
        return 2
    files = [str(p) for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*")) if p.suffix in SUFFIXES]
    program = Path(sys.executable).with_name("clang-format")
    if not program.exists():
        print(f"clang-format is not installed beside {sys.executable}: pip install 'clang-format>=23,<24'")
        return 2
    how = ["--dry-run", "--Werror"] if arguments else ["-i"]
    return subprocess.call([str(program), *how, *files], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
