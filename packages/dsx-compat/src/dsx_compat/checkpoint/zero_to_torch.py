"""Full weights in fp32, fp16 or bf16 from a checkpoint folder, as a command.

    python -m dsx_compat.checkpoint.zero_to_torch CHECKPOINT_DIR OUTPUT_DIR --dtype bf16 [--safe_serialization]

The weights are those of `zero_to_fp32.py` in another dtype: they are rounded once, from the masters.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .zero_to_fp32 import run_command

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    return run_command("zero_to_torch", argv, dtype=None)


if __name__ == "__main__":
    sys.exit(main())
