"""`dsx-compress`: show what a file of compressed weights holds."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dsx_core import CommandParser, run_program

from ._version import __version__

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None, *, prog: str = "dsx-compress") -> int:
    """Run the command line; returns the exit status."""
    return run_program(lambda: _run(arguments, prog))


def _run(arguments: Sequence[str] | None, prog: str) -> int:
    parser = CommandParser(prog=prog, description="Compressed models on disk.", version=f"dsx-compress {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="print what was compressed, by how much and with what error")
    report.add_argument("file", help="a safetensors file that export_model wrote")
    report.add_argument("--json", action="store_true", help="print JSON")
    report.add_argument("--svg", metavar="PATH", help="also draw sparsity and error of every tensor")
    asked = parser.parse_args(arguments)

    from .errors import CompressionError
    from .export import read_exported
    from .report import report_of_file

    try:
        found = report_of_file(read_exported(asked.file))
        if asked.svg:
            found.write_svg(asked.svg)
    except (CompressionError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    print(found.to_json() if asked.json else found.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
