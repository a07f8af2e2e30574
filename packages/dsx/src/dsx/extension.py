"""Extensions: features that an engine is given, each in one place.

An extension takes part in building an engine: it brings its section of the configuration, changes the model before it
is sharded, adds to the engine (`Watch`), and has a state in checkpoints. dsx's own features are extensions, too
(`features.py`). `dsx.initialize(extensions=[...])` takes further ones, and installed packages offer theirs as entry
points of the group `dsx.extensions`, whose name is that of the section.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import nn

from .engine.errors import EngineArgumentError
from .engine.report import Counters
from .engine.watch import Watch as EngineWatch

if TYPE_CHECKING:
    from dsx_comm import RankSets
    from dsx_zero import ZeroOptimizer
    from pydantic import BaseModel

    from .config import Config
    from .engine.engine import Engine
    from .engine.parts import EngineParts
    from .engine.request import Request

__all__ = [
    "Extension",
    "Stateful",
    "Watch",
    "Watched",
    "checked_extensions",
    "mean_over_ranks",
    "named",
    "sections_of",
    "states_of",
]


class Stateful(Protocol):
    """An object with a state for checkpoints: values as those of a client state."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class Watch(EngineWatch):
    """The additions of extensions to an engine (see `dsx.engine.watch.Watch`), and the function that makes it.

    Attributes:
        make_engine: makes the engine of its `EngineParts` (which hold this object); None: `Engine`.
    """

    make_engine: Callable[[EngineParts], Engine] | None = None


class Extension:
    """Takes part in building an engine. Subclasses override what they need; each method is called once, on every rank,
    in the order in which they stand here. An object of another class does as well if it has all of these methods.
    """

    name: str = ""
    """The name of its section and of its state in checkpoints; no two extensions of an engine have the same."""
    section: ClassVar[type[BaseModel] | None] = None
    """The pydantic model of its section, which must refuse unknown keys (`dsx.config.Section` does). None: dsx models
    the section, or there is none. `NO_EFFECT` of the model maps keys that mean nothing to a reason
    (`dsx.config.sections.judged` names further tables); its method `findings()` yields what is wrong with values that
    are valid one by one (`dsx_core.Finding`).
    """

    def begin(self, keys: Mapping[str, Any], model: nn.Module, rank: int) -> None:
        """Look at the model as the caller gave it.

        Args:
            keys: of the whole configuration, as they were written; they are not checked yet.
            model: before the configuration changes it.
            rank: of this process.
        """

    def prepare(self, keys: Mapping[str, Any], request: Request) -> Request:
        """Change what is to be built before the ranks and the batch sizes are known: cut the model, name the groups of
        ranks. Collective.
        """
        return request

    def configured(self, config: Config) -> None:
        """The configuration is right. The ranks may not have joined yet. `config.use(name)` gives the section."""

    def before_shard(self, request: Request, config: Config, topology: RankSets) -> Request:
        """Change the model, which is whole (or this rank's part of it) and not yet on its device. Collective.

        Returns:
            The request, with further parameters if the model got some.
        """
        return request

    def join(self, watch: Watch, to: Watched) -> None:
        """Add hooks, observers and other parts to the engine. They are called in the order of the extensions."""

    def state(self) -> Stateful | None:
        """The object whose state is saved under `name` and loaded at any number of ranks; None: there is no state."""
        return None


_METHODS = ("begin", "prepare", "configured", "before_shard", "join", "state")


@dataclass(frozen=True)
class Watched:
    """An engine that is being built, as its extensions see it: everything is there but the first step.

    Attributes:
        module, optimizer: the sharded model and its shards.
        micro_batches: returns the number of backwards of the coming update.
        loss_scale: returns the factor of losses.
        trains: whether the engine has an optimizer.
    """

    config: Config
    topology: RankSets
    module: nn.Module
    optimizer: ZeroOptimizer
    counters: Counters
    micro_batches: Callable[[], int]
    loss_scale: Callable[[], float] = lambda: 1.0
    trains: bool = True

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.topology.rank == 0

    @property
    def distributed(self) -> bool:
        """Whether there are other ranks."""
        return self.topology.world_size > 1

    @property
    def stages(self) -> int:
        """Ranks of a pipeline; 1 without one."""
        groups = self.topology.groups
        return 1 if groups is None else groups.size("pipe")

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))


def mean_over_ranks(topology: RankSets) -> Callable[[torch.Tensor], Any] | None:
    """Averages a tensor over the data-parallel ranks in place; None with one rank."""
    if topology.data.size == 1:
        return None
    import dsx_comm  # lazy import: who calls this has it

    return lambda tensor: dsx_comm.all_reduce(tensor, dsx_comm.ReduceOp.AVG, topology.data.group)


def checked_extensions(extensions: Any) -> tuple[Extension, ...]:
    """The extensions that `initialize` is given.

    Raises:
        EngineArgumentError: this is no list, or an item is no extension.
    """
    if not isinstance(extensions, Sequence) or isinstance(extensions, str):
        raise EngineArgumentError(
            f"initialize(extensions=...): got {type(extensions).__name__}, expected a list of extensions"
        )
    for one in extensions:
        missing = [name for name in _METHODS if not callable(getattr(one, name, None))]
        if missing or isinstance(one, type):
            what = f"the class {one.__name__}" if isinstance(one, type) else f"a {type(one).__name__}"
            without = f" without {', '.join(missing)}" if missing else ""
            raise EngineArgumentError(
                f"initialize(extensions=...): got {what}{without}, expected an object of a class derived from"
                " dsx.Extension"
            )
    return tuple(extensions)


def named(extensions: Sequence[Extension]) -> dict[str, Extension]:
    """The extensions by name; those without a name are left out.

    Raises:
        EngineArgumentError: two have the same name.
    """
    found: dict[str, Extension] = {}
    for one in extensions:
        name = getattr(one, "name", "")
        if name in found:
            raise EngineArgumentError(
                f"initialize(extensions=...): got two extensions with the name {name!r}"
                f" ({type(found[name]).__name__}, {type(one).__name__}), expected one; rename or leave out one"
            )
        if name:
            found[name] = one
    return found


def sections_of(extensions: Sequence[Extension]) -> dict[str, type[BaseModel]]:
    """The models of the extensions' sections, by name.

    Raises:
        EngineArgumentError: an extension with a section has no name.
    """
    found: dict[str, type[BaseModel]] = {}
    for one in extensions:
        section = getattr(one, "section", None)
        if section is not None:
            found[_name_of(one, "a section")] = section
    return found


def states_of(extensions: Sequence[Extension]) -> dict[str, Stateful]:
    """The extensions' states for checkpoints, by name.

    Raises:
        EngineArgumentError: an extension with a state has no name.
    """
    found: dict[str, Stateful] = {}
    for one in extensions:
        state = one.state()
        if state is not None:
            found[_name_of(one, "a state")] = state
    return found


def _name_of(one: Extension, what: str) -> str:
    name = getattr(one, "name", "")
    if not name:
        raise EngineArgumentError(
            f"initialize(extensions=...): got a {type(one).__name__} with {what} and without a name, expected one; set"
            " `name` in its class"
        )
    return name
