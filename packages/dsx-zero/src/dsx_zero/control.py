"""`Control`: what the owner of an optimizer, such as an engine, settles for it, beyond what users call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from .grads.protocol import BackwardWatch
from .held import HeldState
from .step.runner import StepFailure

__all__ = ["Control", "OnSpan"]

OnSpan = Callable[[str, str, int], AbstractContextManager[object]]
"""See `Control.listen`."""


class Control:
    """The settings of one `ZeroOptimizer` that its owner makes, and what is shown to the owner alone.

    Attributes:
        watch: the object that scales losses and is asked at every backward; None: there is none.
        loss_scale: gives the factor on the loss of the next backward.
        dynamic: whether this factor follows overflows; False without one.
        on_release: what is called when the optimizer is released: by `release`, or because its model is sharded again.
    """

    def __init__(self, held: HeldState, failure: StepFailure) -> None:
        self._held, self._failure = held, failure
        self.watch: BackwardWatch | None = None
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self.dynamic = False
        self.on_release: list[Callable[[], object]] = []

    def follow_backward(self, watch: BackwardWatch) -> None:
        """Let the object that scales losses correct or refuse each backward: see `BackwardWatch`."""
        self.watch = watch
        self._held.parts.runtime.gradients.follow(watch)

    def follow_loss_scale(self, scale: Callable[[], float], *, dynamic: bool = False) -> None:
        """Let `loss_scale` and `dynamic_loss_scale` of the optimizer show what the owner of the scaler uses; gradients
        stay as they are.
        """
        self.loss_scale, self.dynamic = scale, dynamic

    def defer_failures(self) -> None:
        """From now on a rank on which a part of `step` fails takes part in the step's collectives, and raises at its
        end. For an owner that lets all ranks, also those of other stages, agree behind each step whether it was done:
        where one rank has failed, parameters and states of the ranks belong to different steps.
        """
        self._failure.deferred = True

    def check_step(self) -> None:
        """Check what a step needs before it communicates. Raises what `ZeroOptimizer.step` raises then."""
        self._held.update.check()

    def gradient_parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters that backward gives this rank's whole gradients, to put hooks on. At stage 3 those behind the
        partitioned ones, which have no memory between uses: their values must not be read.
        """
        for unit in self._held.parts.runtime.trainable_units():
            for group in unit.trainable:
                yield from group.parameters

    def listen(self, on_span: OnSpan) -> Callable[[], None]:
        """Tell `on_span` of copies between tiers and of CPU optimizer steps on their own thread, for a timeline.

        Args:
            on_span: gets the lane ("device-host" or "host step"), what is done, and bytes or elements; it is done
                inside the context that is returned. Called from several threads.

        Returns:
            What ends it.
        """
        runner = self._held.update.runner
        quiet = runner.apart.on_host_step

        def step(sub_group: int) -> AbstractContextManager[object]:
            return on_span("host step", f"sub-group {sub_group}", runner.apart.plan.sub_groups[sub_group].numel)

        def copy(what: str, nbytes: int) -> AbstractContextManager[object]:
            return on_span("device-host", what, nbytes)

        lanes = [lane for lane in self._held.parts.moving_lanes if hasattr(lane, "on_transfer")]
        runner.apart.on_host_step = step
        for lane in lanes:
            lane.on_transfer = copy  # pyright: ignore[reportAttributeAccessIssue]

        def end() -> None:
            runner.apart.on_host_step = quiet
            for lane in lanes:
                lane.on_transfer = None  # pyright: ignore[reportAttributeAccessIssue]

        return end
