"""Quantised gathers of parameters (qwZ) and reductions of gradients (qgZ), ZeRO++ (arXiv:2306.10209).

Values are sent as integers in blocks with a scale each (`dsx_comm.compressed`). Values that cannot be quantised, such
as float64 or integers, are sent unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import dsx_comm
import torch
from dsx_comm.compressed.blocks import BlockFormat
from dsx_comm.lanes import Pending

from ..params.flat import FlatGroup
from .errors import BETWEEN, COUNT, WORKER, FlatError, StoredErrors, read_range, stored_keys
from .protocol import ReduceTransport, Transport

__all__ = ["BLOCK", "FLOATS", "QuantizedGather", "QuantizedReduceScatter"]

BLOCK = 2048
"""Elements that share a scale of 4 bytes: 0.2 % more bytes for int8, 0.8 % for 2 bits."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class QuantizedGather:
    """Gathers quantised parameters. Every rank, the owner too, uses the dequantised values, so that all have the same.

    Args:
        exact: carries the groups that are not quantised.
        form: bits of a code, and elements of a block.
        only_frozen: quantise only groups that are not trained.
    """

    def __init__(self, exact: Transport, form: BlockFormat, *, only_frozen: bool = False) -> None:
        self._exact, self._form, self._only_frozen = exact, form, only_frozen

    def tensors(self) -> list[torch.Tensor]:
        """See `Transport.tensors`."""
        return self._exact.tensors()

    def start(self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """See `Transport.start`."""
        if source.dtype not in FLOATS or group.ranks.size == 1 or (self._only_frozen and group.trainable):
            return self._exact.start(out, source, group, label)
        with dsx_comm.unit(label):
            return dsx_comm.quantized_all_gather(
                out, source, self._form.bits, self._form.block, group=group.ranks.gather_group, async_op=True
            )


class QuantizedReduceScatter:
    """Reduces quantised gradients: an all-to-all of integers in two hops, inside nodes and between them.

    Sums are computed in float32.

    Args:
        exact: carries gradients that cannot be quantised.
        op: `dsx_comm.ReduceOp.SUM` or `AVG`.
        ranks: the ranks that share the buffers.
        hierarchy: the nodes of these ranks.
        form: bits of a code, and elements of a block.
        feedback: makes the error feedback of one group; None: there is no error feedback.
    """

    def __init__(
        self,
        exact: ReduceTransport,
        op: Any,
        ranks: dsx_comm.RankSet,
        hierarchy: dsx_comm.Hierarchy,
        form: BlockFormat,
        *,
        feedback: Callable[[], dsx_comm.QuantizationFeedback] | None = None,
    ) -> None:
        self._exact, self._op, self._hierarchy, self._form = exact, op, hierarchy, form
        self._ranks = ranks
        self._make_feedback = feedback
        self._feedback: dict[FlatGroup, dsx_comm.QuantizationFeedback] = {}

    def tensors(self) -> list[torch.Tensor]:
        """See `Transport.tensors`: the errors."""
        return self._exact.tensors() + [held for memory in self._feedback.values() for held in memory.tensors()]

    def result_dtype(self, source: torch.dtype, group: FlatGroup) -> torch.dtype:
        """See `ReduceTransport.result_dtype`."""
        return source if source in FLOATS else self._exact.result_dtype(source, group)

    def start(self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """See `Transport.start`."""
        if source.dtype not in FLOATS:
            return self._exact.start(out, source, group, label)
        memory = None
        if self._make_feedback is not None:
            memory = self._feedback.get(group)
            if memory is None:
                memory = self._feedback[group] = self._make_feedback()
        with dsx_comm.unit(label):
            return dsx_comm.quantized_reduce_scatter(
                out,
                source,
                self._hierarchy,
                self._form.bits,
                self._form.block,
                self._op,
                async_op=True,
                feedback=memory,
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

    def numbers(self, group: FlatGroup) -> Mapping[str, int]:
        """See `KeepsErrors.numbers`: the number of messages that LoCo's `reset_T` has counted."""
        memory = self._feedback.get(group)
        return {} if memory is None or not memory.period else {COUNT: memory.calls}

    def whole_errors(self, group: FlatGroup) -> Mapping[str, torch.Tensor]:
        """See `KeepsErrors.whole_errors`. Collective over this node's ranks."""
        whole: dict[str, torch.Tensor] = {}
        for error in self.errors(group):
            flat = whole.setdefault(error.key, error.values.new_zeros(group.layout.numel))
            flat[error.start : error.start + error.values.numel()] = error.values
        if self._hierarchy.intra is not None:
            for key, flat in whole.items():
                if key.startswith(BETWEEN):
                    dsx_comm.all_reduce(flat, group=self._hierarchy.intra)
        return whole

    def _between(self, group: FlatGroup) -> list[int]:
        """For each node, the position in the flat buffer at which the part begins that this rank adds up."""
        places, numel = self._hierarchy, group.layout.shard_numel
        return [(node * places.devices + places.device) * numel for node in range(places.nodes)]

    def read_errors(self, group: FlatGroup, stored: StoredErrors) -> Callable[[], None]:
        """See `KeepsErrors.read_errors`."""
        make = self._make_feedback
        if make is None or group.ranks.group is not self._ranks.group:
            return lambda: None  # there is no error feedback, or the group belongs to another rank set
        workers, between = stored_keys(stored, group, WORKER), stored_keys(stored, group, BETWEEN)
        rows = self._read_rows(group, stored, workers, between) if workers or between else {}
        calls = _number(stored, group, COUNT)

        def install() -> None:
            if rows or calls:
                self._feedback.setdefault(group, make()).put(rows, calls=calls)
            elif group in self._feedback:
                self._feedback[group].put({})

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
            # With a mean each rank takes the mean of the saved errors, because the next mean is over the present
            # ranks. With a sum, the total of the saved errors is divided among the present ranks.
            flat /= len(workers) if self._op == dsx_comm.ReduceOp.AVG else layout.world_size
        first = flat.view(places.nodes, places.devices, -1).transpose(0, 1).reshape(-1)
        rows[0] = first.view(places.nodes if places.intra is None else places.devices, -1)
        return rows


def _number(stored: StoredErrors, group: FlatGroup, key: str) -> int:
    """The number stored under a key for a group's parameters: the largest if they differ, 0 if none has it."""
    found = [stored.state(key, name, 0, 0) for name in group.layout.names if key in stored.state_keys(name)]
    return max((int(number) for number in found if isinstance(number, (int, float))), default=0)
