"""The caller's objects whose state is saved in checkpoints: an average of the weights, a sampler, and so on.

An object can be registered if it has `state_dict()` and `load_state_dict(state)`. Its state may have values of the
kinds that a client state may have (see `dsx_checkpoint.encode`). Rank 0's state is saved for all ranks. If the object
was registered with `per_rank=True`, each rank's state is saved, and restored if as many ranks load.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .errors import EngineArgumentError

__all__ = ["Registered", "has_state"]


def has_state(thing: object) -> bool:
    """Whether `thing` is an object (not a class) with both methods."""
    methods = (getattr(thing, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(thing, type) and all(map(callable, methods))


def _check_whole(thing: Any) -> None:
    """Raises `EngineArgumentError` for a copy of which this rank has only a part: a state here is of one rank."""
    from dsx_zero.copies import ModelCopy  # lazy import: only objects that are registered need it
    from dsx_zero.params.shard_view import ShardView

    if isinstance(thing, ModelCopy) and any(isinstance(value, ShardView) for value in thing.state_dict().values()):
        raise EngineArgumentError(
            "register_for_checkpointing: got a ModelCopy that is sharded over the ranks, expected an object whose state"
            " is whole on a rank; save it beside the checkpoint, on every rank, with"
            ' torch.distributed.checkpoint.save({"copy": copy}, checkpoint_id=...), and load it with load({"copy":'
            " copy}, ...), also with another number of ranks"
        )


@dataclass(frozen=True)
class _Entry:
    thing: Any
    per_rank: bool


class Registered:
    """The registered objects of one engine, by name, in the order of registration."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def add(self, things: tuple[Any, ...], name: str | None, per_rank: bool) -> None:
        """Register objects; see `Engine.register_for_checkpointing`."""
        if name is not None and len(things) != 1:
            raise EngineArgumentError(
                f"register_for_checkpointing(name={name!r}): got {len(things)} objects, expected one; register each"
                " under a name of its own"
            )
        wrong = [thing for thing in things if not has_state(thing)]
        if wrong:
            names = ", ".join(thing.__name__ if isinstance(thing, type) else type(thing).__name__ for thing in wrong)
            raise EngineArgumentError(
                f"register_for_checkpointing: got {names}, expected objects with state_dict() and"
                " load_state_dict(state)"
            )
        for thing in things:
            _check_whole(thing)
        if name is not None and name in self._entries:
            raise EngineArgumentError(f"register_for_checkpointing: the name {name!r} is taken; choose another one")
        for thing in things:
            if any(entry.thing is thing for entry in self._entries.values()):
                raise EngineArgumentError(
                    f"register_for_checkpointing: this {type(thing).__name__} is registered already"
                )
            self._entries[name or self._free_name(thing)] = _Entry(thing, per_rank)

    def _free_name(self, thing: Any) -> str:
        stem, number = type(thing).__name__, 0
        while f"{stem}.{number}" in self._entries:
            number += 1
        return f"{stem}.{number}"

    def states(self, *, per_rank: bool) -> dict[str, Any]:
        """The states of the objects that are saved per rank, or of those that are saved once."""
        return {name: e.thing.state_dict() for name, e in self._entries.items() if e.per_rank == per_rank}

    def named(self, *, per_rank: bool) -> Iterator[tuple[str, Any]]:
        """Names and objects that are saved per rank, or those that are saved once."""
        return ((name, e.thing) for name, e in self._entries.items() if e.per_rank == per_rank)
