"""`dsx ops`: report which optimizer kernels are built, which instruction set is in use, and what is missing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from . import __version__, native_status


def report() -> str:
    """The status as lines of text."""
    s = native_status()
    lines = [f"dsx-ops {__version__}, torch {s['torch']}"]
    if s["native"]:
        lines.append(
            f"native CPU kernels  yes: {s['isa']} in use; this CPU can run {', '.join(s['isas'])} (DSX_ISA chooses)"
        )
    else:
        lines.append(f"native CPU kernels  NO: {s['reason']}")
    lines.append(f"threads             {s['threads']['count']} ({s['threads']['backend']})")
    if s["sanitizer"]:
        lines.append(f"sanitizer           {s['sanitizer']}")
    lines.append(f"CUDA tensors        {s['cuda']}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m dsx_ops") -> int:
    """Print the report; `--json` for machines."""
    parser = argparse.ArgumentParser(prog=prog, description="Report what is built, and what is missing and why.")
    parser.add_argument("-V", "--version", action="version", version=f"dsx-ops {__version__}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    print(json.dumps(native_status(), indent=1) if parser.parse_args(argv).json else report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
