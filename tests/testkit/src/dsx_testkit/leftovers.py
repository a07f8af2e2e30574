"""What processes of a test left on the machine. Other programs run beside the tests, so only what is theirs counts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

__all__ = ["segments_of", "sockets_of", "unix_inodes"]


def segments_of(pids: Iterable[int]) -> set[str]:
    """Names in /dev/shm that carry the prefix of this project, or the number of one of these processes."""
    numbers = {str(pid) for pid in pids}
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if name.startswith("dsx") or numbers & set(re.findall(r"\d+", name))}


def sockets_of(pids: Iterable[int]) -> set[str]:
    """Inodes of the Unix sockets that these processes (alive) have open; `inodes & set(unix_inodes())` are those left
    later.
    """
    found: set[str] = set()
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}")
            except OSError:  # closed meanwhile
                continue
            found.update(re.findall(r"^socket:\[(\d+)\]$", target))
    return found & unix_inodes()


def unix_inodes() -> set[str]:
    """Inodes of all Unix sockets of the machine."""
    with open("/proc/net/unix") as lines:
        return {line.split()[6] for line in list(lines)[1:]}
