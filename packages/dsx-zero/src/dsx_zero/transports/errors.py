"""Errors of quantised messages in checkpoints: after a load the errors from before the save are still compensated.

A transport that keeps errors returns them per flat group as `FlatError`s, ranges of the group's flat buffer; in a
checkpoint they are ranges of parameters (`ParamSlice.ranges`) under names with an "@", by which other parts know that
not every job has them:

    weight_error@all            of parameters; every rank those of its shard
    gradient_error@R            of the first hop; rank R's of all elements
    gradient_error_between@N    of the second hop; each rank of node N those of the elements it adds up

A job with the same ranks and nodes goes on with the same bits. In a job with another layout every rank takes the mean
of all ranks' errors, so that the sum that reaches the parameters in the end is the same. Not kept: how many steps
LoCo's `reset_T` has counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..params.flat import FlatGroup

__all__ = ["ERRORS", "FlatError", "KeepsErrors", "StoredErrors", "errors_of", "note_lost"]

WEIGHTS, WORKER, BETWEEN = "weight_error@all", "gradient_error@", "gradient_error_between@"
ERRORS = (WEIGHTS, WORKER, BETWEEN)
"""Beginnings of the names."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FlatError:
    """Errors of elements `[start, start + numel)` of a flat buffer. `values`: float32, 1-D."""

    key: str
    start: int
    values: torch.Tensor


class StoredErrors(Protocol):
    """Where errors come from, by the names of parameters (`dsx_zero.Reader` is one)."""

    def state_keys(self, name: str) -> tuple[str, ...]: ...

    def state(self, key: str, name: str, start: int, stop: int) -> object: ...


class KeepsErrors(Protocol):
    """A transport with errors."""

    def errors(self, group: FlatGroup) -> Sequence[FlatError]:
        """What the group's next messages are to make up for."""
        ...

    def read_errors(self, group: FlatGroup, stored: StoredErrors) -> Callable[[], None]:
        """Read a group's errors; what is returned puts them in place of those that are there (none where none are
        stored).
        """
        ...


def errors_of(found: Sequence[FlatError], group: FlatGroup, name: str) -> Iterator[tuple[str, int, torch.Tensor]]:
    """(key, first element, values) of one parameter of the group."""
    index = group.layout.index(name)
    offset, size = group.layout.offsets[index], group.layout.sizes[index]
    for error in found:
        first, last = max(error.start, offset), min(error.start + error.values.numel(), offset + size)
        if first < last:
            yield error.key, first - offset, error.values[first - error.start : last - error.start]


def read_range(stored: StoredErrors, key: str, group: FlatGroup, out: torch.Tensor, start: int) -> None:
    """Fill `out`, elements from `start` on of the group's flat buffer, with what is stored under a key."""
    layout = group.layout
    for name, offset, size in zip(layout.names, layout.offsets, layout.sizes):
        first, last = max(start, offset), min(start + out.numel(), offset + size)
        if first >= last or key not in stored.state_keys(name):
            continue
        values = stored.state(key, name, first - offset, last - offset)
        if isinstance(values, torch.Tensor):
            out[first - start : last - start].copy_(values.reshape(-1))


def stored_keys(stored: StoredErrors, group: FlatGroup, begin: str) -> tuple[str, ...]:
    """The names of stored errors of a kind, in order."""
    found = (key for name in group.layout.names for key in stored.state_keys(name))
    return tuple(sorted({key for key in found if key.startswith(begin)}))


def note_lost(stored: StoredErrors, groups: Sequence[FlatGroup], keepers: Sequence[KeepsErrors]) -> None:
    """Say so where a checkpoint has errors and this job sends nothing that could make up for them."""
    if not keepers and any(stored_keys(stored, group, begin) for group in groups for begin in ERRORS):
        _log.info(
            "the checkpoint has errors of quantised messages, and this job has no error feedback (one rank, or other"
            " settings): what they left out of the last step is not made up for"
        )
