"""Commands whose output goes into another program, which may end first (`dsx ... | head`)."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable

__all__ = ["end_with_reader"]


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
