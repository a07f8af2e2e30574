"""How a function ends when this process may take little more memory than it has: for readers of files of others.

from dsx_testkit.limits import ended, little_memory

with little_memory(256 << 20):
    end = ended(lambda: read(hostile_file))
assert "CheckpointError" in end.kinds and not end.wanted_memory
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["End", "ended", "little_memory"]


@contextmanager
def little_memory(room: int) -> Iterator[None]:
    """Inside, this process can have at most `room` bytes of address space more than it has now: a larger allocation
    fails, whether it would be used or not.
    """
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@dataclass(frozen=True)
class End:
    """How a function has ended: names of the exception's class and its bases (none: it returned), and its words."""

    kinds: tuple[str, ...] = ()
    text: str = ""

    @property
    def wanted_memory(self) -> bool:
        """Whether it failed because it asked for more memory than there was."""
        words = ("MemoryError", "allocate memory", "not enough memory", "Cannot allocate")
        return "MemoryError" in self.kinds or any(word in self.text for word in words)


def ended(action: Callable[[], object]) -> End:
    """Call `action` and say how it has ended."""
    try:
        action()
    except BaseException as error:
        texts, cause = [], error
        while cause is not None:
            texts.append(f"{type(cause).__name__}: {cause}")
            cause = cause.__cause__ or cause.__context__
        return End(tuple(kind.__name__ for kind in type(error).__mro__), "\n".join(texts))
    return End()
