"""`BackwardClock` tells all its watchers when the outermost backward begins and when it ends.

Reentrant checkpointing runs backwards inside backwards, and a hook cannot tell which one it is in. So the first hook
that runs in the outermost backward announces it: a hook on an output of the model, a hook of stage 3, or, where the
loss does not come from the model's outputs, the hook of the first gradient.
"""

from __future__ import annotations

from typing import Protocol

from ..torch_names import current_graph_task_id, queue_callback

__all__ = ["BackwardClock", "BackwardWatcher"]


class _EndsBackward(Protocol):
    def end_backward(self) -> None: ...


class BackwardWatcher(Protocol):
    """Is told when a backward begins and ends."""

    def begin_backward(self) -> None:
        """The outermost backward has begun."""
        ...

    def end_backward(self) -> None:
        """The outermost backward has ended without an error."""
        ...


class BackwardClock:
    """Calls its watchers when the outermost backward begins, in the order in which they were added, and when it ends,
    in the reverse order.

    The first call of `end_pass` in a backward tells `order` that the backward has ended; later calls do nothing.
    """

    def __init__(self, order: _EndsBackward) -> None:
        self._order = order
        self._watchers: list[BackwardWatcher] = []
        self.running = False
        """Whether a backward has begun and not ended. A backward that an error stopped counts as running until the next
        one begins, or until `forget`.
        """
        self.task = -1
        """Autograd's number of the outermost backward."""
        self._pass_open = False

    def watch(self, watcher: BackwardWatcher) -> None:
        """Add a watcher."""
        self._watchers.append(watcher)

    def enter(self, *, outermost: bool = False) -> None:
        """A backward runs; if it is a new outermost one, tell the watchers.

        Args:
            outermost: this backward is known to be the outermost one, so that another one that seems to run was
                stopped by an error.
        """
        task = current_graph_task_id()
        if task == -1 or (self.running and (task == self.task or not outermost)):
            return
        self.running, self.task, self._pass_open = True, task, True
        try:
            for watcher in self._watchers:
                watcher.begin_backward()
        except BaseException:
            self.running = False
            raise
        queue_callback(self._end)

    def end_pass(self) -> None:
        """No watcher has more gradients to report in this backward: tell the order that it has ended."""
        if self._pass_open:
            self._pass_open = False
            self._order.end_backward()

    def forget(self) -> None:
        """Note that a backward that seems to run was stopped by an error."""
        self.running = False

    def _end(self) -> None:
        self.running = False
        for watcher in reversed(self._watchers):
            watcher.end_backward()
