"""Freezing and unfreezing after the model was sharded.

What is trainable is laid out when the model is sharded. A parameter that is frozen later (`requires_grad_(False)`)
keeps its place; while it is frozen the optimizer does not step it, so that neither momentum nor weight decay moves it.
A parameter that was frozen then has no place for gradients: unfreezing it is an error at the next step, instead of a
parameter that never learns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..errors import ZeroStateError
from ..params.flat import UNFREEZE, FlatGroup
from .masters import Master

__all__ = ["Frozen"]


class Frozen:
    """Which parameters are frozen at the moment, against what was laid out."""

    def __init__(self, groups: Iterable[FlatGroup], masters: Sequence[Master]) -> None:
        # A parameter that requires gradients but belongs to no optimizer here may be another optimizer's.
        self._laid_out_frozen = [
            (name, parameter)
            for group in groups
            if not group.trainable
            for name, parameter in zip(group.layout.names, group.parameters)
            if not parameter.requires_grad
        ]
        self._parameters = {id(m.tensor): m.group.parameters[m.group.layout.index(m.name)] for m in masters}

    def check(self) -> None:
        """Raise for a parameter that was unfrozen since the model was sharded.

        Raises:
            ZeroStateError: names it; nothing has been changed.
        """
        for name, parameter in self._laid_out_frozen:
            if parameter.requires_grad:
                raise ZeroStateError(f"parameter '{name}' requires gradients now, but {UNFREEZE}")

    def stepped(self, masters: Sequence[Master], grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients of these masters, None for those that are not to be stepped."""
        return [
            grad if self._parameters[id(master.tensor)].requires_grad else None
            for master, grad in zip(masters, grads, strict=True)
        ]
