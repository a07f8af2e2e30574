"""A museum of public bugs of 2025 and 2026: each is rebuilt in a few lines, in its broken and in its right form.

An audit has to name each broken form, and must not complain about the right one. `python -m dsx_verify museum` runs
them all. The code is written from what the threads say; none of it is theirs.
"""

from __future__ import annotations

from ..auditing import audit
from ..receipt import Receipt
from .checkpoints import CHECKPOINTS
from .exhibit import Exhibit
from .forwards import FORWARDS
from .optimizers import OPTIMIZERS
from .reductions import REDUCTIONS

__all__ = ["EXHIBITS", "Exhibit", "visit"]

EXHIBITS: tuple[Exhibit, ...] = (*REDUCTIONS, *OPTIMIZERS, *FORWARDS, *CHECKPOINTS)


def visit(exhibit: Exhibit, *, broken: bool = True, steps: int = 2) -> Receipt:
    """Audit an exhibit. Every rank must call it, on as many ranks as the exhibit needs.

    Returns:
        The receipt.
    """
    show = exhibit.build(broken)
    return audit(
        show.step,
        show.model,
        expected=show.expected,
        batches=show.batches,
        optimizer=show.optimizer,
        steps=steps,
        raise_error=False,
        **show.more,
    )
