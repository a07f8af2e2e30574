"""``python -m dsx.config`` and ``dsx config``: check and explain a configuration, print its schema or reference.

explain FILE [--world-size N] [--short]   every value in effect and where it came from
check FILE [--world-size N]               what happens with each key; then "ok", or all problems
schema                                    JSON schema for editors
types                                     the types of all keys, dsx/config/typed.py
reference                                 the page docs/config.md
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from dsx_core import CommandParser, run_program

from .._version import __version__
from ..errors import DsxConfigError

if TYPE_CHECKING:
    from .model import Config

__all__ = ["main"]


def main(argv: Sequence[str] | None = None, *, prog: str = "dsx config") -> int:
    """Run one command; return 0, or 1 for a configuration with problems."""
    return run_program(lambda: _run(argv, prog))


def _run(argv: Sequence[str] | None, prog: str) -> int:
    arguments = _parser(prog).parse_args(argv)
    try:
        if arguments.command == "check" and arguments.json:
            return _check_as_json(arguments)
        sys.stdout.write(_COMMANDS[arguments.command](arguments))
    except DsxConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=prog, description="Look at a configuration without training.", version=f"dsx {__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("explain", "show every value in effect and where it came from"),
        ("check", "say what happens with each key here, and report all problems"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("file", help="JSON file, or base64 text")
        command.add_argument("--world-size", type=int, default=1, help="number of data-parallel ranks (1)")
        if name == "explain":
            command.add_argument("--short", action="store_true", help="leave plain defaults out")
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    commands.add_parser("schema", help="print the JSON schema for editors")
    commands.add_parser("types", help="print the types of the keys, the file dsx/config/typed.py")
    commands.add_parser("reference", help="print the page docs/config.md")
    return parser


def _explain(arguments: argparse.Namespace) -> str:
    from .load import load_config  # lazy import: `--help` needs no pydantic

    config = load_config(arguments.file, world_size=arguments.world_size, template=True)
    _warn(config)
    table = config.explain()
    if arguments.json:
        rows = table.chosen() if arguments.short else table.rows
        return json.dumps([vars(row) for row in rows], indent=2) + "\n"
    return f"{table.render(everything=not arguments.short)}\n{config.precision.describe()}\n"


def _check(arguments: argparse.Namespace) -> str:
    from .load import load_config  # lazy import, as above
    from .verdicts import render, verdicts

    sys.stdout.write(render(verdicts(arguments.file, world_size=arguments.world_size)))
    config = load_config(arguments.file, world_size=arguments.world_size, template=True)
    _warn(config)
    return f"{config.source}: ok\n"


def _check_as_json(arguments: argparse.Namespace) -> int:
    from .load import load_config  # lazy import, as above
    from .verdicts import verdicts

    keys = [asdict(verdict) for verdict in verdicts(arguments.file, world_size=arguments.world_size)]
    answer: dict[str, object] = {"ok": True, "keys": keys, "problems": [], "warnings": []}
    try:
        config = load_config(arguments.file, world_size=arguments.world_size, template=True)
        answer["warnings"] = [str(warning) for warning in config.warnings]
    except DsxConfigError as error:
        answer |= {"ok": False, "problems": [asdict(problem) for problem in error.problems]}
    sys.stdout.write(json.dumps(answer, indent=2, default=str) + "\n")
    return 0 if answer["ok"] else 1


def _warn(config: Config) -> None:
    for warning in config.warnings:
        sys.stderr.write(f"{warning}\n")


def _schema(arguments: argparse.Namespace) -> str:
    from .json_schema import json_schema  # lazy import, as above

    return json.dumps(json_schema(), indent=2) + "\n"


def _reference(arguments: argparse.Namespace) -> str:
    from .reference import reference  # lazy import, as above

    return reference()


def _types(arguments: argparse.Namespace) -> str:
    from .typing_source import source  # lazy import, as above

    return source()


_COMMANDS = {"explain": _explain, "check": _check, "schema": _schema, "types": _types, "reference": _reference}
