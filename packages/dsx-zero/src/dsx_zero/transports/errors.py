"""Errors of quantised messages in checkpoints, and in new layouts of a model.

Errors from before a load or a new layout are still compensated after it.

A transport that keeps errors returns them per flat group as `FlatError`s, which are ranges of the group's flat buffer.
In a checkpoint they are ranges of parameters (`ParamSlice.ranges`). Their names contain an "@", which marks state that
not every job has:

    gradient_error@R            errors of the first hop of rank R, for all elements
    gradient_error_between@N    errors of the second hop of node N; each rank has those of the elements it adds up
    gradient_error_count@all    number of messages that LoCo's `reset_T` has counted; one number per parameter
    weight_sent@all             values that all ranks had of the parameters before the last step (`differences`)
    weight_current@all          the same, if there has been no step since

A resumed job with the same ranks and nodes is bitwise identical. In a job with another layout every rank takes the mean
of all ranks' errors, so that the sum that reaches the parameters in the end is the same.

When a model gets a new layout, the errors of gradients are kept (`carry_errors`). Errors of parameters are not needed:
the first gather of a new layout sends the exact values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..params.flat import FlatGroup

__all__ = ["FlatError", "KeepsErrors", "StoredErrors", "carry_errors", "errors_of", "note_lost"]

WORKER, BETWEEN = "gradient_error@", "gradient_error_between@"
"""Prefixes of names."""
COUNT = "gradient_error_count@all"
SENT, CURRENT = "weight_sent@all", "weight_current@all"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FlatError:
    """Errors of elements `[start, start + values.numel())` of a flat buffer.

    Attributes:
        key: name in a checkpoint.
        start: first element.
        values: float32, 1-D.
    """

    key: str
    start: int
    values: torch.Tensor


class StoredErrors(Protocol):
    """Gives stored errors by the names of parameters (such as `dsx_zero.Reader`)."""

    def state_keys(self, name: str) -> tuple[str, ...]: ...

    def state(self, key: str, name: str, start: int, stop: int) -> object: ...


class KeepsErrors(Protocol):
    """A transport that keeps errors."""

    def errors(self, group: FlatGroup) -> Sequence[FlatError]:
        """The errors that the group's next messages compensate, or the values with which they begin."""
        ...

    def numbers(self, group: FlatGroup) -> Mapping[str, int]:
        """Numbers that belong to the group's errors, by name. They are the same on all ranks."""
        ...

    def whole_errors(self, group: FlatGroup) -> Mapping[str, torch.Tensor]:
        """The errors to carry into another layout, by name: values of all `group.layout.numel` elements.

        Values that no rank of this node has are zero. Collective.
        """
        ...

    def read_errors(self, group: FlatGroup, stored: StoredErrors) -> Callable[[], None]:
        """Read a group's errors.

        Returns:
            A function that replaces the present errors by those that were read. If none are stored, there are none
            afterwards.
        """
        ...


def errors_of(found: Sequence[FlatError], group: FlatGroup, name: str) -> Iterator[tuple[str, int, torch.Tensor]]:
    """(key, first element, values) of each range of errors of one parameter of the group."""
    index = group.layout.index(name)
    offset, size = group.layout.offsets[index], group.layout.sizes[index]
    for error in found:
        first, last = max(error.start, offset), min(error.start + error.values.numel(), offset + size)
        if first < last:
            yield error.key, first - offset, error.values[first - error.start : last - error.start]


def read_range(stored: StoredErrors, key: str, group: FlatGroup, out: torch.Tensor, start: int) -> None:
    """Fill `out`, the elements of the group's flat buffer from `start` on, with the values stored under a key."""
    layout = group.layout
    for name, offset, size in zip(layout.names, layout.offsets, layout.sizes):
        first, last = max(start, offset), min(start + out.numel(), offset + size)
        if first >= last or key not in stored.state_keys(name):
            continue
        values = stored.state(key, name, first - offset, last - offset)
        if isinstance(values, torch.Tensor):
            out[first - start : last - start].copy_(values.reshape(-1))


def stored_keys(stored: StoredErrors, group: FlatGroup, begin: str) -> tuple[str, ...]:
    """The sorted names of stored errors that begin with `begin`."""
    found = (key for name in group.layout.names for key in stored.state_keys(name))
    return tuple(sorted({key for key in found if key.startswith(begin)}))


@dataclass
class _Carried:
    """`StoredErrors` of one unit that gets a new layout.

    Attributes:
        values: errors of whole parameters, flattened, by key and by name of the parameter.
        numbers: numbers, by key and by name of the parameter.
    """

    values: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    numbers: dict[str, dict[str, int]] = field(default_factory=dict)

    def state_keys(self, name: str) -> tuple[str, ...]:
        return tuple(key for found in (self.values, self.numbers) for key, names in found.items() if name in names)

    def state(self, key: str, name: str, start: int, stop: int) -> object:
        if key in self.numbers:
            return self.numbers[key].get(name)
        return self.values[key][name][start:stop]


def carry_errors(
    old: Sequence[tuple[Sequence[FlatGroup], Sequence[FlatGroup]]],
    keepers: Sequence[KeepsErrors],
    into: Sequence[KeepsErrors],
) -> None:
    """Carry errors into another layout (collective).

    Args:
        old: for each unit, the groups that were trained, and the groups that are trained from now on.
        keepers: the transports that have the errors of the former.
        into: the transports that get them for the latter.
    """
    for before, after in old:
        carried = _Carried()
        for keeper in keepers:
            for group in before:
                layout, numbers = group.layout, keeper.numbers(group)
                places = list(zip(layout.names, layout.offsets, layout.sizes))
                for key, whole in keeper.whole_errors(group).items():
                    found = {name: whole[offset : offset + size] for name, offset, size in places}
                    carried.values.setdefault(key, {}).update(found)
                for key, number in numbers.items():
                    carried.numbers.setdefault(key, {}).update(dict.fromkeys(layout.names, number))
        if carried.values or carried.numbers:
            for keeper in into:
                for group in after:
                    keeper.read_errors(group, carried)()


def note_lost(stored: StoredErrors, groups: Sequence[FlatGroup], keepers: Sequence[KeepsErrors]) -> None:
    """Log it if a checkpoint has errors and this job has no error feedback that could compensate them."""
    if not keepers and any(stored_keys(stored, group, begin) for group in groups for begin in (WORKER, BETWEEN)):
        _log.info(
            "the checkpoint has errors of quantised gradients, and this job has no error feedback (one rank, or other"
            " settings): what they left out of the last step is not made up for"
        )
