"""Opens a file for transfers and decides how: with which engine, with or without the page cache, with which alignment.

If the file system offers direct I/O, a file is opened twice: with O_DIRECT for the aligned middle of a transfer, and
without it for the unaligned head and tail. The decision is a record (`Access`) with its reasons; `explain(path)` prints
it. Pipes and sockets are refused: they have no offsets, and opening a pipe blocks until another process opens it too.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
from dataclasses import dataclass, field
from typing import Protocol

from . import native
from .errors import OptionError, TransferError

ENGINES = ("auto", *native.ENGINES, "python")
PAGE = 4096
O_DIRECT = getattr(os, "O_DIRECT", 0)
IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"}
# These errors mean that space cannot be reserved here; writing may still work.
_CANNOT_RESERVE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}


@dataclass(frozen=True)
class Access:
    """The way in which a file is accessed, and the reasons."""

    engine: str
    direct: bool
    memory_align: int  # bytes; direct I/O needs addresses that are multiples of this
    offset_align: int  # bytes; and offsets and lengths that are multiples of this
    reasons: tuple[str, ...]


class Registrar(Protocol):
    """A library that has its own handles for open files (cuFile)."""

    def register_file(self, fd: int) -> int:
        """Register an open file; returns its handle."""
        ...

    def deregister_file(self, handle: int) -> None:
        """Release a handle."""
        ...


@dataclass
class OpenFile:
    """Open descriptors of one file. Several transfers may share it; the last one to `release` closes it."""

    path: str
    write: bool
    access: Access
    plain_fd: int
    direct_fd: int
    identity: tuple[int, int]  # device and inode
    # Registrations with engines, by process and name: the engines of a forked child do not know its parent's numbers.
    slots: dict[tuple[int, str], int] = field(default_factory=dict)
    # Handles of libraries, by process and library; each library is asked once per open file.
    handles: dict[tuple[int, Registrar], int] = field(default_factory=dict)
    users: int = 1

    def fileno(self) -> int:
        """The descriptor that goes through the page cache."""
        return self.plain_fd

    def handle_of(self, library: Registrar) -> int:
        """This file's handle in `library`. It is registered at the first call and released when the file is closed."""
        key = (os.getpid(), library)
        if key not in self.handles:
            self.handles[key] = library.register_file(self.direct_fd if self.direct_fd >= 0 else self.plain_fd)
        return self.handles[key]

    def end_before(self, where: int) -> int:
        """The end of the file, for a read that found no more bytes at `where`: the file's size, or `where` if that is
        smaller or the file is a device.
        """
        info = os.fstat(self.plain_fd)
        return min(where, info.st_size) if stat.S_ISREG(info.st_mode) else where

    def is_named(self, path: str | os.PathLike) -> bool:
        """Whether `path` still names this file."""
        try:
            info = os.stat(path)
        except OSError:
            return False
        return self.identity == (info.st_dev, info.st_ino)

    def release(self) -> bool:
        """Remove one user; returns True if that closed the file."""
        self.users -= 1
        if self.users > 0:
            return False
        for (pid, library), handle in self.handles.items():
            if pid == os.getpid():
                library.deregister_file(handle)
        self.handles.clear()
        for fd in (self.plain_fd, self.direct_fd):
            if fd >= 0:
                os.close(fd)
        self.plain_fd = self.direct_fd = -1
        return True


def check_engine(name: str) -> str:
    """The engine in DSX_NVME_ENGINE if that is set, otherwise `name`; raises OptionError for an unknown name."""
    chosen = os.environ.get("DSX_NVME_ENGINE", "") or name
    if chosen not in ENGINES:
        raise OptionError(f"engine {chosen!r}: expected one of {', '.join(ENGINES)}")
    return chosen


