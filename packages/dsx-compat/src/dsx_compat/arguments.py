"""The command-line options of training scripts: ``--deepspeed`` and ``--deepspeed_config``.

Scripts written for DeepSpeed define and read these names, so they are kept; ``--dsx_config`` is the same option as
``--deepspeed_config``.
"""

from __future__ import annotations

import argparse

__all__ = ["add_config_arguments"]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options to ``parser``, in a separate group.

    ``args.deepspeed`` tells whether the script should train with the engine; ``args.deepspeed_config`` is the path that
    ``dsx.initialize(args=args, ...)`` reads. Two older names are accepted, but not shown in the help.

    Args:
        parser: the parser of the script.

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
