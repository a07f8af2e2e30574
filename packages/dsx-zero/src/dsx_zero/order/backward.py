"""`BackwardClock`: tells all objects that follow backwards when the outermost backward begins and ends.

Reentrant checkpointing runs backwards inside backwards, and a hook cannot tell which one it is in. So the first hook
that runs in the outermost backward announces it: a hook on an output of the model, a hook of stage 3, or, where the
loss does not come from the model's outputs, the hook of the first gradient.
"""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["BackwardClock", "BackwardWatcher"]


class _EndsBackward(Protocol):
    def end_backward(self) -> None: ...


class BackwardWatcher(Protocol):
    """Follows backwards."""

    def begin_backward(self) -> None:
        """The outermost backward has begun."""
        ...

    def end_backward(self) -> None:
        """It has ended without an error."""
        ...


class BackwardClock:
    """Calls its watchers when the outermost backward begins, in the order in which they were added, and when it ends,
    in the reverse order. The first watcher that calls `end_pass` tells `order` once that a backward has ended.
    """

    def __init__(self, order: _EndsBackward) -> None:
        self._order = order
        self._watchers: list[BackwardWatcher] = []
        self.running = False
        """Whether a backward has begun and not ended. One that an error stopped counts as running until the next one
        begins, or until `forget`.
        """
        self.task = -1
        """Autograd's number of the outermost backward."""
        self._pass_open = False

    def watch(self, watcher: BackwardWatcher) -> None:
        """Tell this watcher too."""
        self._watchers.append(watcher)

    def enter(self, *, outermost: bool = False) -> None:
        """A backward runs. `outermost`: it is known to be the outermost one; another one that seems to run was then
        stopped by an error.
        """
        task = torch._C._current_graph_task_id()
        if task == -1 or (self.running and (task == self.task or not outermost)):
            return
        self.running, self.task, self._pass_open = True, task, True
        try:
            for watcher in self._watchers:
                watcher.begin_backward()
        except BaseException:
            self.running = False
            raise
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def end_pass(self) -> None:
        """No watcher has anything more for the order in this pass."""
        if self._pass_open:
            self._pass_open = False
            self._order.end_backward()

    def forget(self) -> None:
        """A backward that seems to run was stopped by an error."""
        self.running = False

    def _end(self) -> None:
        self.running = False
        for watcher in reversed(self._watchers):
            watcher.end_backward()
