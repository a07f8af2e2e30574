"""``dsx report``: write one HTML page about a training run, from the files that the run has written."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dsx_core import CommandParser

from ._version import __version__


def main(argv: Sequence[str] | None = None, *, prog: str = "dsx report") -> int:
    """Write the page and print its path. Returns 1 if the folder has no files of a run."""
    parser = CommandParser(
        prog=prog, description="Write the HTML report of a training run.", version=f"dsx {__version__}"
    )
    parser.add_argument("run_dir", help="the folder the run wrote its metrics to")
    parser.add_argument("-o", "--out", help="the file to write (default: report.html in that folder)")
    parser.add_argument(
        "--picture", metavar="FILE", help="also write memory and timeline of the last recorded step as SVG"
    )
    parser.add_argument("--json", action="store_true", help="print the page's path as JSON")
    args = parser.parse_args(argv)
    # Lazy imports: `--help` needs none of it.
    from dsx_monitor.picture import run_picture
    from dsx_monitor.report import write_report

    try:
        if args.picture:  # first: where the run has recorded no step, nothing is written
            Path(args.picture).write_text(run_picture(args.run_dir), encoding="utf-8")
        path = write_report(args.run_dir, args.out)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 1
    sys.stdout.write(json.dumps({"report": str(path)}) + "\n" if args.json else f"{path}\n")
    return 0
