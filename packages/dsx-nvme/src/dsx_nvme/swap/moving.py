"""A transfer of a swapper, and the listener that is called at its beginning and end.

`on_transfer(op, name, nbytes)` is called when a transfer begins (op: "read" or "write"). It returns a function, which
is called once when the swapper sees that the transfer has ended, well or badly. `dsx_monitor.Timeline.transfer` is such
a listener. The swapper sees the end where it waits for it. So a transfer that ends earlier, while the program computes,
seems to last until the wait.
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
    """A ticket, and the function to call when its transfer has ended."""

    def __init__(self, ticket: Ticket, over: Callable[[], None]) -> None:
        self._ticket, self._over = ticket, over

    @classmethod
    def begin(
        cls, listener: OnTransfer, op: str, name: str, tensor: torch.Tensor, start: Callable[[], Ticket]
    ) -> Moving:
        """Call `listener`, then `start` the transfer of `tensor`. If it cannot start, its end is reported at once."""
        over = listener(op, name, tensor.numel() * tensor.itemsize)
        try:
            return cls(start(), over)
        except BaseException:
            over()
            raise

    def wait(self) -> int:
        """See `Ticket.wait`."""
        try:
            return self._ticket.wait()
        finally:
            self._tell()

    def exception(self) -> BaseException | None:
        """See `Ticket.exception`."""
        try:
            return self._ticket.exception()
        finally:
            self._tell()

    def done(self) -> bool:
        """See `Ticket.done`."""
        return self._ticket.done()

    def _tell(self) -> None:
        if self._ticket.done():  # it is not done if a signal ended the wait
            over, self._over = self._over, _nothing
            over()
