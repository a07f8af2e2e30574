"""Subcommands that are found by their entry points: a package declares its own, and nothing above has a list of them.

[project.entry-points."dsx.commands"]
pipe = "dsx_pipe.cli:main"

The function takes the words after the subcommand's name and `prog`, the name to show in messages, and returns an exit
code. The first sentence of its module's docstring is its line in the help.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from dsx_core import nearest, run_program

__all__ = ["GROUP", "Subcommand", "installed_commands", "run_command"]

GROUP = "dsx.commands"
"""The group of entry points whose names are the subcommands of `dsx`."""


@dataclass(frozen=True)
class Subcommand:
    """A subcommand.

    Attributes:
        name: the word that calls it.
        target: `package.module:function`; imported when it is called.
        distribution: the package that declares it; "" if it is not known.
    """

    name: str
    target: str
    distribution: str = ""

    @property
    def summary(self) -> str:
        """The first sentence of its module's docstring, without a name before a colon; nothing is imported for it."""
        top, *rest = self.target.partition(":")[0].split(".")
        found = util.find_spec(top)
        folders = found.submodule_search_locations if found else None
        path = Path(folders[0]).joinpath(*rest).with_suffix(".py") if folders and rest else None
        if path is None or not path.is_file():
            return ""
        text = " ".join((ast.get_docstring(ast.parse(path.read_bytes())) or "").split())
        text = re.sub(r"^`+[^`]+`+(?: and `+[^`]+`+)?(?: \([^)]*\))?: ", "", text)
        return re.split(r"[.:;] |\.$", text)[0].strip().replace("`", "")

    def run(self, words: Sequence[str], prog: str) -> int:
        """Import it and run it. Raises ModuleNotFoundError if its package is missing."""
        module, _, function = self.target.partition(":")
        return int(getattr(importlib.import_module(module), function)(list(words), prog=prog) or 0)


def installed_commands() -> dict[str, Subcommand]:
    """The subcommands of all installed packages, by name in alphabetical order."""
    found = metadata.entry_points(group=GROUP)
    made = [Subcommand(one.name, one.value, one.dist.name if one.dist else "") for one in found]
    return {one.name: one for one in sorted(made, key=lambda one: one.name)}


def run_command(
    commands: Mapping[str, Subcommand], argv: Sequence[str] | None, *, prog: str, version: str,
    tasks: Mapping[str, Sequence[str]] | None = None,
) -> int:  # fmt: skip
    """Run the subcommand that the first word names.

    Args:
        commands: the subcommands by name.
        argv: the words after the program's name; None: those of this process.
        prog: the program's name.
        version: what `--version` prints.
        tasks: headings of the help, each with the names below it; the others come last.

    Returns:
        the subcommand's exit code; 2 for an unknown name; 130 after Ctrl-C; 141 if the reader of the output has ended.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    return run_program(lambda: _run(commands, words, prog, version, tasks or {}))


def _run(
    commands: Mapping[str, Subcommand], words: list[str], prog: str, version: str, tasks: Mapping[str, Sequence[str]]
) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(_usage(commands, prog, tasks))
        return 0 if words else 2
    name, rest = words[0], words[1:]
    if name in ("-V", "--version"):
        sys.stdout.write(f"{version}\n")
        return 0
    if name in commands:
        return commands[name].run(rest, f"{prog} {name}")
    near = nearest(name, commands)
    meant = f"launch {name}" if name.startswith("-") and "launch" in commands else " or ".join(near)
    hint = f"; did you mean '{prog} {meant}'?" if meant else f"; see {prog} --help"
    sys.stderr.write(f"{prog}: unknown command {name!r}{hint}\n")
    return 2


def _usage(commands: Mapping[str, Subcommand], prog: str, tasks: Mapping[str, Sequence[str]]) -> str:
    width = max(map(len, commands), default=0)
    headed = {name for names in tasks.values() for name in names}
    groups = {**tasks, "other commands" if headed else "commands": [name for name in commands if name not in headed]}
    lines = [f"usage: {prog} <command> [options]"]
    for heading, names in groups.items():
        rows = [f"  {name:{width}}  {commands[name].summary}" for name in names if name in commands]
        lines += [f"{heading}:", *rows] if rows else []
    return "\n".join([*lines, f"{prog} <command> --help tells more; {prog} --version prints the version", ""])
