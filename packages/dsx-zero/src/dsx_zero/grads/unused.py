"""`ignore_unused_parameters: false`: a trainable parameter that got no gradient since the last step is an error, on
every rank.

By default a parameter without a gradient counts as zeros. The setting is for finding a branch of the model that was
forgotten. What is missing is merged from rank to rank and cut to a few names and ranks on the way, so that what a rank
receives does not grow with the job.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import dsx_comm
import torch

from ..errors import ZeroStateError
from ..params.flat import Unit

__all__ = ["UnusedParameters"]

_MAX_NAMED = 8  # parameters in an error, and ranks of each

_Missing = dict[tuple[int, str], tuple[int, list[int]]]
"""For a parameter (place, name): how many ranks got no gradient for it, and the first of them."""


class UnusedParameters:
    """Finds trainable parameters that got no gradient.

    Args:
        units: the units of the model.
        ranks: the ranks that compare.
    """

    def __init__(self, units: Iterable[Unit], ranks: dsx_comm.RankSet) -> None:
        self._ranks = ranks
        groups = [group for unit in units for group in unit.trainable]
        pairs = [(n, p) for group in groups for n, p in zip(group.layout.names, group.parameters)]
        self._names = [name for name, _ in pairs]
        # The parameters that only some ranks hold (experts), by the group of these ranks. Tokens need not reach each.
        self._held: dict[int, tuple[Any, list[int]]] = {}
        place = 0
        for group in groups:
            places = range(place, place := place + len(group.layout.names))
            if group.ranks.holders is not ranks.group:
                _, held = self._held.setdefault(id(group.ranks.holders), (group.ranks.holders, []))
                held.extend(places)
        self._seen = torch.zeros(len(pairs), dtype=torch.uint8, device="cpu")
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, index))
            for index, (_, parameter) in enumerate(pairs)
        ]

    def _arrived(self, index: int, parameter: torch.Tensor) -> None:
        self._seen[index] = 1

    def check(self) -> None:
        """Check the gradients since the last call on all ranks (collective), and begin a new count.

        Raises:
            ZeroStateError: on every rank, with the names of the first few parameters and ranks. Nothing has been
                changed.
        """
        mine, self._seen = self._seen, torch.zeros_like(self._seen)
        group = self._ranks.group
        complete = bool(mine.all())
        if self._ranks.size > 1:  # whose gradients are missing is asked only where some are
            complete = dsx_comm.merge_objects(complete, lambda one, other: one and other, group)
        if complete:
            return
        missing = self._missing(bytearray(mine.tolist()))
        if self._ranks.size > 1:
            missing = dsx_comm.merge_objects(missing, _both, group)
        if missing:
            told = "; ".join(_text(name, *found) for (_, name), found in sorted(missing.items())[:_MAX_NAMED])
            more = "; and more" if len(missing) > _MAX_NAMED else ""
            raise ZeroStateError(
                f"no gradient since the last step for {told}{more}. Use them in the loss,"
                " freeze them (requires_grad=False), or let them count as zeros (ignore_unused_parameters: true)"
            )

    def _missing(self, seen: bytearray) -> _Missing:
        """This rank's parameters without a gradient. An expert has one if any of its holders has one."""
        for holders, places in self._held.values():
            for place, found in zip(places, dsx_comm.merge_objects(bytes(seen[p] for p in places), _either, holders)):
                seen[place] = found
        absent = [place for place, found in enumerate(seen) if not found]
        return {(place, self._names[place]): (1, [self._ranks.rank]) for place in absent[: _MAX_NAMED + 1]}

    def remove_hooks(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()


def _either(one: bytes, other: bytes) -> bytes:
    return bytes(a | b for a, b in zip(one, other))


def _both(one: _Missing, other: _Missing) -> _Missing:
    """The parameters that two sets of ranks miss: the first ones, and one more, which says that there are more."""
    for parameter, (count, ranks) in other.items():
        had, first = one.get(parameter, (0, []))
        one[parameter] = had + count, [*first, *ranks][:_MAX_NAMED]
    return dict(sorted(one.items())[: _MAX_NAMED + 1])


def _text(name: str, count: int, ranks: list[int]) -> str:
    more = f" and {count - len(ranks)} more" if count > len(ranks) else ""
    return f"{name} (rank {', '.join(map(str, ranks))}{more})"
