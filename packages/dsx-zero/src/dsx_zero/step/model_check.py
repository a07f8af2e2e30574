"""Does the model still hold the parameters that were sharded?

Gradients and updates belong to the parameters that were there when the model was sharded, in the memory they had then.
A layer that was replaced afterwards, an added parameter, or new memory behind a parameter (`p.data = ...`,
`model.double()`) would silently take no part in training or be missing in checkpoints. So every step and every save
compares the identities of modules and parameters, and one address per parameter. Only if something differs, the model
is walked by name to say what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

from ..errors import ZeroStateError
from ..params.flat import FlatGroup

__all__ = ["ModelCheck"]

_MAX_NAMED = 5
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
            more = f" and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
            raise ZeroStateError(
                f"the model is not the one that was sharded: {'; '.join(problems[:_MAX_NAMED])}{more}. Training and"
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
