"""`python -m dsx_ops`: what is built, which instruction set is in use, what is missing and why."""

from __future__ import annotations

import json
import sys

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


def main() -> int:
    """Print the report; `--json` for machines."""
    print(json.dumps(native_status(), indent=1) if "--json" in sys.argv[1:] else report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
