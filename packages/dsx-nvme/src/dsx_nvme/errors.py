"""The errors of dsx-nvme. Each says what it got, what it expected and what to do.

If a file system or the kernel refuses something, that is a `TransferError`: an `OSError` with errno and file name. A
mistake of the caller is a `ValueError`. A conflict between threads or processes is a `RuntimeError`.
"""

from __future__ import annotations

import errno
import os

import dsx_core


class NvmeError(RuntimeError):
    """Base class of errors at run time that do not come from a system call."""


class DataRaceError(NvmeError):
    """A tensor was used while a transfer from or to it was in flight. The transferred bytes are undefined."""


class FolderInUseError(NvmeError):
    """The folder of a store belongs to another store."""


class ForkError(NvmeError):
    """A forked child waits for a transfer that its parent process has begun."""


class EngineStartError(NvmeError):
    """An engine cannot start its threads: the process or its user has reached a limit."""


class BudgetError(dsx_core.CodedError, NvmeError):
    """A buffer pool or a store has too little room for a request."""

    code = "DSX308"


class TensorError(ValueError):
    """A tensor that cannot be transferred: its layout, type or device. Nothing was moved."""


class OptionError(ValueError):
    """An option out of its range, or an unknown name."""


class FormatError(ValueError):
    """A file does not have the format that was expected."""


class TransferError(OSError):
    """A transfer failed: `filename`, `errno`; `op` ("read" or "write"); `offset` of the failure; `nbytes` asked for."""

    def __init__(self, number: int, text: str, path: str, *, op: str, offset: int, nbytes: int) -> None:
        super().__init__(number, text, path)
        self.op = op
        self.offset = offset
        self.nbytes = nbytes

    @classmethod
    def of(cls, number: int, path: str, *, op: str, offset: int, nbytes: int) -> TransferError:
        """The error for an errno. `offset`: the place of the failure; `nbytes`: size of the whole transfer."""
        hint = _HINTS.get(number, "")
        text = f"{os.strerror(number)}: {op} of {nbytes} bytes failed at file offset {offset}{hint}"
        return cls(number, text, path, op=op, offset=offset, nbytes=nbytes)

    def __reduce__(self) -> tuple:  # OSError's own method drops the keywords
        state = {"op": self.op, "offset": self.offset, "nbytes": self.nbytes}
        return (_rebuild, (type(self), self.errno, self.strerror, self.filename, state))


class EndOfFileError(TransferError):
    """A file ends before the bytes that were to be read."""

    @classmethod
    def at(cls, end: int, path: str, *, offset: int, where: int, nbytes: int) -> EndOfFileError:
        """The error for a read of `nbytes` from `offset` in a file of `end` bytes. `where`: the first missing byte."""
        text = f"the file ends at {end}, {nbytes} bytes were to be read from offset {offset}"
        return cls(errno.ENODATA, text, path, op="read", offset=where, nbytes=nbytes)


class ChecksumError(TransferError):
    """The bytes that were read are not those that were written."""


_HINTS = {
    errno.ENOSPC: "; free space on that file system or choose another folder",
    errno.EFBIG: "; the process or the file system limits the size of a file (ulimit -f)",
    errno.ENOMEM: "; the process has reached its limit of memory (ulimit -v, or its container's)",
    errno.EMFILE: "; raise the limit of open files (ulimit -n) or wait for transfers before starting more",
}


def _rebuild(kind: type, number: int, text: str, path: str, state: dict) -> TransferError:
    return kind(number, text, path, **state)
