"""What processes of a test left on the machine.

Other programs run beside the tests, and have left things before them. So ask while the processes live what is theirs,
and look later for that alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["segments_of", "sockets_of", "unix_inodes"]

_SHARED_MEMORY = re.compile(r"/dev/shm/\S+")


def segments_of(pids: Iterable[int]) -> set[Path]:
    """The files in /dev/shm that these processes (alive) have open or mapped, as far as they have a name;
    `{path for path in segments if path.exists()}` are those left later.
    """
    found: set[str] = set()
    for pid in pids:
        found.update(_SHARED_MEMORY.findall(Path(f"/proc/{pid}/maps").read_text()))
        found.update(name for target in _open_files(pid) for name in _SHARED_MEMORY.findall(target))
    return {path for path in map(Path, found) if path.exists()}


def sockets_of(pids: Iterable[int]) -> set[str]:
    """Inodes of the Unix sockets that these processes (alive) have open; `inodes & unix_inodes()` are those left
    later.
    """
    targets = (target for pid in pids for target in _open_files(pid))
    return {inode for target in targets for inode in re.findall(r"^socket:\[(\d+)\]$", target)} & unix_inodes()


def _open_files(pid: int) -> list[str]:
    found: list[str] = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:  # closed meanwhile
            continue
    return found


def unix_inodes() -> set[str]:
    """Inodes of all Unix sockets of the machine."""
    with open("/proc/net/unix") as lines:
        return {line.split()[6] for line in list(lines)[1:]}
