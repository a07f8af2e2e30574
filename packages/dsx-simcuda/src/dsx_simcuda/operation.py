"""An operation as reports show it."""

from __future__ import annotations

from dataclasses import dataclass

from . import frames
from .frames import Frame


@dataclass(frozen=True)
class Operation:
    """One of the two operations of a report: what, on which stream, launched where.

    `stack` is the Python stack of the launch, the innermost frame first. In backward there is mostly none; `backward`
    is then the autograd node, and `stack` that of the forward operation.
    """

    name: str
    stream: str
    stack: tuple[Frame, ...] = ()
    backward: str = ""
    number: int = 0  # of the launch; the timeline finds it by this

    @property
    def where(self) -> str:
        """The user's line."""
        line = frames.where(self.stack)
        return f"{line} (its backward, {self.backward})" if self.backward and self.stack else line
