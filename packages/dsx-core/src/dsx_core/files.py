"""Replaces a file so that readers see the old or the new content, never a part of it, also after a crash.

The new content is written under another name in the same folder and renamed. Durable means: the content is on the disk
before the name points to it, and the name is on the disk before the call returns. A write that fails leaves the old
file as it was and nothing beside it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["replace_text", "replacing", "sync_folder", "temporary_beside"]


def temporary_beside(path: Path) -> Path:
    """The name under which this process writes the next content of `path`: `.NAME.PID`, in the same folder.

    The name begins with a dot, so that the patterns of a shell do not find a file that is being written.
    """
    return path.with_name(f".{path.name}.{os.getpid()}")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, durable: bool = True, mode: int | None = None) -> Iterator[Path]:
    """Gives the name of a new file to write; at the end of the block it takes the place of `path`.

    The new file has the permissions of the old one, or those that the umask gives. The writer of the block may also
    remove the file and write it anew, as `torch.save` and safetensors do.

    Args:
        path: the file to replace. Its folder must be there.
        durable: wait until content and name are on the disk. Without it a crash of the machine may lose both.
        mode: the permissions of the new file, from its first byte on. None: those of the old file.

    Raises:
        OSError: the file cannot be written. Then `path` is as it was. The same holds for every exception of the block.
    """
    target = Path(path)
    temporary = temporary_beside(target)
    try:
        temporary.unlink(missing_ok=True)  # left by a killed process that had the same id
        mode = _mode_of(target, temporary, mode)
        yield temporary
        with _opened(temporary, os.O_RDWR) as fd:
            os.fchmod(fd, mode)
            if durable:
                os.fsync(fd)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(target.parent)


def replace_text(path: str | os.PathLike[str], text: str, *, durable: bool = True, mode: int | None = None) -> None:
    """Replace a file by a text in UTF-8. See `replacing`."""
    with replacing(path, durable=durable, mode=mode) as temporary:
        temporary.write_bytes(text.encode())


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable."""
    with _opened(Path(folder), os.O_RDONLY) as fd:
        os.fsync(fd)


def _mode_of(target: Path, temporary: Path, mode: int | None) -> int:
    """The permissions of the new file: `mode`, or those of `target`, or those that the umask gives."""
    if mode is not None:
        temporary.touch(mode=mode, exist_ok=False)
        return mode
    try:
        return stat.S_IMODE(target.stat().st_mode)
    except FileNotFoundError:
        temporary.touch(exist_ok=False)
        return stat.S_IMODE(temporary.stat().st_mode)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
