"""Completion of a backend's works on a device, asked from another thread.

NCCL's are asked through a future that its watchdog completes. Asking the work itself would query an event, which breaks
a CUDA graph that another thread is capturing, and the work would keep the call's output tensors in memory meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dsx_core.device import Device, accelerator_kind


def completion(works: Sequence[Any]) -> Callable[[], bool] | None:
    """A function that returns True once the works of a device are done, for any thread; None if they cannot be asked.

    A work that is being captured into a CUDA graph cannot: it runs when the graph does.
    """
    device = Device.in_use()
    if device is not None and device.is_capturing():
        return None
    asked: list[Callable[[], bool]] = []
    for work in works:
        inner = getattr(work, "transfers", None)
        if inner is not None:  # a handle of ours
            ask = completion(inner)
            if ask is not None:
                asked.append(ask)
            continue
        try:
            asked.append(work.get_future_result().done)
        except (AttributeError, RuntimeError):  # another backend, or a torch before 2.6
            if accelerator_kind():
                return None
            asked.append(work.is_completed)
    return (lambda: all(ask() for ask in asked)) if asked else None
