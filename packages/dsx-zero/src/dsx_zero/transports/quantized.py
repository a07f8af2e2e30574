"""Quantised gathers of parameters (qwZ) and reductions of gradients (qgZ), ZeRO++ (arXiv:2306.10209).

Values are sent as integers in blocks with a scale each (`dsx_comm.compressed`). Values that cannot be quantised, such
as float64 or integers, are sent unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import dsx_comm
import torch

from ..lanes import Pending
from ..params.flat import FlatGroup
from .errors import BETWEEN, WEIGHTS, WORKER, FlatError, StoredErrors, read_range, stored_keys
from .protocol import ReduceTransport, Transport

__all__ = ["BLOCK", "QuantizedGather", "QuantizedReduceScatter"]

BLOCK = 2048
"""Elements that share a scale of 4 bytes: 0.2 % more bytes for int8, 0.8 % for 2 bits."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class QuantizedGather:
    """Every rank, the owner too, goes on with the values that the codes stand for, so that all have the same.

    Args:
        exact: carries the groups that are not quantised.
        bits: of a code.
        only_frozen: quantise groups that are not trained, and no others.
        feedback: what the codes of one step leave out is added to the values of the next.
    """

    def __init__(self, exact: Transport, *, bits: int = 8, only_frozen: bool = False, feedback: bool = False) -> None:
        self._exact, self._bits, self._only_frozen, self._feeds_back = exact, bits, only_frozen, feedback
        self._feedback: dict[FlatGroup, dsx_comm.QuantizationFeedback] = {}
        self._generation: dict[FlatGroup, int] = {}

    def tensors(self) -> list[torch.Tensor]:
        """See `Transport.tensors`: the errors."""
        return self._exact.tensors() + [held for memory in self._feedback.values() for held in memory.tensors()]

    def start(self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """See `Transport.start`."""
        if source.dtype not in _FLOATS or group.ranks.size == 1 or (self._only_frozen and group.trainable):
            return self._exact.start(out, source, group, label)
        with dsx_comm.unit(label):
            return dsx_comm.quantized_all_gather(
                out,
                source,
                self._bits,
                BLOCK,
                group=group.ranks.gather_group,
                async_op=True,
                feedback=self._memory(group) if self._feeds_back and group.trainable else None,
            )

    def errors(self, group: FlatGroup) -> Sequence[FlatError]:
        """See `KeepsErrors.errors`."""
        memory = self._feedback.get(group)
        if memory is None or not group.ranks.first_copy:
            return []
        # Where the present values were sent already, their own errors count from the next ones on only.
        rows = memory.held(upcoming=self._generation.get(group) != group.generation)
        return [FlatError(WEIGHTS, group.rank * group.layout.shard_numel, found.view(-1)) for found in rows.values()]

    def read_errors(self, group: FlatGroup, stored: StoredErrors) -> Callable[[], None]:
        """See `KeepsErrors.read_errors`. They belong to elements, so that any number of ranks can divide them."""
        numel = group.layout.shard_numel
        rows = None
        if self._feeds_back and group.trainable and WEIGHTS in stored_keys(stored, group, WEIGHTS):
            rows = torch.zeros(1, numel, device=group.key.device)
            read_range(stored, WEIGHTS, group, rows.view(-1), group.rank * numel)

        def install() -> None:
            if rows is not None:
                self._feedback.setdefault(group, dsx_comm.QuantizationFeedback()).put({0: rows})
            elif group in self._feedback:
                self._feedback[group].reset()
            self._generation.pop(group, None)

        return install

    def _memory(self, group: FlatGroup) -> dsx_comm.QuantizationFeedback:
        """The errors of a group. All gathers of one step send the same codes: forward and backward see equal values."""
        memory = self._feedback.get(group)
        if memory is None:
            memory = self._feedback[group] = dsx_comm.QuantizationFeedback()
        if self._generation.get(group) != group.generation:
            self._generation[group] = group.generation
            memory.advance()
        return memory


class QuantizedReduceScatter:
    """An all-to-all of integers in two hops, inside nodes and between them, with sums in float32.

    Args:
        exact: carries what is not quantised.
        op: `dsx_comm.ReduceOp.SUM` or `AVG`.
        hierarchy: the nodes of the ranks that share the buffers.
        bits: of a code.
        feedback: makes the memory of one group's errors; None: there is none.
    """

    def __init__(
        self,
        exact: ReduceTransport,
        op: Any,
        hierarchy: dsx_comm.Hierarchy,
        *,
        bits: int = 4,
        feedback: Callable[[], dsx_comm.QuantizationFeedback] | None = None,
    ) -> None:
        self._exact, self._op, self._hierarchy, self._bits = exact, op, hierarchy, bits
        self._make_feedback = feedback
        self._feedback: dict[FlatGroup, dsx_comm.QuantizationFeedback] = {}

    def tensors(self) -> list[torch.Tensor]:
        """See `Transport.tensors`: the errors."""
        return self._exact.tensors() + [held for memory in self._feedback.values() for held in memory.tensors()]

    def result_dtype(self, source: torch.dtype, group: FlatGroup) -> torch.dtype:
        """See `ReduceTransport.result_dtype`."""
        return source if source in _FLOATS else self._exact.result_dtype(source, group)

    def start(self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """See `Transport.start`."""
        if source.dtype not in _FLOATS:
            return self._exact.start(out, source, group, label)
        memory = None
        if self._make_feedback is not None:
            memory = self._feedback.get(group)
            if memory is None:
                memory = self._feedback[group] = self._make_feedback()
        with dsx_comm.unit(label):
            return dsx_comm.quantized_reduce_scatter(
                out, source, self._hierarchy, self._bits, BLOCK, self._op, async_op=True, feedback=memory
            )

    def errors(self, group: FlatGroup) -> Sequence[FlatError]:
        """See `KeepsErrors.errors`."""
        memory, places = self._feedback.get(group), self._hierarchy
        found = {} if memory is None else memory.held()
        errors = []
        if 0 in found:
            parts = found[0].view(places.devices, places.nodes, -1)  # in the order in which the first hop sends them
            errors.append(FlatError(f"{WORKER}{group.rank}", 0, parts.transpose(0, 1).reshape(-1)))
        if 1 in found:
            key = f"{BETWEEN}{places.node}"
            errors += [FlatError(key, start, row) for start, row in zip(self._between(group), found[1])]
        return errors

    def _between(self, group: FlatGroup) -> list[int]:
        """Where the parts that this rank adds up for each node begin in the flat buffer."""
        places, numel = self._hierarchy, group.layout.shard_numel
        return [(node * places.devices + places.device) * numel for node in range(places.nodes)]

    def read_errors(self, group: FlatGroup, stored: StoredErrors) -> Callable[[], None]:
        """See `KeepsErrors.read_errors`."""
        make = self._make_feedback
        workers, between = stored_keys(stored, group, WORKER), stored_keys(stored, group, BETWEEN)
        rows = None
        if make is not None and (workers or between):
            rows = self._read_rows(group, stored, workers, between)

        def install() -> None:
            if rows is not None and make is not None:
                self._feedback.setdefault(group, make()).put(rows)
            elif group in self._feedback:
                self._feedback[group].reset()

        return install

    def _read_rows(
        self, group: FlatGroup, stored: StoredErrors, workers: Sequence[str], between: Sequence[str]
    ) -> dict[Hashable, torch.Tensor]:
        places, layout, device = self._hierarchy, group.layout, group.key.device
        two_hops = places.intra is not None and places.inter is not None
        mine, node = f"{WORKER}{group.rank}", f"{BETWEEN}{places.node}"
        of_all = len(workers) == layout.world_size and len(between) == (places.nodes if two_hops else 0)
        own_alone = workers == (mine,) and between == ((node,) if two_hops else ())  # a `state_dict` of this rank
        flat = torch.zeros(layout.numel, device=device)
        rows: dict[Hashable, torch.Tensor] = {}
        if of_all or own_alone:
            read_range(stored, mine, group, flat, 0)
            if two_hops:
                second = rows[1] = torch.zeros(places.nodes, layout.shard_numel, device=device)
                for start, row in zip(self._between(group), second):
                    read_range(stored, node, group, row, start)
        else:
            one = torch.zeros_like(flat)
            for key in (*workers, *between):
                read_range(stored, key, group, one.zero_(), 0)
                flat += one
            # A mean is over the ranks that there are now: each makes up for the mean of then. A sum is not.
            flat /= len(workers) if self._op == dsx_comm.ReduceOp.AVG else layout.world_size
        first = flat.view(places.nodes, places.devices, -1).transpose(0, 1).reshape(-1)
        rows[0] = first.view(places.nodes if places.intra is None else places.devices, -1)
        return rows
