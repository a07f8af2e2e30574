"""A script's command line: where it names its configuration, and the options that must follow it.

The tuner starts the user's script with another configuration file and nothing else changed, except for the options of
`arg_mappings`: scripts such as those of the Hugging Face Trainer take batch sizes on the command line and compare them
with the configuration. Pure functions over lists of words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .documents import value_at
from .errors import AutotuningError

__all__ = ["CONFIG_OPTIONS", "config_position", "mapped_numbers", "with_config", "with_mappings"]

CONFIG_OPTIONS = ("--deepspeed_config", "--dsx_config", "--deepscale_config", "--deepspeed", "--config")
"""Options whose value is the configuration file, in the order in which they are looked for; a dash may stand for each
underscore."""


def config_position(args: Sequence[str]) -> tuple[int, str]:
    """The position of the configuration: the index of its word and the file's path.

    Raises:
        AutotuningError: there is no such option, or its value is no file.
    """
    named = []
    for option in CONFIG_OPTIONS:
        found = _find(args, option)
        if found is not None and found[1]:
            if Path(found[1]).is_file():
                return found
            named.append(f"{option} {found[1]}")
    if named:
        raise AutotuningError(f"autotuning: {named[0]}: there is no such file, expected the script's configuration")
    raise AutotuningError(
        "autotuning: the script's arguments name no configuration file, and there is no other way to give the script"
        f" another one; let it take one of {', '.join(CONFIG_OPTIONS)} and pass it"
        " to dsx.initialize"
    )


def with_config(args: Sequence[str], path: str) -> list[str]:
    """The arguments with another configuration file."""
    index, _ = config_position(args)
    words = list(args)
    words[index] = _replaced(words[index], path)
    return words


def mapped_numbers(args: Sequence[str], mappings: Mapping[str, str]) -> dict[str, int]:
    """Configuration key -> whole number that the command line gives for it."""
    found = {}
    for key, option in mappings.items():
        value = _find(args, option)
        if value is not None and value[1].isdecimal():
            found[key] = int(value[1])
    return found


def with_mappings(args: Sequence[str], mappings: Mapping[str, str], document: Mapping[str, Any]) -> list[str]:
    """The arguments with each mapped option at its value in the document; options that are not there are added.

    A key without a value, or left to "auto", leaves its option as it is.
    """
    words = list(args)
    for key, option in mappings.items():
        value = value_at(document, key)
        if value is None or value == "auto":
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        place = _find(words, option)
        if place is None:
            words += [option, text]
        else:
            words[place[0]] = _replaced(words[place[0]], text)
    return words


def _replaced(word: str, value: str) -> str:
    """The word with another value: `--option=value`, or the value itself."""
    option, equals, _ = word.partition("=")
    return f"{option}={value}" if equals and option.startswith("--") else value


def _find(args: Sequence[str], option: str) -> tuple[int, str] | None:
    """Index of the word that holds an option's value, and the value; the last one counts, as argparse has it."""
    spellings = (option, option.replace("_", "-") if option.startswith("--") else option)
    for index in reversed(range(len(args))):
        name, equals, value = args[index].partition("=")
        if name not in spellings:
            continue
        if equals:
            return index, value
        follows = index + 1 < len(args) and not args[index + 1].startswith("--")
        return (index + 1, args[index + 1]) if follows else None
    return None
