"""Quantised gathers of parameters (qwZ) and reductions of gradients (qgZ), ZeRO++ (arXiv:2306.10209).

Values travel as integers in blocks with a scale each (`dsx_comm.compressed`). What cannot be quantised, such as float64
or integers, travels as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dsx_comm
import torch

from ..lanes import Pending
from ..params.flat import FlatGroup
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
