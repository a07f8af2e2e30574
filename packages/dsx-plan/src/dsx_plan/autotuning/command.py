"""``dsx autotune``: search for a good configuration by trials, as ``dsx launch --autotuning tune`` does."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dsx_launch.main import main as launch


def main(argv: Sequence[str] | None = None, *, prog: str = "dsx autotune") -> int:
    """Search. Takes the options of ``dsx launch``, the script and its arguments."""
    words = sys.argv[1:] if argv is None else argv
    return launch(["--autotuning", "tune", *words], prog=prog)