@functools.lru_cache(maxsize=64)
def file_system(device: int) -> str:
    """The type of the mounted file system with this device number; empty if the kernel does not list it."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                fields, _, tail = line.partition(" - ")
                if fields.split()[2] == wanted:
                    return tail.split()[0]
    except OSError:
        return ""
    return ""


def open_file(path: str | os.PathLike | int, *, write: bool, engine: str = "auto", direct: bool = True) -> OpenFile:
    """Open `path` (or a descriptor, which the caller keeps) and decide how to access it.

    A file opened for writing is made if it is missing; its content stays. Raises OSError (TransferError for a folder,
    a pipe, a socket, or a descriptor that was opened for the other direction).
    """
    flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
    flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    if isinstance(path, int):
        name, plain_fd = _name_of(path), _reopened(path, write)
    else:
        name = os.fspath(path)
        with contextlib.suppress(FileNotFoundError):
            _refuse_stream(name, os.stat(name))  # before opening: opening a pipe blocks
        plain_fd = os.open(name, flags, 0o666)
    direct_fd = -1
    try:
        info = os.fstat(plain_fd)
        _refuse_stream(name, info)
        if stat.S_ISDIR(info.st_mode):
            raise TransferError(errno.EISDIR, os.strerror(errno.EISDIR), name, op="open", offset=0, nbytes=0)
        reasons: list[str] = []
        direct_fd = _open_direct(name, plain_fd, write, direct, info, reasons)
        access = _decide(check_engine(engine), plain_fd, direct_fd, info, reasons)
        if direct_fd >= 0 and not access.direct:
            os.close(direct_fd)
            direct_fd = -1
    except BaseException:
        os.close(plain_fd)
        if direct_fd >= 0:
            os.close(direct_fd)
        raise
    return OpenFile(name, write, access, plain_fd, direct_fd, (info.st_dev, info.st_ino))


def _refuse_stream(name: str, info: os.stat_result) -> None:
    if stat.S_ISFIFO(info.st_mode) or stat.S_ISSOCK(info.st_mode):
        text = "a pipe or socket has no offsets; tensors are transferred to and from files and block devices"
        raise TransferError(errno.ESPIPE, text, name, op="open", offset=0, nbytes=0)


def _reopened(fd: int, write: bool) -> int:
    """A second descriptor for the same file.

    A duplicate shares the flags of the original. With O_DIRECT it would refuse unaligned heads and tails; with O_APPEND
    it would write at the end, whatever the offset. In both cases the file is opened once more. Raises OptionError where
    that is not possible, and TransferError if the descriptor is not open for this direction.
    """
    try:
        import fcntl  # not of every platform
    except ImportError:
        return os.dup(fd)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    missing = os.O_RDONLY if write else os.O_WRONLY
    if flags & os.O_ACCMODE == missing:
        has, wanted = ("reading", "O_RDWR") if write else ("writing", "O_RDWR or O_RDONLY")
        text = f"descriptor {fd} is open for {has} only; open it with {wanted}"
        raise TransferError(errno.EBADF, text, _name_of(fd), op="write" if write else "read", offset=0, nbytes=0)
    if not flags & (O_DIRECT | os.O_APPEND):
        return os.dup(fd)
    try:
        return os.open(f"/proc/self/fd/{fd}", (flags & os.O_ACCMODE) | os.O_CLOEXEC)
    except OSError as error:
        raise OptionError(
            f"descriptor {fd} was opened with O_DIRECT or O_APPEND and cannot be opened again without ({error}); "
            "pass the file's name"
        ) from error


def _name_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"<descriptor {fd}>"


def _open_direct(name: str, plain_fd: int, write: bool, wanted: bool, info: os.stat_result, reasons: list[str]) -> int:
    """A second descriptor with O_DIRECT, or -1 and a reason."""
    kind = file_system(info.st_dev)
    if not wanted:
        reasons.append("page cache: direct I/O is switched off")
    elif native.module() is None:
        reasons.append(f"page cache: {native.reason()}")
    elif not O_DIRECT:
        reasons.append("page cache: this platform has no O_DIRECT")
    elif not (stat.S_ISREG(info.st_mode) or stat.S_ISBLK(info.st_mode)):
        reasons.append("page cache: not a regular file or block device")
    elif kind in IN_MEMORY:
        reasons.append(f"page cache: {kind} lies in memory, there is no device to reach directly")
    else:
        flags = (os.O_RDWR if write else os.O_RDONLY) | O_DIRECT | os.O_CLOEXEC
        try:
            try:
                return os.open(f"/proc/self/fd/{plain_fd}", flags)  # the same file, even if its name was removed
            except FileNotFoundError:
                return os.open(name, flags)  # no /proc here
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            reasons.append(
                f"page cache: {kind or 'the file system'} refuses O_DIRECT ({os.strerror(error.errno or 0)})"
            )
    return -1


def _decide(asked: str, plain_fd: int, direct_fd: int, info: os.stat_result, reasons: list[str]) -> Access:
    kind = file_system(info.st_dev) or "unknown file system"
    memory = offset = 1
    if direct_fd >= 0:
        memory, offset = native.module().direct_alignment(direct_fd)
        if memory == 0 or offset == 0:
            memory = offset = PAGE
            reasons.append(f"direct I/O on {kind}; the kernel names no alignment, {PAGE} is assumed")
        else:
            reasons.append(f"direct I/O on {kind}: addresses aligned to {memory}, offsets to {offset}")
    engine = _engine(asked, direct_fd >= 0, reasons)
    return Access(engine, direct_fd >= 0 and engine != "python", memory, offset, tuple(reasons))


def _engine(asked: str, direct: bool, reasons: list[str]) -> str:
    if asked == "python" or native.module() is None:
        if asked not in ("auto", "python"):
            raise OptionError(f"engine {asked!r} is not available: {native.reason()}; use engine='auto'")
        reasons.append("engine python: asked for" if asked == "python" else f"engine python: {native.reason()}")
        return "python"
    if asked != "auto":
        refused = native.refusal(asked)
        if refused:
            raise OptionError(f"engine {asked!r} is not available: {refused}; use engine='auto'")
        reasons.append(f"engine {asked}: asked for")
        return asked
    if not direct:
        reasons.append("engine threads: the page cache is copied from by several threads at once")
        return "threads"
    for name in native.ENGINES:
        refused = native.refusal(name)
        if not refused:
            reasons.append(f"engine {name}: first of {', '.join(native.ENGINES)} that the kernel allows")
            return name
        reasons.append(f"not {name}: {refused}")
    raise OptionError("no engine runs here")  # threads need nothing that could be refused


def reserve(file: OpenFile, offset: int, nbytes: int, *, exact: bool) -> int:
    """Make the file ready to receive bytes [offset, offset + nbytes). Returns the size that it had before.

    The blocks of a growing file are reserved first, so that a full disk shows before the transfer, and blocks can be
    written in any order. `exact`: the transfer is the whole content of the file, so a longer file is cut. Raises
    TransferError; then the file is unchanged.
    """
    info = os.fstat(file.plain_fd)
    size, end = info.st_size, offset + nbytes
    if not stat.S_ISREG(info.st_mode):
        return size
    if exact and size > end:
        os.ftruncate(file.plain_fd, end)
    if nbytes == 0 or end <= size or not file.access.direct:
        return size
    start = max(offset, size)
    error = native.module().reserve(file.plain_fd, start, end - start)
    if error and error not in _CANNOT_RESERVE:
        _give_back(file, start, end, size if exact else None)
        raise TransferError.of(error, file.path, op="write", offset=start, nbytes=nbytes)
    return size


def undo_growth(file: OpenFile, offset: int, nbytes: int, *, exact: bool, size: int) -> None:
    """After a failed write: free the disk space that it took, so that a full disk does not stay full.

    `exact` (the tensor was to be the whole content): the file becomes empty, because its content is useless. Otherwise
    the blocks that the write added beyond `size`, the earlier size, are freed and read as zeros. Bytes of other writers
    of the same file are not touched, and the file keeps its length.
    """
    if stat.S_ISREG(os.fstat(file.plain_fd).st_mode):
        _give_back(file, max(offset, size), offset + nbytes, 0 if exact else None)


def _give_back(file: OpenFile, start: int, end: int, length: int | None) -> None:
    """Cut the file to `length`, or free the blocks of [start, end) where the file system can do that."""
    if length is not None:
        with contextlib.suppress(OSError):  # the caller must see the error of the write, not one of this cleanup
            os.ftruncate(file.plain_fd, length)
    elif end > start and native.module() is not None:
        native.module().punch(
            file.plain_fd, start, end - start
        )  # a refusal (not every file system can) changes nothing


def access(path: str | os.PathLike, *, engine: str = "auto") -> Access:
    """The kind of access that a file, or a file in a folder, would get.

    Opens the file, or a temporary one; changes nothing.
    """
    import tempfile  # lazy import: only this question needs it

    if os.path.isdir(path):
        with tempfile.NamedTemporaryFile(dir=path, prefix=".dsx-nvme-probe-") as probe:
            file = open_file(probe.name, write=True, engine=engine)
            file.release()
    else:
        file = open_file(path, write=False, engine=engine)
        file.release()
    return file.access


def explain(path: str | os.PathLike, *, engine: str = "auto") -> str:
    """The decision for a file or folder and its reasons, as text."""
    found = access(path, engine=engine)
    way = "direct" if found.direct else "through the page cache"
    return "\n".join([f"{os.fspath(path)}: engine {found.engine}, {way}", *(f"  {r}" for r in found.reasons)])
