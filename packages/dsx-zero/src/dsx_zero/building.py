"""Makes the `Runtime` of a sharded model from a plan (`recipe`); `assembling` makes what an optimizer steps with of it.

`shard` does it once; `replanning` does it again with another plan and keeps the groups that do not change (`Kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import dsx_comm
import torch
from dsx_comm.lanes import make_lane

from .gather.publishing import Gathering, Replicated, broadcast_first
from .grads.gradients import Gradients
from .grads.local import NoReductions
from .grads.reduction import LocalReducer, ReductionEngine
from .grads.reductions import Reducer, Reductions
from .homes.ring import Ring
from .order.agreed import AgreedOrder
from .order.ahead import GatherLimits
from .order.backward import BackwardClock
from .order.channel import AskingChannel, OneRank, channel_of
from .order.executor import CollectiveExecutor
from .order.protocol import Channel, NullOrder, Order
from .params.flat import FlatGroup, Unit
from .params.kept import KeptGroups
from .params.memory import Memory, OrdinaryMemory, memory_of
from .plan.rank_sets import ranks_of_buffers
from .plan.units import GroupPlan
from .recipe import Planned, Recipe
from .runtime import Publisher, Runtime
from .step.masters import Masters, replace_parameters
from .step.norm import groups_of_norm
from .step.states import OptimizerStates
from .transports.plain import Cast, RowsAllReduce
from .transports.protocol import ReduceTransport, Transport
from .transports.turns import InTurn, ReducesInTurn, Turns

if TYPE_CHECKING:
    from .gather.hooks import UnitHooks
    from .params.partitioned_unit import PartitionedUnit


__all__ = ["NOTHING_KEPT", "Builder", "Kept"]


@dataclass(frozen=True)
class Kept:
    """Parts of the earlier layout that go on.

    Attributes:
        groups: flat groups.
        masters: their masters.
        held: the `id`s of tensors whose states the optimizer holds on to.
        earlier: the states of the previous layout; None: there is none.
        hooks: those of stage 3 on the modules.
    """

    groups: KeptGroups = field(default_factory=KeptGroups)
    masters: Mapping[FlatGroup, Masters] = field(default_factory=dict)
    held: frozenset[int] = frozenset()
    earlier: OptimizerStates | None = None
    hooks: UnitHooks | None = None


NOTHING_KEPT = Kept()


class Builder:
    """Makes the parts of a `Runtime` in the right order, again for every plan of one recipe."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe = recipe
        self.lane = make_lane(device)
        """For what comes and goes between tiers. Gathers and reductions have lanes of their own."""
        self.ring = Ring(device) if device.type == "cuda" else None
        """For gradients that go to host memory whose pages are not locked, or to disk."""
        self.moving_lanes = {"tiers": self.lane}
        """Those on which copies between tiers run: that of gathers too, which fetch shards."""
        self._device = device
        self._turns = Turns() if device.type == "cuda" else None
        self._with_gathers: dict[dsx_comm.RankSet, dsx_comm.RankSet] = {}
        self._channel: AskingChannel | None = None
        self._agreement_group: Any = None

    def build(self, planned: Planned, inner: Any, kept: Kept = NOTHING_KEPT) -> Runtime:
        """The runtime of a plan (collective). At stage 3 the modules get other parameters, which take the places of
        the old ones in the optimizer.
        """
        build = _Build(self, planned, kept)
        return build.partitioned(inner) if self.recipe.settings.stage == 3 else build.resident()

    def gathers_of(self, ranks: dsx_comm.RankSet) -> dsx_comm.RankSet:
        """The rank set with a group of its own for gathers (collective for a set's first time)."""
        if ranks not in self._with_gathers:
            self._with_gathers[ranks] = self.recipe.groups.take_for_gathers(ranks)
        return self._with_gathers[ranks]

    def gather_transport(self, sets: Collection[dsx_comm.RankSet], units: Sequence[PartitionedUnit]) -> Transport:
        """For the parameters of stage 3 in these units, which these sets share."""
        made = self.recipe.transports.gather(sets)
        hooked: dict[FlatGroup, Any] = {g: s for u in units for g, s in zip(u.groups, u.storages) if g.key.hooked}
        if hooked:
            from .transports.hooked import HookedGather  # lazy import: most models have none

            made = HookedGather(made, hooked)
        return made if self._turns is None else InTurn(made, self._turns)

    def in_turn(self, made: ReduceTransport) -> ReduceTransport:
        """The transport for gradients, whose messages follow those for parameters on a CUDA device."""
        return made if self._turns is None else ReducesInTurn(made, self._turns)

    def channel(self) -> AskingChannel | None:
        """For the words of the order (collective the first time); None where there is one rank."""
        data, groups = self.recipe.data, self.recipe.groups
        if data.size > 1 and self._channel is None:
            shared = self.recipe.settings.stage < 3 and dsx_comm.get_backend(data.group) == "gloo"
            group = data.group if shared else groups.take_control(data)
            self._channel = channel_of(group, data.rank, data.size)
        return self._channel

    def agreement_group(self, runtime: Runtime) -> Any:
        """For norms with which the ranks agree (collective the first time); None where they agree by messages."""
        data, asked = self.recipe.data, self.recipe.settings.step_agreement == "norm"
        if asked and data.size > 1 and data.group in runtime.norm_groups and self._agreement_group is None:
            self._agreement_group = self.recipe.groups.take_for_norms(data)
        return self._agreement_group


