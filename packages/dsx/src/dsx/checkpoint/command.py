"""`dsx checkpoint`: look at checkpoints without training.

dsx checkpoint verify ckpt               every byte of the checkpoint that `latest` names
dsx checkpoint verify ckpt --tag best    of another one
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .errors import CheckpointError


def main(argv: Sequence[str]) -> int:
    """Run `dsx checkpoint`. Returns 0, or 1 when the checkpoint is damaged or is none."""
    parser = argparse.ArgumentParser(prog="dsx checkpoint", description="look at checkpoints without training")
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="read every byte of a checkpoint and compare it with what was saved")
    verify.add_argument("folder", help="the folder that save_checkpoint was given")
    verify.add_argument("--tag", help="which checkpoint; without it the one that 'latest' names")
    given = parser.parse_args(list(argv))
    from .reading import open_checkpoint  # late: --help answers without torch
    from .verifying import verify_all

    try:
        reader = open_checkpoint(given.folder, given.tag)
        verified = verify_all(reader.folder, reader.index)
    except (CheckpointError, OSError) as error:
        sys.stderr.write(f"dsx checkpoint verify: {error}\n")
        return 1
    size = f"{verified.nbytes / 1e6:,.1f} MB"
    sys.stdout.write(f"{verified.folder}: ok, {verified.tensors} tensors in {verified.files} files, {size}\n")
    if verified.foreign:
        sys.stdout.write(f"not written by dsx and not looked at: {', '.join(verified.foreign)}\n")
    return 0
