"""`dsx-nvme explain`: what is built, what the kernel allows, whether cuFile loads, how files and folders are
accessed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from dsx_core import CommandParser

from . import cufile, files, native
from ._version import __version__


def status() -> dict[str, Any]:
    """The facts that the report shows."""
    library, reason = cufile.load()
    return {
        **native.native_status(),
        "version": __version__,
        "torch": torch.__version__,
        "cufile": library.where if library else "",
        "cufile_reason": reason,
    }


def text(found: dict[str, Any]) -> str:
    """The facts as lines."""
    lines = [f"dsx-nvme {found['version']}, torch {found['torch']}"]
    lines.append("native engines  yes" if found["native"] else f"native engines  NO: {found['reason']}")
    lines += [f"  {name:13} {'yes' if not why else 'NO: ' + why}" for name, why in found["engines"].items()]
    lines.append(f"cuFile          {found['cufile'] or 'NO: ' + found['cufile_reason']}")
    if found["sanitizer"]:
        lines.append(f"sanitizer       {found['sanitizer']}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, *, prog: str = "dsx-nvme explain") -> int:
    """Print the report; returns 1 if a path cannot be opened."""
    parser = CommandParser(prog=prog, description=__doc__)
    parser.add_argument("paths", nargs="*", help="folders or files")
    parser.add_argument("--json", action="store_true", help="for machines")
    args = parser.parse_args(argv)
    try:
        reached = {path: files.access(path) for path in args.paths}
    except OSError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 1
    found = status()
    if args.json:
        sys.stdout.write(json.dumps({**found, "paths": {p: vars(a) for p, a in reached.items()}}, indent=1) + "\n")
        return 0
    sys.stdout.write("\n".join([text(found), *(files.explain(p) for p in reached)]) + "\n")
    return 0
