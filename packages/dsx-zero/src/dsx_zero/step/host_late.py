"""The CPU optimizer step one step later: an update is applied late (decision 0043), so that the host computes it while
the device runs the next forward and backward.

After `warm_up` steps of the usual kind, step n

1. waits for the host's update with the gradients of step n - 1 and makes the new parameters visible,
2. gives the host the gradients of step n, with the settings (learning rates), clipping and loss scale of step n.

So forward and backward of step n + 1 use parameters that lack the update of step n. The first late step applies
nothing; a step whose gradients are not finite gives the host nothing. `ZeroOptimizer.synchronize` applies the update
that is under way. The host works on copies of the gradients, because the next backward writes new ones into their
memory. The copies take 4 bytes per element of this rank's masters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import ZeroStateError
from ..order.channel import Asks
from ..params.flat import FlatGroup, Part
from ..runtime import Runtime
from .edits import Edits
from .failures import raise_on_all_ranks
from .host_thread import worker_beside
from .inner import settings_of
from .runner import StepRunner

__all__ = ["LateUpdate"]


class LateUpdate:
    """Applies each update one step later, so that the host computes it during the next forward and backward.

    Args:
        runner: executes the step; its masters and states must be in memory.
        channel: asks a yes-or-no question of all ranks.
        warm_up: number of first steps that apply their own update.
    """

    def __init__(self, runtime: Runtime, runner: StepRunner, edits: Edits, *, channel: Asks, warm_up: int) -> None:
        self._runtime, self._runner, self._edits, self._channel = runtime, runner, edits, channel
        self._warm_up, self._under_way = warm_up, False
        self._numbers = range(len(runner.apart.plan.sub_groups))
        self._kept: dict[tuple[FlatGroup, int], torch.Tensor] = {}
        self._worker = worker_beside(runtime)

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients that are kept for the host's update."""
        return sum(tensor.nbytes for tensor in self._kept.values())

    def is_late(self, steps: int) -> bool:
        """Whether the next update is applied late, when `steps` steps were done."""
        return steps >= self._warm_up

    def begin(self, factor: float | torch.Tensor) -> None:
        """Start the update with the reduced gradients times `factor`."""
        number = factor.item() if isinstance(factor, torch.Tensor) else factor
        self._keep_gradients()
        inner_step = self._runner.inner_step.for_twin(settings_of(self._runner.inner_step.inner))

        def update() -> None:
            self._runner.apart.step(self._numbers, number, inner_step, self._gradients)

        self._under_way = True
        self._worker.submit(update)

    def _keep_gradients(self) -> None:
        for sub_group in self._numbers:
            for master in self._runner.apart.masters_in(sub_group):
                part, key = Part(master.name, master.slice), (master.group, master.slice.offset)
                (values,) = self._runtime.gradients.parts(master.group, [part])
                if key not in self._kept:
                    self._kept[key] = torch.empty_like(values)
                self._kept[key].copy_(values)

    def _gradients(self, group: FlatGroup, parts: Sequence[Part]) -> tuple[torch.Tensor, ...]:
        return tuple(self._kept[group, part.slice.offset] for part in parts)

    def finished(self) -> bool:
        """Wait for the update that is under way and write the parameters (collective). Returns False if there was none.

        Raises:
            ZeroStateError: a rank's update has failed, or parameters were written meanwhile.
        """
        if not self._under_way:
            return False
        failure, problem = self._worker.wait(), None
        if failure is not None:
            problem = f"the update of the step before failed: {type(failure).__name__}: {failure}"
        elif self._edits.were_written():
            problem = (
                "parameters were written while their update was under way on the host, which would overwrite them;"
                " call synchronize() of the optimizer on every rank before writing, or set"
                " zero_optimization.offload_optimizer.late_update_after to null"
            )
        raise_on_all_ranks(self._channel, self._runtime.ranks, problem, failure)
        self._under_way = False
        self._runner.run(1.0, self._numbers)
        return True

    def abandon(self) -> None:
        """Forget the update that is under way, because masters and states are about to get other values."""
        self._worker.wait()
        self._runner.apart.forget()
        self._under_way = False

    def check_flushed(self) -> None:
        """Refuse to read or write masters and states while an update is under way. Raises ZeroStateError."""
        if self._under_way:
            raise ZeroStateError(
                "the update of the last step is under way on the host (offload_optimizer.late_update_after); call"
                " synchronize() of the optimizer on every rank first (an engine does it before it saves)"
            )
