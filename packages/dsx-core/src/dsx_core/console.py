"""Programs of the command line: they end quietly with their reader or on Ctrl-C, and name the word that was meant."""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .errors import nearest

__all__ = ["CommandParser", "end_with_reader", "run_program"]


def end_with_reader(command: Callable[[], int]) -> int:
    """Run a command; returns its exit code, or 128 + SIGPIPE (141) if the reader of its output has ended.

    As a program of the shell that SIGPIPE ends, the command then says nothing. A broken pipe of anything else is raised
    as ever.
    """
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _reader_has_ended():
            raise
        return 128 + signal.SIGPIPE


def run_program(command: Callable[[], int | None]) -> int:
    """Run the command of a program; returns its exit code: 130 (128 + SIGINT) after Ctrl-C, 141 if the reader of its
    output has ended. Both end without a traceback.
    """
    try:
        return end_with_reader(lambda: int(command() or 0))
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return 128 + signal.SIGINT


def _reader_has_ended() -> bool:
    """Whether standard output is what broke; then it leads nowhere, so that the flush at exit says nothing."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # it is no file, but for example a test's buffer
        return False
    poll = select.poll()
    poll.register(output, select.POLLOUT)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output)
    os.close(nowhere)
    return True


class CommandParser(argparse.ArgumentParser):
    """An `ArgumentParser` that names the option or the command that was meant, where one is unknown.

    Args:
        version: what `--version` prints; the parser has no such option without it.
        **kwargs: those of `argparse.ArgumentParser`.
    """

    def __init__(self, *args: Any, version: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if version is not None:
            self.add_argument("-V", "--version", action="version", version=version, help="print the version")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Like argparse's, but nothing may be left: so the parser of the subcommand, which knows its options, says what
        was meant.
        """
        found, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return found, left

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message with what was meant, and end with 2."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            message += "".join(f"; {word}: use {meant}" for word in unknown.split() if (meant := self.meant(word)))
        wrong = re.search(r"invalid choice: '([^']*)'", message)
        if wrong:
            choices = [str(choice) for action in self._actions for choice in action.choices or ()]
            near = nearest(wrong[1], choices)
            message += f"; did you mean {' or '.join(near)}?" if near else ""
        super().error(message)

    def meant(self, word: str) -> str:
        """A sentence that names the option most like an unknown one; empty if there is none."""
        if not word.startswith("--"):
            return ""
        name = word[2:].partition("=")[0].replace("_", "-")
        options = [option for option in reversed(self._option_string_actions) if option.startswith("--")]
        known = {option[2:].replace("_", "-"): option for option in options}
        return " or ".join(known[near] for near in nearest(name, known))
