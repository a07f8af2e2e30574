"""Units: which parameters are gathered, reduced and freed together, decided by name.

At stage 3 a unit is a child of an outermost `nn.ModuleList` (a transformer block); everything else is the root unit. A
tied parameter is one tensor with several names and belongs to the unit of the lowest common ancestor of the modules
that hold it. At stages 0-2 nothing is freed, so a unit is only a message: blocks stay whole, but small neighbours share
one message and large remainders are cut, in definition order.

Plans are frozen data, equal on all ranks for equal models; nothing here communicates or allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm, prod
from typing import TYPE_CHECKING

from dsx_comm import ParameterMarks, RankSet
from dsx_core import nearest
from dsx_core.modules import block_names

from ..errors import ZeroStateError
from .layout import FlatLayout

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "GATHER_HOOKS",
    "GroupKey",
    "GroupPlan",
    "ParameterInfo",
    "Persistence",
    "RanksOf",
    "UnitPlan",
    "find_parameters",
    "first_name",
    "plan_units",
]

SMALL_MESSAGE = 1 << 20
"""Elements: neighbouring blocks below this size share one message at stages 0-2."""
LARGE_MESSAGE = 1 << 23
"""Elements: at stages 0-2 parameters outside blocks are cut into messages of about this size, so that reducing
overlaps backward.
"""

STAGE3_BUCKET = 1 << 20
"""Elements: at stage 3 parameters outside blocks beyond this many are gathered in buckets of modules, not all at
once.
"""


UNMARKED = ParameterMarks()

GATHER_HOOKS = "dsx_gather_hooks"
"""The attribute of parameters that are sent in a form of their own (`params.gather_hooks`)."""


@dataclass(frozen=True)
class ParameterInfo:
    """One tensor of the model. `name` is its first name in definition order, `aliases` its other (tied) names, `marks`
    what its owner says about the ranks that hold it, `sparse` whether its gradients are rows with indices.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    trainable: bool
    numel: int
    marks: ParameterMarks = UNMARKED
    requires_grad: bool = True
    """Whether its owner wants gradients; `trainable` too if an optimizer steps it."""
    sparse: bool = False
    """Whether its gradients are rows with indices."""
    hooked: bool = False
    """Whether it is sent in a form of its own."""


RanksOf = Callable[[ParameterInfo], RankSet]
"""Chooses which ranks share the flat buffer of a parameter: the same for a parameter on all of them."""


@dataclass(frozen=True)
class GroupKey:
    """The facts that the parameters of one flat buffer share. `ranks`: who shares the buffer. `sparse`, `hooked`: the
    name of its only parameter, where that has gradients of rows, or is gathered in a form of its own, row by row.
    """

    dtype: torch.dtype
    device: torch.device
    trainable: bool
    ranks: RankSet
    sparse: str = ""
    hooked: str = ""


@dataclass(frozen=True)
class GroupPlan:
    """One flat buffer of a unit."""

    key: GroupKey
    layout: FlatLayout


@dataclass(frozen=True)
class Persistence:
    """Parameters that stay whole at stage 3: those of at most `parameter` elements, in definition order, until there
    are `total` elements.
    """

    parameter: int = 0
    total: int = 2**63 - 1

    def choose(self, infos: tuple[ParameterInfo, ...]) -> tuple[ParameterInfo, ...]:
        """The parameters that stay whole. Empty ones always do."""
        chosen, total = [], 0
        for info in infos:
            if info.numel == 0 or (info.numel <= self.parameter and total + info.numel <= self.total):
                chosen.append(info)
                total += info.numel
        return tuple(chosen)


