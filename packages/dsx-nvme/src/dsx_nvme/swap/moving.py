"""A transfer of a swapper, and the listener that is told of its beginning and end.

`on_transfer(op, name, nbytes)` is called when a transfer begins (op: "read" or "write") and returns what is called
once when the swapper has learnt that it is over, well or badly. `dsx_monitor.Timeline.transfer` has this shape. An end
is learnt where it is waited for: a transfer that is over earlier, while the program computes, seems to last until
then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..ticket import Ticket

__all__ = ["Moving", "OnTransfer", "no_listener"]

OnTransfer = Callable[[str, str, int], Callable[[], None]]


def _nothing() -> None:
    pass


def no_listener(op: str, name: str, nbytes: int) -> Callable[[], None]:
    """The default `on_transfer`: does nothing."""
    return _nothing


class Moving:
    """A ticket, and whom to tell when it is over."""

    def __init__(self, ticket: Ticket, over: Callable[[], None]) -> None:
        self._ticket, self._over = ticket, over

    @classmethod
    def begin(
        cls, listener: OnTransfer, op: str, name: str, tensor: torch.Tensor, start: Callable[[], Ticket]
    ) -> Moving:
        """Tell `listener`, then `start` the transfer of `tensor`; one that does not start is over at once."""
        over = listener(op, name, tensor.numel() * tensor.itemsize)
        try:
            return cls(start(), over)
        except BaseException:
            over()
            raise

    def wait(self) -> int:
        """As `Ticket.wait`."""
        try:
            return self._ticket.wait()
        finally:
            self._tell()

    def exception(self) -> BaseException | None:
        """As `Ticket.exception`."""
        try:
            return self._ticket.exception()
        finally:
            self._tell()

    def done(self) -> bool:
        """As `Ticket.done`."""
        return self._ticket.done()

    def _tell(self) -> None:
        if self._ticket.done():  # not where a signal ended the wait
            over, self._over = self._over, _nothing
            over()
