"""Runs Python's garbage collector only between steps (`disable_python_gc`). A collection in the middle of a step would
stall one rank, and the other ranks would wait for it.
"""

from __future__ import annotations

import gc

from .report import StepReport

__all__ = ["CollectBetweenSteps"]

_FULL_EVERY = 100


class CollectBetweenSteps:
    """Switches automatic collection off, and collects young objects after each step, and all objects every 100 steps.

    The switch acts on the whole process. `close` restores its earlier state.
    """

    def __init__(self) -> None:
        self._was_on, self._steps = gc.isenabled(), 0
        gc.disable()

    def after_step(self, report: StepReport) -> None:
        """Collect garbage."""
        self._steps += 1
        gc.collect(2 if self._steps % _FULL_EVERY == 0 else 1)

    def close(self) -> None:
        """Restore automatic collection as it was before."""
        if self._was_on:
            gc.enable()
