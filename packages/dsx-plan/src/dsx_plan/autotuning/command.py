"""``dsx autotune``: the same as ``dsx launch --autotuning tune``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dsx_launch.main import main as launch


def main(argv: Sequence[str] | None = None) -> int:
    """Search. Takes the options of ``dsx launch``, the script and its arguments."""
    words = sys.argv[1:] if argv is None else argv
    return launch(["--autotuning", "tune", *words], prog="dsx autotune")
