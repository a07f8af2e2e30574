"""A text file that only grows, across several runs and after crashes.

If a crash cut the last line, that line is ended before new lines follow. If the file or its folder is removed during
the run, writes would go to a file without a name; then the file is made again, with its head, and a warning says what
was lost.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path

from ..events import last_byte

__all__ = ["AppendedFile", "is_gone"]

logger = logging.getLogger("dsx_monitor")


def is_gone(path: Path, fd: int) -> bool:
    """Whether `path` no longer names the open file `fd`."""
    try:
        named = os.stat(path)
    except OSError:
        return True
    opened = os.fstat(fd)
    return (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino)


def warn_of_loss(path: Path) -> None:
    """Warn that a file was removed during the run."""
    logger.warning(
        "monitor: %s was removed while the run goes on; what it held is lost, and the file is made again", path
    )


class AppendedFile:
    """Opens `path` for appending and makes its folder. Raises OSError.

    Args:
        head: first line of an empty file.
        on_loss: called with the path if the file was removed.
    """

    def __init__(self, path: Path, head: str = "", on_loss: Callable[[Path], None] = warn_of_loss) -> None:
        self.path, self._head, self._on_loss = path, head, on_loss
        self._stream = self._open()

    def append(self, text: str) -> None:
        """Write whole lines and hand them to the operating system."""
        if is_gone(self.path, self._stream.fileno()):
            self._on_loss(self.path)
            self._stream.close()
            self._stream = self._open()
        self._stream.write(text)
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _open(self) -> TextIOWrapper:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        last = last_byte(self.path)  # not the whole file: with many labels this runs often
        stream = self.path.open("a", encoding="utf-8", newline="")
        if not last:
            stream.write(self._head)
        elif last != b"\n":
            stream.write("\n")
        return stream
