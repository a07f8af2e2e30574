"""`audit`: a few updates of any training system, each beside plain torch (`running.py` has the sequence of one)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .adapters import adapter_for
from .errors import AuditError
from .expected import Expected
from .ranks import Ranks
from .receipt import Receipt, WrongStepError
from .reloading import reload
from .running import Audit, Step
from .system import System

__all__ = ["audit"]


def audit(
    step: Step,
    model: Any,
    *,
    expected: Expected,
    batches: Callable[[int], Any],
    optimizer: Any = None,
    scaler: Any = None,
    system: System | None = None,
    steps: int = 3,
    data_ranks: tuple[int, int] | None = None,
    save: Callable[[str], None] | None = None,
    load: Callable[[str], None] | None = None,
    seed: int = 1234,
    raise_error: bool = True,
) -> Receipt:
    """Train a few updates with `step`, and compare each with plain torch. Every rank must call it.

    Rank 0 needs memory for two copies of the plain model, one of them in float64 with optimizer states, and for the
    gradients of each sample of an update.

    Args:
        step: (this rank's micro-batches) -> one update of the system. It may return the losses: one a micro-batch, or
            their mean.
        model: the model as it is trained: wrapped, sharded, or an engine.
        expected: what an update should compute.
        batches: (number) -> a micro-batch. Numbers count updates, then micro-batches, then data-parallel ranks.
        optimizer, scaler: the torch optimizer and `GradScaler`; engines have their own.
        system: an adapter for a system that is not known (`dsx_verify.System`).
        steps: updates to compare.
        data_ranks: (index, number) of this rank among ranks with different samples; None: all have different ones.
        save, load: write and read a checkpoint in a folder. With both, the last update is repeated from a checkpoint.
        seed: of random numbers in forward passes.
        raise_error: raise if something differs; False: only report it.

    Returns:
        The receipt, the same on all ranks.

    Raises:
        WrongStepError: something differs. The message names the tensor, step and kind, with evidence.
        AuditError: the audit cannot be made as asked.
    """
    if steps < 1:
        raise AuditError(f"steps: got {steps}, expected at least 1")
    ranks = Ranks(data_ranks)
    receipt = Receipt(ranks.size, type(model).__name__)
    try:
        running = Audit(system or adapter_for(model, optimizer, scaler), expected, batches, ranks, receipt, seed)
        running.start()
        for _ in range(steps):
            running.run(step)
        if save is not None and load is not None:
            reload(running, step, save, load)
    except WrongStepError:
        if raise_error:
            raise
    finally:
        ranks.close()
    return receipt