class _Build:
    """One runtime being made."""

    def __init__(self, builder: Builder, planned: Planned, kept: Kept) -> None:
        recipe = builder.recipe
        self._builder, self._planned, self._kept = builder, planned, kept
        self.model, self.settings, self.precision = recipe.model, recipe.settings, recipe.precision
        self.reduction, self.data, self.groups = recipe.reduction, recipe.data, recipe.groups
        self.placement, self.transports = recipe.placement, recipe.transports
        self.infos, self.plans, self.averaging = planned.infos, planned.plans, planned.averaging
        self._keeps_local = None if self.averaging is None else self.averaging.local
        self.placed, self.lane, self.device = planned.placed, builder.lane, builder._device
        self._keepers = len(getattr(recipe.transports, "keepers", ()))  # of an earlier plan

    def resident(self) -> Runtime:
        """Stages 0-2: whole parameters stay in memory."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))

        def memory(ranks: dsx_comm.RankSet) -> Memory:  # at stage 0 no parameters are gathered
            return memory_of(ranks) if self.settings.stage > 0 else OrdinaryMemory()

        def made(plan: GroupPlan) -> FlatGroup:
            known = self._kept.groups.groups.get(plan)
            if known is not None:
                return known
            group = FlatGroup.resident(plan, [parameters[n] for n in plan.layout.names], memory=memory(plan.key.ranks))
            if group.visible is not None:
                broadcast_first(group.visible, group.ranks)
            return group

        units = tuple(Unit(plan, tuple(made(group) for group in plan.groups)) for plan in self.plans)
        self._share_buffers()
        alone = self.data.size == 1
        publisher: Publisher = Replicated()
        if self.settings.stage > 0 and not alone:
            publisher = Gathering(self.settings.allgather_bucket_size)
        whole = alone and self.placement.on_device  # one rank without offload has nothing to divide
        stage = 0 if whole else self.settings.stage
        return self._runtime(units, stage, publisher, self._gradients(units, stage))

    def partitioned(self, inner: Any) -> Runtime:
        """Stage 3: the modules get other parameters, which take the places of the old ones in the optimizer."""
        from .gather.executor import GatherExecutor  # lazy import: stages 0-2 need none of it
        from .gather.lifetime import GatherLifetime
        from .gather.stage3 import Stage3, limits_of, partition, read_ahead_of

        settings = self.settings
        sets = dict.fromkeys(group.key.ranks for plan in self.plans for group in plan.groups)
        with_gathers = {ranks: self._builder.gathers_of(ranks) for ranks in sets}
        plans = [plan.on(with_gathers.__getitem__) for plan in self.plans]
        channel = self._builder.channel() or OneRank()
        found = partition(self.model, self.infos, plans, tier=self.placement.parameters, kept=self._kept.groups)
        replace_parameters(inner, lambda old: found.plain_of.get(id(old), old))
        self._share_buffers()
        lane = self._builder.moving_lanes["gathers"] = make_lane(self.device)
        gathers = GatherExecutor(
            found.partitioned,
            transport=self._builder.gather_transport(tuple(with_gathers.values()), found.partitioned),
            lane=lane,
            ahead=read_ahead_of(found.partitioned, self.placement.parameters),
        )
        reductions = self._reductions(found.units, 3, lambda: gradients.complete())
        order = self._order(
            CollectiveExecutor(reductions.run_reduce, gathers), channel, limits_of(found.partitioned, settings)
        )
        clock = BackwardClock(order)
        # Before the gradients: a backward begins for it first, and ends for it last.
        lifetime = GatherLifetime(found.partitioned, executor=gathers, order=order, clock=clock)
        gradients = Gradients(
            self.model,
            reductions,
            order,
            clock,
            on_complete=lifetime.gradients_complete,
            keeps_local=self._keeps_local,
        )
        gathering = Gathering(settings.allgather_bucket_size)
        stage = Stage3(self.model, found, gathering, gathers, order, lifetime, gradients, hooks=self._kept.hooks)
        return self._runtime(found.units, 3, stage, gradients)

    def _runtime(self, units: tuple[Unit, ...], stage: int, publisher: Publisher, gradients: Gradients) -> Runtime:
        dtypes = {group.key.dtype for unit in units for group in unit.trainable}
        return Runtime(
            model=self.model,
            stage=stage,
            ranks=self.data,
            norm_groups=self._norm_groups(units, stage),
            groups=self.groups,
            infos=self.infos,
            units=units,
            gradients=gradients,
            publisher=publisher,
            averaging=self.averaging,
            checks_overflow=self.precision.checks_overflow(dtypes),
            load_masters=self.settings.load_from_fp32_weights,
            errors=tuple(getattr(self.transports, "keepers", ())[self._keepers :]),
        )

    def _norm_groups(self, units: tuple[Unit, ...], stage: int) -> tuple[Any, ...]:
        sets = {group.ranks for unit in units for group in unit.trainable}
        return groups_of_norm(sets, self.data, whole=stage == 0)

    def _gradients(self, units: tuple[Unit, ...], stage: int) -> Gradients:
        """Of stages 0-2."""
        precision = self.precision
        dtypes = {group.key.dtype for unit in units for group in unit.trainable}
        dense = not any(group.key.sparse for unit in units for group in unit.trainable)
        same = all(precision.gradient_dtype(dtype) == dtype for dtype in dtypes)
        # Plain gradients of slices would let each rank clip by the norm of its own.
        sliced = any(group.ranks.tensor_groups for unit in units for group in unit.groups)
        if stage == 0 and self.data.size == 1 and dense and same and not sliced:
            order = NullOrder(CollectiveExecutor(lambda unit: None))
            return Gradients(self.model, NoReductions(units), order, BackwardClock(order))
        reductions = self._reductions(units, stage, lambda: gradients.complete())
        order = self._order(CollectiveExecutor(reductions.run_reduce), self._builder.channel())
        clock = BackwardClock(order)
        gradients = Gradients(self.model, reductions, order, clock, keeps_local=self._keeps_local)
        return gradients

    def _reductions(self, units: tuple[Unit, ...], stage: int, complete: Callable[[], None]) -> Reductions:
        lane = make_lane(self.device)
        with_rows = {group.ranks for unit in units for group in unit.trainable if group.key.sparse}

        def reducer(ranks: dsx_comm.RankSet) -> ReductionEngine:
            if ranks.size == 1:
                return LocalReducer.of(ranks, self.reduction)
            rows = partial(self._rows_transport, ranks) if ranks in with_rows else None
            return Reducer(ranks, self.reduction, partial(self._reduce_transport, stage > 0), lane, rows)

        differ = any(
            group.ranks.holders is not self.data.group or group.ranks.tensor_groups
            for unit in units
            for group in unit.groups
        )
        return Reductions(
            units,
            stage=stage,
            precision=self.precision,
            reducer=reducer,
            complete=complete,
            # Plain tensors at stage 0 would let each rank clip by its own norm.
            grads_are_views=self.reduction.op == "mean" and not differ,
            differ=differ,
            norm_groups=self._norm_groups(units, stage),
            overlap=self.settings.overlap_comm is not False,
            memory=memory_of,
            tier=lambda unit: self.placed(unit).gradients,
            lane=self.lane,
            ring=self._builder.ring,
        )

    def _rows_transport(self, ranks: dsx_comm.RankSet, op: Any) -> ReduceTransport:
        return self._builder.in_turn(
            Cast(RowsAllReduce(op, self.groups.take_for_rows(ranks)), self.precision.wire_dtype)
        )

    def _reduce_transport(self, scatters: bool, op: Any, ranks: dsx_comm.RankSet) -> ReduceTransport:
        return self._builder.in_turn(self.transports.reduce(op, ranks, scatters=scatters))

    def _order(
        self, executor: CollectiveExecutor, channel: Channel | None, limits: GatherLimits | None = None
    ) -> Order:
        """The order that the ranks agree on over the channel; None: every need is executed as it comes."""
        if channel is None:
            return NullOrder(executor)
        names = {plan.index: str(plan) for plan in self.plans}
        return AgreedOrder(executor, channel, limits=limits, names=names, alone=self.data.size == 1)

    def _share_buffers(self) -> None:
        """The first rank's buffers become those of all ranks that hold the module."""
        if self._kept.earlier is not None:
            return  # they are the ranks' own since
        held = {name: group.key.ranks for plan in self.plans for group in plan.groups for name in group.layout.names}
        aliases = {alias: held[info.name] for info in self.infos for alias in info.aliases}
        for buffer, ranks in ranks_of_buffers(self.model, {**held, **aliases}, self.data):
            broadcast_first(buffer, ranks)
