"""Issues the gathers of units on a lane and frees the units: the part of stage 3 that the order of collectives
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from dsx_comm.lanes import Lane, Ticket

from ..homes.home import fetching
from ..params.flat import FlatGroup
from ..params.partitioned_unit import GatheredStorage, PartitionedUnit, UnitState
from ..transports.protocol import Then, Transport
from .read_ahead import ReadAhead

__all__ = ["GatherExecutor"]


_Shard = torch.Tensor | Callable[[], torch.Tensor]
"""A shard on the device, or what brings it there in a job of the lane (`fetching`)."""


class GatherExecutor:
    """Issues gathers of units on a lane and frees the units.

    The uses of a unit are counted in ``PartitionedUnit.uses``.

    Args:
        transport: carries the shards.
        lane: runs the gathers.
        ahead: reads shards from disk before their gathers; None: no shards are on disk.
    """

    def __init__(
        self,
        units: Sequence[PartitionedUnit],
        *,
        transport: Transport,
        lane: Lane,
        ahead: ReadAhead | None = None,
    ) -> None:
        self._ahead = ahead
        self._units = {unit.index: unit for unit in units}
        self._transport, self._lane = transport, lane
        lane.see_writes_so_far()  # of the shards, on the device
        self._tickets: dict[int, list[Ticket]] = {}
        self._to_scratch: list[Ticket] = []
        self._held: set[int] = set()

    def run_gather(self, unit: int) -> None:
        """See ``Executor``. A unit that is gathered already is gathered to scratch memory, because others need it."""
        target = self._units[unit]
        if target.state is not UnitState.PARTITIONED:
            self._gather_to_scratch(target)
            return
        if self._ahead is not None:
            self._ahead.note_gather(unit)
        self._held.add(unit)
        target.state = UnitState.GATHERING
        self._tickets[unit] = []
        try:
            self._submit_gather(target)
        except BaseException:
            self.free(unit)  # a shard that cannot be read: the next gather of the unit begins afresh
            raise

    def _submit_gather(self, target: PartitionedUnit) -> None:
        jobs = []
        for store, group in zip(target.storages, target.groups):
            if not store.numel:
                continue
            shard: _Shard | None = group.shard.view()
            if shard is None or shard.device != group.key.device:
                shard = fetching(group.shard, group.key.device, self._lane)
            jobs.append(partial(self._fill, store, shard, group, target.name))
        if self._ahead is not None:
            self._ahead.read_next()  # before the jobs are submitted, because these may wait for their shards
        for job in jobs:
            self._tickets[target.index].append(self._lane.submit(job))

    def _fill(self, store: GatheredStorage, shard: _Shard, group: FlatGroup, name: str) -> Any:
        """The job of a lane that gathers a flat group of a unit."""
        store.allocate()
        source = shard if isinstance(shard, torch.Tensor) else shard()
        return self._transport.start(store.fill, source, group, name)

    def _gather_to_scratch(self, target: PartitionedUnit) -> None:
        """A rank that already holds the unit still takes part in the collective; its copy goes to scratch memory."""
        self.settle()
        for group in target.groups:
            if not group.layout.numel:
                continue
            source = fetching(group.shard, group.key.device, self._lane)
            self._to_scratch.append(self._lane.submit(partial(self._fill_scratch, source, group, target.name)))

    def _fill_scratch(self, source: Callable[[], torch.Tensor], group: FlatGroup, name: str) -> Then:
        """The job of a lane that gathers a flat group to scratch memory."""
        scratch = torch.empty(group.layout.numel, dtype=group.key.dtype, device=group.key.device)
        return Then([self._transport.start(scratch, source(), group, name)], keeps=scratch)

    def settle(self) -> None:
        """Wait for the gathers to scratch memory, and free it."""
        pending, self._to_scratch = self._to_scratch, []
        for ticket in pending:
            ticket.wait()

    def holds(self, unit: int) -> bool:
        """See ``Executor``."""
        return self._units[unit].state is not UnitState.PARTITIONED

    def discard(self, unit: int) -> None:
        """See ``Executor``. While the unit is in use, nothing happens."""
        if self._units[unit].uses == 0:
            self.free(unit)

    def arrive(self, unit: int) -> None:
        """Wait for the unit's gather, and put the plain parameters into its modules."""
        target = self._units[unit]
        if target.state is UnitState.GATHERING:
            for ticket in self._tickets.pop(unit):
                ticket.wait()
            target.state = UnitState.GATHERED
        target.swap_in()

    def sweep(self) -> None:
        """Free the units that are gathered and not in use. Gathers in flight stay."""
        for index, unit in self._units.items():
            if unit.state is UnitState.GATHERED:
                self.discard(index)

    def free_all(self) -> None:
        """Free all units and reset their counts of uses."""
        if self._ahead is not None:
            self._ahead.drop()
        for index, unit in self._units.items():
            unit.uses = 0
            self.free(index)

    def free(self, unit: int) -> None:
        """Free the unit's memory, whether it is in use or not."""
        target = self._units[unit]
        if target.state is UnitState.PARTITIONED:
            return
        if target.state is UnitState.GATHERING:
            self.arrive(unit)  # the gather in flight writes into the memory
        target.swap_out()
        for store in target.storages:
            self._lane.free_after_use(store)
        target.state = UnitState.PARTITIONED
        self._held.discard(unit)

    def held(self) -> Collection[int]:
        """See ``Executor``."""
        return self._held

    def waits_for(self, unit: int) -> bool:
        """See ``Executor``."""
        return self._ahead is not None and self._ahead.blocks_host(unit)

    def kept_tensors(self) -> list[torch.Tensor]:
        """The tensors that the transport keeps between gathers."""
        return self._transport.tensors()

    def shards_changed(self) -> None:
        """Shards have new values, which gathers must see from now on."""
        if self._ahead is not None:
            self._ahead.values_changed()
        self._lane.see_writes_so_far()
