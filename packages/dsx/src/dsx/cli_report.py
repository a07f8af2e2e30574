"""``dsx report``: one self-contained HTML page about a training run, from the files the run has written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and print its path. Returns 1 if the folder has no files of a run."""
    parser = argparse.ArgumentParser(prog="dsx report", description="Write the HTML report of a training run.")
    parser.add_argument("run_dir", help="the folder the run wrote its metrics to")
    parser.add_argument("-o", "--out", help="the file to write (default: report.html in that folder)")
    args = parser.parse_args(argv)
    from dsx_monitor.report import write_report  # lazy import: `--help` needs none of it

    try:
        path = write_report(args.run_dir, args.out)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"dsx report: {error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0
