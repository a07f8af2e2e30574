"""Works that run at the same time, each on a thread: ranks that are threads, and what may happen beside something."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["together"]


def together(*works: Callable[[], object], patience: float = 20.0) -> None:
    """Run each work on a thread and wait for all of them. Raises the first error, or AssertionError after `patience`
    seconds.
    """
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise AssertionError(f"a thread has not ended in {patience} s")
