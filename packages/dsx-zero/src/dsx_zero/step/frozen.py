"""Freezing and unfreezing after the model was sharded.

What is trainable is laid out when the model is sharded. A parameter that is frozen later (`requires_grad_(False)`)
keeps its place and its states; while it is frozen the optimizer does not step it, so that neither momentum nor weight
decay moves it.

A parameter that was frozen then has no place for gradients. If the optimizer holds it, unfreezing it makes the next
forward lay the model out anew (`replanning`). What the optimizer does not hold comes with `add_param_group`; until then
it is an error at the step that such a parameter was unfrozen, instead of a parameter that never learns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from ..errors import ZeroStateError
from ..params.flat import FlatGroup
from .masters import Master

__all__ = ["Frozen"]

_SHOWN = 5


class Frozen:
    """Which parameters are frozen at the moment, against what was laid out.

    Args:
        groups: all flat groups.
        masters: what is stepped.
        held: names of the parameters that are in the optimizer's groups.
        faces: what the model holds between uses, for the `id` of each plain parameter that takes its place meanwhile.
    """

    def __init__(
        self,
        groups: Iterable[FlatGroup],
        masters: Sequence[Master],
        held: frozenset[str],
        faces: Mapping[int, torch.Tensor],
    ) -> None:
        frozen = [
            (name, parameter)
            for group in groups
            if not group.trainable
            for name, parameter in zip(group.layout.names, group.parameters)
        ]
        # A parameter that requires gradients but belongs to no optimizer here may be another optimizer's.
        self._others = [(name, p) for name, p in frozen if name not in held and not faces.get(id(p), p).requires_grad]
        self._held = [(name, p) for name, p in frozen if name in held]
        self._parameters = {id(m.tensor): m.group.parameters[m.group.layout.index(m.name)] for m in masters}

    @property
    def may_grow(self) -> bool:
        """Does the optimizer hold parameters that are laid out as frozen?"""
        return bool(self._held)

    def unfrozen(self) -> list[str]:
        """The parameters that the optimizer holds, and that train from now on."""
        return [name for name, parameter in self._held if parameter.requires_grad]

    def check(self) -> None:
        """Refuse a step without the gradient of a parameter that was unfrozen.

        Raises:
            ZeroStateError: names it; nothing has been changed.
        """
        if late := self.unfrozen():
            raise ZeroStateError(
                f"{_some(late)}: got parameters that were unfrozen since the last forward of the whole model and have"
                " no place for gradients; unfreeze before that forward, or call optimizer.replan() on every rank"
                " behind it"
            )
        if others := [name for name, parameter in self._others if parameter.requires_grad]:
            raise ZeroStateError(
                f"{_some(others)}: got parameters that require gradients now and are in no group of the optimizer,"
                " which would never learn; call optimizer.add_param_group({'params': [...]}) on every rank before the"
                " forward, or freeze them again"
            )

    def stepped(self, masters: Sequence[Master], grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients of these masters, None for those that are not to be stepped."""
        return [
            grad if self._parameters[id(master.tensor)].requires_grad else None
            for master, grad in zip(masters, grads, strict=True)
        ]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:_SHOWN]) + more
