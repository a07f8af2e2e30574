"""Freezing and unfreezing after the model was sharded.

Sharding lays out the parameters that are trainable at that moment. A parameter that is frozen later
(`requires_grad_(False)`) keeps its place and its states. While it is frozen the optimizer does not step it, so that
neither momentum nor weight decay moves it.

A parameter that was frozen when the model was sharded has no place for gradients. If the optimizer holds it and the
user unfreezes it, the next forward lays the model out again (`replanning`). If the optimizer does not hold it, it has
to be added with `add_param_group`; until then the step raises, because the parameter would never learn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from ..errors import ZeroStateError
from ..params.flat import FlatGroup
from .masters import Master

__all__ = ["Frozen"]

_MAX_NAMED = 5


class Frozen:
    """Compares which parameters are frozen now with those that were frozen when the model was laid out.

    Args:
        groups: all flat groups.
        masters: the tensors that the optimizer steps.
        held: names of the parameters that are in the optimizer's groups.
        faces: by the `id` of each plain parameter: the parameter that the model holds between uses.
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
        # A parameter that required gradients already and is not in this optimizer may belong to another optimizer.
        self._others = [(name, p) for name, p in frozen if name not in held and not faces.get(id(p), p).requires_grad]
        self._held = [(name, p) for name, p in frozen if name in held]
        self._parameters = {id(m.tensor): m.group.parameters[m.group.layout.index(m.name)] for m in masters}

    @property
    def may_grow(self) -> bool:
        """Does the optimizer hold parameters that are laid out as frozen?"""
        return bool(self._held)

    def unfrozen(self) -> list[str]:
        """Names of the optimizer's parameters that were laid out as frozen and require gradients now."""
        return [name for name, parameter in self._held if parameter.requires_grad]

    def check(self) -> None:
        """Refuse a step that would leave out the gradient of an unfrozen parameter.

        Raises:
            ZeroStateError: names the parameter; nothing has been changed.
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
        """The gradients of these masters, with None for each master that is not to be stepped."""
        return [
            grad if self._parameters[id(master.tensor)].requires_grad else None
            for master, grad in zip(masters, grads, strict=True)
        ]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(f"'{name}'" for name in names[:_MAX_NAMED]) + more
