"""The command `ds_to_universal` of DeepSpeed, with its options. It writes a checkpoint of dsx, which can be loaded at
every stage and with every number of ranks.

    python -m dsx_compat.checkpoint.ds_to_universal --input_folder RUN/global_step100 --output_folder RUN/universal100

A checkpoint of dsx needs no conversion; it is copied.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dsx_checkpoint.errors import CheckpointError
from dsx_checkpoint.foreign.recognising import source_of
from dsx_checkpoint.foreign.source import write_source

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="ds_to_universal", description="a checkpoint that loads anywhere")
    parser.add_argument("--input_folder", required=True, help="the folder of a tag")
    parser.add_argument("--output_folder", required=True, help="the folder of the new tag")
    for option, text in (
        ("--num_extract_workers", "without meaning: tensors are read where they are written"),
        ("--num_merge_workers", "without meaning, as --num_extract_workers"),
    ):
        parser.add_argument(option, type=int, default=1, help=text)
    parser.add_argument("--keep_temp_folder", action="store_true", help="without meaning: there is no such folder")
    parser.add_argument("--no_strict", action="store_true", help="without meaning: every tensor is checked")
    parser.add_argument("--inject_missing_state", action="store_true", help="without meaning: nothing is missing")
    given = parser.parse_args(argv)
    source, target = Path(given.input_folder), Path(given.output_folder)
    try:
        tag = source.name if (source / "dsx.json").is_file() else None
        found = source_of(source.parent if tag else source, tag)
        written = write_source(found, target.parent, target.name)
    except (CheckpointError, OSError) as error:
        sys.stderr.write(f"ds_to_universal: {error}\n")
        return 1
    sys.stdout.write(f"{written}: written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