@dataclass(frozen=True)
class UnitPlan:
    """A unit. `module` is the name of the module it belongs to ("" for the root); a `resident` one stays whole at
    stage 3.
    """

    index: int
    module: str
    groups: tuple[GroupPlan, ...]
    resident: bool = False
    members: tuple[str, ...] = ()

    @cached_property
    def users(self) -> tuple[str, ...]:
        """Names of the modules whose forward needs the unit: `module`, or the `members` of a bucket of modules."""
        return self.members or (self.module,)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all its parameters."""
        return tuple(name for group in self.groups for name in group.layout.names)

    def on(self, ranks: Callable[[RankSet], RankSet]) -> UnitPlan:
        """The same unit with `ranks(set)` in the place of every rank set (of the same size)."""
        groups = (replace(group, key=replace(group.key, ranks=ranks(group.key.ranks))) for group in self.groups)
        return replace(self, groups=tuple(groups))

    def __str__(self) -> str:
        return f"unit {self.index} ({self.module or 'root'})"


def find_parameters(model: nn.Module, trainable: frozenset[int] | None = None) -> tuple[ParameterInfo, ...]:
    """Every distinct parameter in definition order.

    `trainable` limits, by `id`, which of the parameters that require gradients count as trainable (those an optimizer
    holds).
    """
    names: dict[int, list[str]] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        found[id(parameter)] = parameter
    return tuple(
        ParameterInfo(
            name=names[key][0],
            aliases=tuple(names[key][1:]),
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            device=parameter.device,
            trainable=parameter.requires_grad and (trainable is None or key in trainable),
            numel=parameter.numel(),
            marks=ParameterMarks.read(parameter),
            requires_grad=parameter.requires_grad,
            hooked=GATHER_HOOKS in vars(parameter),
        )
        for key, parameter in found.items()
    )


def tile_names(model: nn.Module) -> tuple[str, ...]:
    """Names of modules that are units although they may lie in a block: the tiles of a `TiledLinear`."""
    return tuple(
        f"{name}.{inner}" if name else inner
        for name, module in model.named_modules()
        if getattr(type(module), "children_are_units", False)
        for inner, child in module.named_modules()
        if next(child.children(), None) is None and next(child.parameters(), None) is not None
    )


def common_module(names: tuple[str, ...]) -> str:
    """Name of the lowest module that contains every one of these parameters ("" for the root)."""
    paths = [name.split(".")[:-1] for name in names]
    shared = []
    for parts in zip(*paths):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _home(info: ParameterInfo, blocks: frozenset[str]) -> str:
    """The innermost block a parameter belongs to; "" when it belongs to the root."""
    parts = common_module((info.name, *info.aliases)).split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in blocks:
            return ".".join(parts[:end])
    return ""


def _by_module(infos: tuple[ParameterInfo, ...], blocks: tuple[str, ...]) -> Iterator[tuple[str, list[ParameterInfo]]]:
    homes: dict[str, list[ParameterInfo]] = {"": []}
    homes.update((block, []) for block in blocks)
    known = frozenset(blocks)
    for info in infos:
        homes[_home(info, known)].append(info)
    return ((module, members) for module, members in homes.items() if members)


def _by_size(
    infos: tuple[ParameterInfo, ...], blocks: tuple[str, ...], limit: int
) -> Iterator[tuple[str, list[ParameterInfo]]]:
    known = frozenset(blocks)
    small, large = min(SMALL_MESSAGE, limit), min(LARGE_MESSAGE, limit)
    members: list[ParameterInfo] = []
    size, label = 0, ""
    for info in infos:
        home = _home(info, known)
        full = size >= large and not (home and home == label)
        if members and (full or (home != label and size >= small)):
            yield label, members
            members, size = [], 0
        label = home if not members else label if home == label else ""
        members.append(info)
        size += info.numel
    if members:
        yield label, members


def _buckets(infos: list[ParameterInfo], bucket_size: int) -> Iterator[tuple[tuple[str, ...], list[ParameterInfo]]]:
    """The root's parameters in buckets of whole modules, in definition order; those of the root module itself come
    first.
    """
    owners: dict[str, list[ParameterInfo]] = {"": []}
    for info in infos:
        owners.setdefault(common_module((info.name, *info.aliases)), []).append(info)
    own = owners.pop("")
    if own:
        yield ("",), own
    names: list[str] = []
    members: list[ParameterInfo] = []
    size = 0
    for name, found in owners.items():
        more = sum(info.numel for info in found)
        if members and size + more > bucket_size:
            yield tuple(names), members
            names, members, size = [], [], 0
        names.append(name)
        members.extend(found)
        size += more
    if members:
        yield tuple(names), members


def _groups(
    members: list[ParameterInfo], ranks_of: RanksOf, undivided: bool, block: int, *, gathered: bool = False
) -> tuple[GroupPlan, ...]:
    """`gathered`: they are gathered for each use, and may be in a form of their own."""
    keys: dict[GroupKey, list[ParameterInfo]] = {}
    for info in members:
        alone = info.name if info.sparse and info.trainable else ""
        ranks = ranks_of(info)
        # Its hooks take as many rows from each rank; where one rank has all, nothing is sent.
        divided = ranks.size > 1 and ranks.near is None and not (undivided and info.trainable)
        by_rows = gathered and info.hooked and divided
        key = GroupKey(
            info.dtype, info.device, info.trainable, ranks, sparse=alone, hooked=info.name if by_rows else ""
        )
        keys.setdefault(key, []).append(info)
    return tuple(
        GroupPlan(
            key,
            FlatLayout.build(
                ((i.name, i.shape) for i in infos),
                world_size=key.ranks.size,
                itemsize=key.dtype.itemsize,
                undivided=undivided and key.trainable,
                block=lcm(block if key.trainable else 1, prod(infos[0].shape[1:]) if key.hooked else 1),
            ),
        )
        for key, infos in keys.items()
    )


def plan_units(
    model: nn.Module,
    infos: tuple[ParameterInfo, ...],
    *,
    stage: int,
    ranks_of: RanksOf,
    reduce_bucket_size: int = 500_000_000,
    persistence: Persistence | None = None,
    bucket_size: int = STAGE3_BUCKET,
    leaves: frozenset[str] = frozenset(),
    undivided: bool = False,
    block: int = 1,
) -> tuple[UnitPlan, ...]:
    """Divide the parameters among units, in definition order of the modules (the root unit first at stage 3).

    `ranks_of` says which ranks share a parameter's buffer; parameters of one unit with other ranks lie in other
    buffers. `reduce_bucket_size` (elements) bounds the units of stages 0-2; a single parameter above it communicates in
    pieces. At stage 3 what lies outside all blocks is one unit up to `bucket_size` elements; more is divided into
    buckets of whole modules. The modules named by `leaves` are units of their own, whatever they contain. `undivided`:
    each trainable parameter is owned by one rank, at the stages that divide anything. `block`: elements of a trainable
    parameter that no boundary may cut.
    """
    blocks = block_names(model, leaves)
    if stage != 3:
        chosen = _by_size(infos, blocks, reduce_bucket_size)
        return tuple(
            UnitPlan(i, module, _groups(members, ranks_of, undivided and stage > 0, block))
            for i, (module, members) in enumerate(chosen)
        )
    blocks += tuple(name for name in tile_names(model) if name not in blocks)
    small = (persistence or Persistence()).choose(infos)
    kept = frozenset(info.name for info in small)
    halves = ([i for i in small if i.trainable], [i for i in small if not i.trainable])
    units: list[tuple[str, list[ParameterInfo], bool, tuple[str, ...]]]
    units = [("", half, True, ()) for half in halves if half]
    for module, members in _by_module(tuple(info for info in infos if info.name not in kept), blocks):
        if module or sum(info.numel for info in members) <= bucket_size:
            units.append((module, members, False, ()))
        else:
            units.extend((home[0], found, False, home) for home, found in _buckets(members, bucket_size))
    return tuple(
        UnitPlan(i, module, _groups(members, ranks_of, undivided, block, gathered=not resident), resident, users)
        for i, (module, members, resident, users) in enumerate(units)
    )


def first_name(infos: Sequence[ParameterInfo], name: str) -> str:
    """The first name of a parameter, given any of its names.

    Raises:
        ZeroStateError: the model has no parameter of this name.
    """
    for info in infos:
        if name == info.name or name in info.aliases:
            return info.name
    near = nearest(name, [info.name for info in infos])
    raise ZeroStateError(f"the model has no parameter {name!r}" + (f"; is it {near[0]!r}?" if near else ""))
