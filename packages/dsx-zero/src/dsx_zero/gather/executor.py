"""Issues the gathers of units on a lane and frees the units: the part of stage 3 that the order of collectives
calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..homes.home import fetched
from ..lanes import Lane, Ticket
from ..params.flat import FlatGroup
from ..params.partitioned_unit import PartitionedUnit, UnitState
from ..params.storage import GatheredStorage
from ..transports.protocol import Transport
from .read_ahead import ReadAhead

__all__ = ["GatherExecutor", "GatherLimits"]


@dataclass(frozen=True)
class GatherLimits:
    """How much may be gathered at once (elements).

    ``prefetch_bucket_size`` bounds what is gathered ahead of its use (one unit is always allowed unless it is 0);
    ``max_live_parameters`` bounds what prefetching and reuse may keep. What a use needs is always gathered.
    """

    prefetch_bucket_size: int = 50_000_000
    max_live_parameters: int = 1_000_000_000


class GatherExecutor:
    """Issues gathers of units on a lane and frees them.

    The ``transport`` sends them; the uses of a unit are counted in ``PartitionedUnit.uses``.
    """

    def __init__(
        self,
        units: Sequence[PartitionedUnit],
        *,
        transport: Transport,
        lane: Lane,
        limits: GatherLimits,
        ahead: ReadAhead | None = None,
    ) -> None:
        self._ahead = ahead
        self._units = {unit.index: unit for unit in units}
        self._transport, self._lane, self._limits = transport, lane, limits
        self._tickets: dict[int, list[Ticket]] = {}
        self._passing: list[tuple[Ticket, torch.Tensor]] = []
        self.live = 0
        """Elements of all gathered units."""
        self._under_way = 0  # elements of units whose gather has not been waited for

    def run_gather(self, unit: int) -> None:
        """See ``Executor``. A unit that is there already is gathered past its users, into memory of its own."""
        target = self._units[unit]
        if target.state is not UnitState.PARTITIONED:
            self._gather_past(target)
            return
        if self._ahead is not None:
            self._ahead.gathers(unit)
        self.live += target.numel
        self._under_way += target.numel
        target.state = UnitState.GATHERING
        jobs = []
        for store, group in zip(target.storages, target.groups):
            if not store.numel:
                continue
            shard, arrival = group.shard.view(), None
            if shard is None or shard.device != group.key.device:
                shard, arrival = fetched(group.shard, group.key.device, self._lane)
            jobs.append(partial(self._fill, store, shard, arrival, group, target.name))
        if self._ahead is not None:
            self._ahead.taken()  # before the jobs, which may wait for their shards
        tickets = self._tickets[unit] = []
        for job in jobs:
            tickets.append(self._lane.submit(job))

    def _fill(
        self, store: GatheredStorage, shard: torch.Tensor, arrival: Ticket | None, group: FlatGroup, name: str
    ) -> Any:
        """What the lane does for a flat group of a unit."""
        store.allocate()
        if arrival is not None:
            arrival.wait()
        return self._transport.start(store.fill, shard, group, name)

    def _gather_past(self, target: PartitionedUnit) -> None:
        self.settle()
        for group in target.groups:
            if not group.layout.numel:
                continue
            scratch = torch.empty(group.layout.numel, dtype=group.key.dtype, device=group.key.device)
            shard, arrival = fetched(group.shard, group.key.device, self._lane)

            def gather(
                out: torch.Tensor = scratch,
                shard: torch.Tensor = shard,
                group: FlatGroup = group,
                arrival: Ticket | None = arrival,
            ) -> Any:
                if arrival is not None:
                    arrival.wait()
                return self._transport.start(out, shard, group, target.name)

            self._passing.append((self._lane.submit(gather), scratch))

    def settle(self) -> None:
        """Wait for gathers that this rank does not use."""
        passing, self._passing = self._passing, []
        for ticket, _ in passing:
            ticket.wait()

    def holds(self, unit: int) -> bool:
        """See ``Executor``."""
        return self._units[unit].state is not UnitState.PARTITIONED

    def discard(self, unit: int) -> None:
        """See ``Executor``. Nothing while the unit is in use."""
        if self._units[unit].uses == 0:
            self.free(unit)

    def arrive(self, unit: int) -> None:
        """Wait for the unit's gather and let its modules see the parameters."""
        target = self._units[unit]
        if target.state is UnitState.GATHERING:
            for ticket in self._tickets.pop(unit):
                ticket.wait()
            self._under_way -= target.numel
            target.state = UnitState.GATHERED
        target.swap_in()

    def sweep(self) -> None:
        """Free what is there and is not in use; gathers under way for later stay."""
        for index, unit in self._units.items():
            if unit.state is UnitState.GATHERED:
                self.discard(index)

    def free_all(self) -> None:
        """Free everything and forget who uses it."""
        if self._ahead is not None:
            self._ahead.drop()
        for index, unit in self._units.items():
            unit.uses = 0
            self.free(index)

    def free(self, unit: int) -> None:
        """Give the memory back, whether the unit is in use or not."""
        target = self._units[unit]
        if target.state is UnitState.PARTITIONED:
            return
        if target.state is UnitState.GATHERING:
            self.arrive(unit)  # what is under way writes into the memory
        target.swap_out()
        for store in target.storages:
            self._lane.retire(store)
        target.state = UnitState.PARTITIONED
        self.live -= target.numel

    def may_run_ahead(self, unit: int) -> bool:
        """See ``Executor``: whether the limits allow this gather before its use."""
        target = self._units[unit]
        ahead, limits = self._under_way, self._limits
        if target.state is not UnitState.PARTITIONED or self.live + target.numel > limits.max_live_parameters:
            return False
        if ahead and self._ahead is not None and self._ahead.holds_up(unit):
            # One at a time: a gather holds the host up until the disk has delivered its shard. (Whether it has would
            # be known, but not alike on all ranks, and they must run ahead alike where an evaluation comes between.)
            return False
        return limits.prefetch_bucket_size > 0 and (not ahead or ahead + target.numel <= limits.prefetch_bucket_size)

    def kept_tensors(self) -> list[torch.Tensor]:
        """What the transport keeps between gathers."""
        return self._transport.tensors()

    def follow(self) -> None:
        """Shards have new values: gathers from now on must see them."""
        if self._ahead is not None:
            self._ahead.changed()
        self._lane.follow()
