"""``dsx completion``: print what makes a shell complete the words of ``dsx``.

    eval "$(dsx completion bash)"       in ~/.bashrc
    eval "$(dsx completion zsh)"        in ~/.zshrc
    dsx completion fish | source        in ~/.config/fish/config.fish

The printed text has all words of the commands that are installed now, so completing starts no program. The words are
read from the commands' own help texts.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout

from dsx_core import CommandParser

from ._version import __version__
from .commands import Subcommand, installed_commands

__all__ = ["main", "words_of"]

_OPTION = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*")
_ONE_OF = re.compile(r"^  \{([\w,-]+)\}", re.M)
_LISTED = re.compile(r"^commands:\n((?:  .*\n)+)", re.M)

_BASH = """_dsx_words() {
  case "$1" in
%s
  esac
}
_dsx() {
  local key="" last word options
  local current="${COMP_WORDS[COMP_CWORD]}"
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case "$word" in -*) continue ;; esac
    last="${key:+$key }$word"
    if [ -n "$(_dsx_words "$last")" ]; then key="$last"; fi
  done
  options="$(_dsx_words "$key")"
  case "$current" in
    -*) ;;
    *) options="$(printf '%%s\\n' $options | grep -v '^-')" ;;
  esac
  COMPREPLY=($(compgen -W "$options" -- "$current"))
}
complete -o default -F _dsx dsx
"""


def words_of(command: Subcommand, prog: str) -> dict[str, list[str]]:
    """For a command and each command below it, by their names after `dsx`: the words that may follow, from the help."""
    found: dict[str, list[str]] = {}
    _read_help(command, [], prog, found)
    return found


def _read_help(command: Subcommand, below: list[str], prog: str, found: dict[str, list[str]]) -> None:
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(io.StringIO()):
            command.run([*below, "--help"], prog)
    except SystemExit:
        pass  # that is how argparse ends after its help
    except ModuleNotFoundError:
        return  # the command needs a package that is not here
    text = said.getvalue()
    inner = [name for names in _ONE_OF.findall(text) for name in names.split(",")] if not below else []
    for rows in _LISTED.findall(text):
        inner += [row.split()[0] for row in rows.splitlines() if row.split()]
    options = [option for line in text.splitlines() if line.startswith("  -") for option in _OPTION.findall(line)]
    found[" ".join([command.name, *below])] = [*dict.fromkeys([*inner, *options])]
    for name in dict.fromkeys(inner):
        _read_help(command, [*below, name], prog, found)


def _table(commands: Mapping[str, Subcommand]) -> dict[str, list[str]]:
    table = {"": [*commands, "--help", "--version"]}
    for name, command in commands.items():
        table |= words_of(command, f"dsx {name}")
    return table


def _for_bash(table: Mapping[str, Sequence[str]]) -> str:
    cases = [f'    "{path}") echo "{" ".join(words)}" ;;' for path, words in table.items()]
    return _BASH % "\n".join(cases)


def _for_zsh(table: Mapping[str, Sequence[str]]) -> str:
    """zsh reads functions of bash once it is asked to."""
    return f"autoload -U +X compinit && compinit -u\nautoload -U +X bashcompinit && bashcompinit\n{_for_bash(table)}"


def _for_fish(table: Mapping[str, Sequence[str]]) -> str:
    lines = ["complete -c dsx -f"]
    for path, words in table.items():
        seen = [f"__fish_seen_subcommand_from {name}" for name in path.split()]
        inner = [word for word in words if not word.startswith("-")]
        seen += [f"not __fish_seen_subcommand_from {' '.join(inner)}"] if inner and path else []
        asked = "; and ".join(seen) if path else "__fish_use_subcommand"
        lines += [f"complete -c dsx -n '{asked}' -a '{word}'" for word in inner]
        lines += [f"complete -c dsx -n '{asked}' -l {word[2:]}" for word in words if word.startswith("-")]
    return "\n".join(lines) + "\n"


_SHELLS = {"bash": _for_bash, "zsh": _for_zsh, "fish": _for_fish}


def main(argv: Sequence[str] | None = None, *, prog: str = "dsx completion") -> int:
    """Print the text for a shell; returns 0."""
    parser = CommandParser(
        prog=prog,
        description="Print what makes a shell complete the words of dsx.",
        epilog='In ~/.bashrc or ~/.zshrc: eval "$(dsx completion bash)", or zsh. In fish: dsx completion fish | source',
        version=f"dsx {__version__}",
    )
    parser.add_argument("shell", nargs="?", choices=sorted(_SHELLS), default="bash", help="the shell (bash)")
    parser.add_argument("--json", action="store_true", help="print the words of every command as JSON instead")
    args = parser.parse_args(argv)
    table = _table(installed_commands())
    sys.stdout.write(json.dumps(table, indent=1) + "\n" if args.json else _SHELLS[args.shell](table))
    return 0
