"""``dsx bench``: measures a part of the system on this machine. ``dsx bench comm`` measures the collectives."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark; returns its exit code, or 2 for an unknown name."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] != ["comm"]:
        sys.stderr.write("usage: dsx bench comm [options]; dsx bench comm --help tells more\n")
        return 0 if words[:1] in (["-h"], ["--help"]) else 2
    from dsx_comm.benchmark import main as run

    return run(words[1:])
