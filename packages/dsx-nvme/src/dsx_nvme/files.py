"""Opens a file for transfers and decides how: which engine, past the page cache or through it, with which alignment.

A file is opened twice where the file system offers direct I/O: once with O_DIRECT for the aligned body of transfers, once without
for heads and tails. The decision is a record (`Access`) that says its reasons; `explain(path)` prints it.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from dataclasses import dataclass, field

from . import native
from .errors import OptionError, TransferError

ENGINES = ("auto", *native.ENGINES, "python")
PAGE = 4096
O_DIRECT = getattr(os, "O_DIRECT", 0)
IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"}
# What posix calls these means that reserving is not offered; writing may still work.
_CANNOT_RESERVE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}


@dataclass(frozen=True)
class Access:
    """How a file is reached, and why so."""

    engine: str
    direct: bool
    memory_align: int  # bytes; what direct I/O asks of addresses
    offset_align: int  # bytes; of offsets and lengths
    reasons: tuple[str, ...]


@dataclass
class OpenFile:
    """Open descriptors of one file. Several transfers may share it; the last one to `release` closes it."""

    path: str
    write: bool
    access: Access
    plain_fd: int
    direct_fd: int
    identity: tuple[int, int]  # device and inode
    # Registered with engines, by process and name: a forked child's engines know nothing of its parent's numbers.
    slots: dict[tuple[int, str], int] = field(default_factory=dict)
    users: int = 1

    def fileno(self) -> int:
        """The descriptor that goes through the page cache."""
        return self.plain_fd

    def release(self) -> bool:
        """One user less; True when that closed the file."""
        self.users -= 1
        if self.users > 0:
            return False
        for fd in (self.plain_fd, self.direct_fd):
            if fd >= 0:
                os.close(fd)
        self.plain_fd = self.direct_fd = -1
        return True


def check_engine(name: str) -> str:
    """`name`, or what DSX_NVME_ENGINE says in its place; raises OptionError for a name that is none."""
    chosen = os.environ.get("DSX_NVME_ENGINE", "") or name
    if chosen not in ENGINES:
        raise OptionError(f"engine {chosen!r}: expected one of {', '.join(ENGINES)}")
    return chosen


@functools.lru_cache(maxsize=64)
def file_system(device: int) -> str:
    """Type of the mounted file system with this device number; empty when the kernel does not list it."""
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
    """Open `path` (or a descriptor, which stays the caller's) and decide how to reach it.

    A file opened for writing is made when it is missing; its content stays. Raises OSError.
    """
    flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
    flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    if isinstance(path, int):
        name, plain_fd = _name_of(path), _twin(path)
    else:
        name = os.fspath(path)
        plain_fd = os.open(name, flags, 0o666)
    direct_fd = -1
    try:
        info = os.fstat(plain_fd)
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


def _twin(fd: int) -> int:
    """A descriptor of our own for the same file.

    A duplicate shares the flags of the original. One that was opened with O_DIRECT would refuse unaligned heads and tails, one with O_APPEND would
    write at the end whatever the offset: such a file is opened once more. Raises OptionError where that is not possible.
    """
    try:
        import fcntl  # not of every platform
    except ImportError:
        return os.dup(fd)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not flags & (O_DIRECT | os.O_APPEND):
        return os.dup(fd)
    try:
        return os.open(f"/proc/self/fd/{fd}", (flags & os.O_ACCMODE) | os.O_CLOEXEC)
    except OSError as error:
        raise OptionError(
            f"descriptor {fd} was opened with O_DIRECT or O_APPEND and cannot be opened again without ({error}); pass the file's name"
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
                return os.open(f"/proc/self/fd/{plain_fd}", flags)  # the same file even if the name has gone
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


def reserve(file: OpenFile, offset: int, nbytes: int, *, exact: bool) -> None:
    """Make the file ready to receive bytes [offset, offset + nbytes).

    Blocks of a file that grows are reserved at once, so that a full disk shows now and blocks can be written in any order.
    `exact`: the transfer is the whole file; what an older, longer file has beyond it goes. Raises TransferError.
    """
    info = os.fstat(file.plain_fd)
    if not stat.S_ISREG(info.st_mode):
        return
    end = offset + nbytes
    if exact and info.st_size > end:
        os.ftruncate(file.plain_fd, end)
    if nbytes == 0 or end <= info.st_size or not file.access.direct:
        return
    start = max(offset, info.st_size)
    error = native.module().reserve(file.plain_fd, start, end - start)
    if error and error not in _CANNOT_RESERVE:
        raise TransferError.of(error, file.path, op="write", offset=start, nbytes=nbytes)


def sync_folder(path: str | os.PathLike) -> None:
    """Wait until names made or replaced in a folder are on the device: syncing a file does not see to its name."""
    if not hasattr(os, "O_DIRECTORY"):  # where folders cannot be opened
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def access(path: str | os.PathLike, *, engine: str = "auto") -> Access:
    """How transfers to a file or folder would go. Opens the file, or a nameless one in the folder; changes nothing."""
    import tempfile  # late: only this question needs it

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
