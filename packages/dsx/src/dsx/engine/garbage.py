"""Python's garbage collector between steps only (`disable_python_gc`): a collection in the middle of a step stalls one
rank, and the others wait for it.
"""

from __future__ import annotations

import gc

from .report import StepReport

__all__ = ["CollectBetweenSteps"]

_FULL_EVERY = 100


class CollectBetweenSteps:
    """Switches automatic collection off, and collects after each step: young objects, and every hundredth step all.

    It is a switch of the whole process. `close` puts back what was before.
    """

    def __init__(self) -> None:
        self._was_on, self._steps = gc.isenabled(), 0
        gc.disable()

    def after_step(self, report: StepReport) -> None:
        """Collect."""
        self._steps += 1
        gc.collect(2 if self._steps % _FULL_EVERY == 0 else 1)

    def close(self) -> None:
        """Automatic collection as it was before."""
        if self._was_on:
            gc.enable()
