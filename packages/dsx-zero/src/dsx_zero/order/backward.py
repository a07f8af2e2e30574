"""Which backward runs: one clock for everybody who follows backwards.

Reentrant checkpointing runs backwards inside backwards, and a hook cannot tell which one it is in. So the outermost one
is announced by whoever hears of it first: the hooks on the outputs of the model, which run first, a hook of stage 3, or
the first gradient of a loss that does not come from the model's outputs.
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
    """Tells its watchers when the outermost backward begins, in the order in which they came, and when it ends, in the
    reverse order. `order` hears of the end of each pass once, from the first watcher that calls `end_pass`.
    """

    def __init__(self, order: _EndsBackward) -> None:
        self._order = order
        self._watchers: list[BackwardWatcher] = []
        self.running = False
        """Whether a backward has begun that has not ended. One that an error stopped counts until the next begins, or
        until `forget`.
        """
        self.task = -1
        """Autograd's number of the outermost backward."""
        self._pass_open = False

    def watch(self, watcher: BackwardWatcher) -> None:
        """Tell this watcher too."""
        self._watchers.append(watcher)

    def enter(self, *, outermost: bool = False) -> None:
        """Called in a backward. `outermost`: it is known to be the outermost one, so that another one that seems to run
        was stopped by an error.
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
