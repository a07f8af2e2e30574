"""`audit_loop`: audits a loop that trains by itself, such as `Trainer.train()` or Lightning's `fit()`.

An update begins with the first micro-batch after the optimizer's step, and ends where the next one begins, or where the
loop ends. What the forward passes got is the samples on which plain torch trains.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch

from .errors import AuditError
from .expected import Expected
from .loops import Loop, loop_for
from .ranks import Ranks
from .receipt import Receipt, WrongStepError
from .running import Audit
from .seen import watch_forward

__all__ = ["audit_loop"]


def audit_loop(
    run: Callable[[], Any],
    owner: Any,
    *,
    expected: Expected,
    optimizer: Any = None,
    scaler: Any = None,
    steps: int = 3,
    data_ranks: tuple[int, int] | None = None,
    seed: int = 1234,
    raise_error: bool = True,
) -> Receipt:
    """Run a loop that trains by itself, and compare its first updates with plain torch. Every rank must call it.

    The loop takes its samples from where it always does, and runs to its end: let it end after a few updates
    (`max_steps`). After the first difference, and after `steps` updates, it runs on unwatched.

    Args:
        run: starts the loop: `trainer.train`, or `lambda: trainer.fit(module, loader)`.
        owner: a Trainer of transformers or torchtitan, a LightningModule, an object with the calls of
            `dsx_verify.Loop`, or, for any other loop, the model as it is trained.
        expected: what an update should compute. Its `loss` gets what the loop's own function gets: the inputs
            (transformers), (inputs, labels) (torchtitan), the batch of `training_step` (Lightning), or (args, kwargs)
            of the forward.
        optimizer, scaler: for a model; the others have their own.
        steps, data_ranks, seed, raise_error: as for `audit`.

    Returns:
        The receipt, the same on all ranks.

    Raises:
        WrongStepError: something differs.
        AuditError: the audit cannot be made as asked, or the loop ended before it made `steps` updates.
    """
    if steps < 1:
        raise AuditError(f"steps: got {steps}, expected at least 1")
    ranks = Ranks(data_ranks)
    watcher = _Watcher(loop_for(owner, optimizer, scaler), expected, ranks, type(owner).__name__, steps, seed)
    try:
        with watcher:
            run()
            watcher.finish()
    finally:
        ranks.close()
    receipt = watcher.receipt
    if receipt.ok and receipt.steps < steps:
        raise AuditError(
            f"the loop ended after {receipt.steps} whole updates, expected at least steps={steps}: let it make more"
            f" updates, or see whether a micro-batch of it counts as training (accumulation={expected.accumulation})"
        )
    if not receipt.ok and raise_error:
        raise WrongStepError(receipt)
    return receipt


class _Watcher:
    """Cuts what a loop does into updates of an audit."""

    def __init__(self, loop: Loop, expected: Expected, ranks: Ranks, name: str, steps: int, seed: int) -> None:
        self.receipt = Receipt(ranks.size, name)
        self._loop, self._expected, self._ranks = loop, expected, ranks
        self._steps, self._seed = steps, seed
        self._stack = contextlib.ExitStack()
        self._audit: Audit | None = None
        self._batches: list[Any] = []
        self._done = False

    def __enter__(self) -> _Watcher:
        self._stack.enter_context(self._loop.passes(self._begins, self._ends))
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def finish(self) -> None:
        """The loop has ended: so has its last update."""
        if self._audit is not None and self._batches and not self._done:
            self._end_update()

    def _begins(self, batch: Any) -> None:
        if self._done:
            return
        try:
            audit = self._started()
        except WrongStepError:
            self._done = True
            return
        if self._batches and self._complete(audit):
            self._end_update()
            if self._done:
                return
        if not self._batches:
            audit.begin()
        self._batches.append(batch)
        audit.begin_pass()

    def _complete(self, audit: Audit) -> bool:
        """Whether the update is over. With a loss scale it may be left out after an overflow."""
        now = audit.observed
        left_out = bool(now.rates) or now.scale != 1.0
        return bool(now.updates) or (left_out and len(self._batches) >= self._expected.accumulation)

    def _ends(self, loss: Any) -> None:
        if not self._done and self._audit is not None and len(self._audit.observed.losses) < len(self._batches):
            self._audit.observed.losses.append(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))

    def _started(self) -> Audit:
        """The audit; made at the first micro-batch."""
        if self._audit is None:
            system = self._loop.system()
            self._audit = Audit(system, self._expected, _no_batches, self._ranks, self.receipt, self._seed)
            self._audit.scaled_losses = True
            self._audit.start()
            self._stack.enter_context(system.watch(self._audit.point))
            self._stack.enter_context(watch_forward(system.module, current=self._audit.current_pass))
        return self._audit

    def _end_update(self) -> None:
        audit = self._audit
        assert audit is not None  # noqa: S101 - it was made at the first micro-batch
        audit.share(self._batches)
        self._batches = []
        try:
            audit.observed.losses = _own_losses(audit)
            audit.end()
        except WrongStepError:
            self._done = True
        self._done = self._done or self.receipt.steps >= self._steps
        if self._done:  # hooks of the audit are removed; the loop runs on
            self._stack.close()


def _own_losses(audit: Audit) -> list[float]:
    """Losses of the micro-batches, where the loop told all of them as numbers."""
    told = audit.observed.losses
    return told if told and all(map(math.isfinite, told)) else []


def _no_batches(number: int) -> Any:
    raise AuditError(f"micro-batch {number}: a loop draws its own samples")
