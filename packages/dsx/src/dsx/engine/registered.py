"""The caller's objects whose state is saved in checkpoints: an average of the weights, a sampler, and so on.

An object can be registered if it has `state_dict()` and `load_state_dict(state)`. Its state may have values of the
kinds that a client state may have (see `dsx_checkpoint.encode`). Rank 0's state is saved for all ranks. If the object
was registered with `per_rank=True`, each rank's state is saved, and restored if as many ranks load.

A copy of the model's values (`optimizer.copy_of()`) is saved by parameter, beside the optimizer's states, so that it
loads at any number of ranks. `ShardsWithCopies` is both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..utils.logging import logger
from .errors import EngineArgumentError

if TYPE_CHECKING:
    from dsx_zero import ZeroOptimizer
    from dsx_zero.copies import ModelCopy

__all__ = ["Registered", "ShardsWithCopies", "has_state"]


def has_state(thing: object) -> bool:
    """Whether `thing` is an object (not a class) with both methods."""
    methods = (getattr(thing, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(thing, type) and all(map(callable, methods))


class _CopyState:
    """The small state of a copy of the model's values (`dsx_zero.ModelCopy`), whose values lie beside the optimizer's
    states.
    """

    def __init__(self, copy: ModelCopy, name: str) -> None:
        self.copy, self.name = copy, name
        self.was_read = False

    def read(self, reader: Any) -> Callable[[], None]:
        """Read the values; see `ModelCopy.read`."""
        install = self.copy.read(reader, self.name)
        self.was_read = install is not None
        return install or (lambda: None)

    def state_dict(self) -> dict[str, Any]:
        return self.copy.small_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.was_read:
            self.copy.load_small_state(state)
        else:
            logger.warning(
                "load_checkpoint: the values of the copy %r were not read (only weights, or a part of the model, are"
                " loaded); it is not changed",
                self.name,
            )


@dataclass(frozen=True)
class ShardsWithCopies:
    """The sharded state of an engine together with the registered copies of its values, as one part of a checkpoint."""

    shards: ZeroOptimizer
    copies: Sequence[_CopyState]

    def slices(self, *, lazily: bool = False) -> Iterator[Any]:
        """See `ZeroOptimizer.slices`."""
        found = self.shards.slices(lazily=lazily)
        for held in self.copies:
            found = held.copy.slices(found, held.name)
        return found

    def read_slices(self, reader: Any) -> Any:
        """See `ZeroOptimizer.read_slices`."""
        load = self.shards.read_slices(reader)
        for held in self.copies:
            load.add(held.read(reader))
        return load


@dataclass(frozen=True)
class _Entry:
    thing: Any
    per_rank: bool

    def is_of(self, thing: Any) -> bool:
        """Whether this object was registered."""
        return self.thing is thing or (isinstance(self.thing, _CopyState) and self.thing.copy is thing)


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
        if name is not None and name in self._entries:
            raise EngineArgumentError(f"register_for_checkpointing: the name {name!r} is taken; choose another one")
        for thing in things:
            if any(entry.is_of(thing) for entry in self._entries.values()):
                raise EngineArgumentError(
                    f"register_for_checkpointing: this {type(thing).__name__} is registered already"
                )
            found = name or self._free_name(thing)
            self._entries[found] = _Entry(self._to_save(thing, found, per_rank), per_rank)

    @staticmethod
    def _to_save(thing: Any, name: str, per_rank: bool) -> Any:
        """The object whose state is saved: of a copy of the model's values the small state."""
        from dsx_zero.copies import ModelCopy  # lazy import: only objects that are registered need it

        if not isinstance(thing, ModelCopy):
            return thing
        if per_rank:
            raise EngineArgumentError(
                "register_for_checkpointing: got a ModelCopy with per_rank=True; leave that out: it is saved by"
                " parameter, and loads at any number of ranks"
            )
        if not name.replace(".", "").replace("_", "").replace("-", "").isalnum():
            raise EngineArgumentError(
                f"register_for_checkpointing(name={name!r}): expected letters, digits, '.', '_' and '-': the name is"
                " part of the names of tensors"
            )
        return _CopyState(thing, name)

    def copies(self) -> tuple[_CopyState, ...]:
        """The registered copies of the model's values."""
        return tuple(e.thing for e in self._entries.values() if isinstance(e.thing, _CopyState))

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
