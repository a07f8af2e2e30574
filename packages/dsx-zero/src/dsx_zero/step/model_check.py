"""Changes of the model by the user since it was sharded: its parameters, and which of them are frozen.

Gradients and updates belong to the parameters that were there when the model was sharded, in the memory they had then.
A layer that was replaced afterwards, an added parameter, or new memory behind a parameter (`p.data = ...`,
`model.double()`) would silently take no part in training or be missing in checkpoints. So every step and every save
compares the identities of modules and parameters, and one address per parameter (`ModelCheck`). Only if something
differs, the model is walked by name to say what.

Sharding lays out the parameters that are trainable at that moment. A parameter that is frozen later
(`requires_grad_(False)`) keeps its place and its states (`Frozen`). While it is frozen the optimizer does not step it,
so that neither momentum nor weight decay moves it. A parameter that was frozen when the model was sharded has no place
for gradients. If the optimizer holds it and the user unfreezes it, the next forward lays the model out again
(`replanning`). If the optimizer does not hold it, it has to be added with `add_param_group`; until then the step
raises, because the parameter would never learn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from dsx_core.errors import first_few
from torch import nn

from ..errors import ZeroStateError
from ..params.flat import FlatGroup
from .masters import Master

__all__ = ["Frozen", "ModelCheck"]

_REMEDY = (
    "Change values in place (`with torch.no_grad(): p.copy_(value)`, model.load_state_dict(...) without assign=True);"
    " change the model (layers, dtype, device, parametrizations, pruning) before dsx_zero.shard or dsx.initialize, or"
    " shard it again with a new optimizer"
)
_ADDED = "was added"
_REMEDY_ADDED = (
    "Put new layers (an adapter, a head) into the model before dsx_zero.shard or dsx.initialize, frozen if they are to"
    " train later; a layer that something else trains stays outside the model, with an optimizer of its own"
)


class ModelCheck:
    """Remembers a model as it was sharded.

    Args:
        model: the model, sharded.
        groups: its flat groups.
        faces: by the `id` of each plain parameter: the `id` of the parameter that the model holds between uses.
        moved: whether a parameter now lies in memory of another sharded model (a frozen part that both use).
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Iterable[FlatGroup],
        *,
        faces: Mapping[int, int],
        moved: Callable[[torch.Tensor], bool],
    ) -> None:
        self._model, self._faces, self._moved = model, faces, moved
        self._resident: list[tuple[torch.Tensor, list[tuple[torch.Tensor, int, torch.Size]]]] = []
        self._gathered: list[tuple[torch.Tensor, int]] = []
        """Parameters with their storage objects; storages without bytes have no address."""
        self._names_of: dict[int, str] = {}
        for group in groups:
            self._names_of.update(
                (id(parameter), name) for name, parameter in zip(group.layout.names, group.parameters)
            )
            if group.visible is None:
                self._gathered.extend((p, p.untyped_storage()._cdata) for p in group.parameters)
            else:
                # Relative to the buffer: `model.share_memory()` moves it with everything in it.
                start = group.visible.data_ptr()
                places: list[tuple[torch.Tensor, int, torch.Size]] = [
                    (p, p.data_ptr() - start, p.shape) for p in group.parameters if p.numel()
                ]
                self._resident.append((group.visible, places))
        self._parameters = dict(self._named())
        self._modules = list(model.modules())  # also so that no other object gets the identity of one of them
        self._snapshot = self._take_snapshot()

    def _named(self) -> Iterator[tuple[str, int]]:
        faces = self._faces
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            yield name, faces.get(id(parameter), id(parameter))

    def _take_snapshot(self) -> list[object]:
        """Names and identities that change when a module or a parameter is replaced, added or removed anywhere."""
        faces, seen = self._faces, []
        for module in self._modules:
            seen.extend(module._modules)
            seen.extend(map(id, module._modules.values()))
            seen.extend(module._parameters)
            keys = list(map(id, module._parameters.values()))
            seen.extend(map(faces.get, keys, keys))
        return seen

    def check(self) -> None:
        """Compare the model with the one that was sharded.

        Raises:
            ZeroStateError: names what differs; nothing has been changed.
        """
        problems = [
            f"'{self._names_of[id(parameter)]}' has other memory now ({parameter.dtype}, shape"
            f" {tuple(parameter.shape)}, {parameter.device})"
            for buffer, places in self._resident
            for start in (buffer.data_ptr(),)
            for parameter, offset, shape in places
            if (parameter.data_ptr() - start != offset or parameter.shape != shape or not parameter.is_contiguous())
            and not self._moved(parameter)
        ]
        problems += [
            f"'{self._names_of[id(parameter)]}' was given other memory while it was gathered"
            for parameter, storage in self._gathered
            if parameter.untyped_storage()._cdata != storage  # no function of ours: this runs per parameter and step
        ]
        if self._take_snapshot() != self._snapshot:
            problems += self._differences()
            if not problems:  # only modules without parameters of their own were exchanged
                self._modules = list(self._model.modules())
                self._snapshot = self._take_snapshot()
        if problems:
            remedy = _REMEDY_ADDED if all(problem.endswith(_ADDED) for problem in problems) else _REMEDY
            raise ZeroStateError(
                f"the model is not the one that was sharded: {first_few(problems, between='; ')}. Training and"
                f" checkpoints would go on with the parameters of before. {remedy}",
                code="DSX306",
            )

    def _differences(self) -> list[str]:
        now = dict(self._named())
        return [
            *(
                f"'{name}' was replaced by another parameter"
                for name, key in now.items()
                if self._parameters.get(name, key) != key
            ),
            *(f"'{name}' {_ADDED}" for name in now if name not in self._parameters),
            *(f"'{name}' is not there any more" for name in self._parameters if name not in now),
        ]


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
    return first_few(f"'{name}'" for name in names)
