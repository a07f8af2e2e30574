"""The command-line options every training script shares: ``--deepspeed`` and ``--deepspeed_config``.

Scripts written for the upstream system define and read exactly these names, so they are kept; ``--dsx_config`` is the
same option under its own name.
"""

from __future__ import annotations

import argparse

__all__ = ["add_config_arguments"]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options to ``parser`` in a group of their own.

    ``args.deepspeed`` tells whether the script should train through the engine; ``args.deepspeed_config`` is the path
    ``dsx.initialize(args=args, ...)`` reads. Two older names are understood and not shown in the help.

    Args:
        parser: parser of the script.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("dsx", "training engine")
    group.add_argument("--deepspeed", action="store_true", default=False, help="train through the dsx engine")
    group.add_argument(
        "--deepspeed_config", "--dsx_config", dest="deepspeed_config", default=None, type=str, metavar="FILE",
        help="JSON configuration of the engine",
    )  # fmt: skip
    group.add_argument("--deepscale", action="store_true", default=False, help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser
