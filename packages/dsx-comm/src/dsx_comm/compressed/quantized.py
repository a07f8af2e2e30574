"""An all-gather and a reduce-scatter that send int8 or int4 (ZeRO++, arXiv:2306.10209, sections 3.1 and 3.3).

The gather sends each rank's part quantised; every rank, the sender too, goes on with what the codes say, so that all
have the same bits. The reduce-scatter takes two hops, so that little crosses between nodes: with N nodes of D devices,
part (n, d) of the input belongs to device d of node n. Within a node, device d receives from its neighbours the parts
(0, d) .. (N - 1, d) and adds them up in float32; between nodes, equal devices exchange those sums, quantised again:

    in the node      (D - 1) / D of the input, quantised
    between nodes    (N - 1) / N of 1 / D of it, quantised

An asynchronous reduce-scatter does both hops by itself; the gather decodes where it is waited for.

With a `QuantizationFeedback` each message makes up for what the one before left out. Left out: stochastic rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..calls import Call, Labels, check_labels, run, share_volume
from ..checks import check_even_split, contiguous, nbytes, reduce_kind
from ..collectives import ReduceOp, settle, start_all_gather
from ..errors import CommArgumentError
from ..exchange import start_all_to_all
from ..groups import Membership, member
from ..step_lane import Step
from ..works import Done, Handle
from .blocks import BlockFormat, dequantize_rows, quantize_rows, sum_rows
from .hierarchy import Hierarchy
from .residuals import QuantizationFeedback

if TYPE_CHECKING:
    from typing_extensions import Unpack

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def quantized_all_gather(
    output: torch.Tensor,
    input: torch.Tensor,
    bits: int = 8,
    block_size: int = 2048,
    group: Any = None,
    async_op: bool = False,
    *,
    feedback: QuantizationFeedback | None = None,
    **labels: Unpack[Labels],
) -> Any:
    """output (N s elements) = the ranks' `input` (s elements) one after the other, each rounded to int8, int4 or 2 bits
    by blocks.

    Float32, bfloat16 or float16; `input` may be this rank's part of `output`, which then changes too. A world of one
    copies and rounds nothing. `feedback`: the memory of this rank's `input`; its `advance` is the caller's, when the
    input has new values.
    """
    name = "quantized_all_gather"
    to, form = member(group), BlockFormat(bits, block_size)
    check_even_split(output, input, to, name, ("output", "input"))
    contiguous(output, name, "output")
    _check_dtype(input, name)
    message = form.message_bytes(input.numel())
    call = Call(
        name, to.group, to.size, nbytes(input), share_volume(message, to.size), input.device, check_labels(labels)
    )

    def issue() -> Any:
        if to.size == 1 or not input.numel():
            return settle(start_all_gather(output, input, to), async_op)
        return settle(_start_gather(output, input, form, to, feedback), async_op)

    return run(call, issue, async_op)


def _check_dtype(tensor: torch.Tensor, name: str) -> None:
    if tensor.dtype not in _FLOATS:
        raise CommArgumentError(f"{name}: got {tensor.dtype}, expected one of {', '.join(map(str, _FLOATS))}")


def _start_gather(
    output: torch.Tensor,
    source: torch.Tensor,
    form: BlockFormat,
    to: Membership,
    feedback: QuantizationFeedback | None,
) -> Handle:
    rows = source.contiguous().view(1, -1)
    own = (quantize_rows(rows, form) if feedback is None else feedback.encode(0, rows, form)).view(-1)
    received = own.new_empty(to.size * own.numel())
    work = start_all_gather(received, own, to)

    def finish() -> None:
        dequantize_rows(received.view(to.size, -1), form, output.view(to.size, -1))

    return Handle([work], finish)


def quantized_reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    hierarchy: Hierarchy,
    bits: int = 4,
    block_size: int = 2048,
    op: Any = ReduceOp.AVG,
    async_op: bool = False,
    *,
    feedback: QuantizationFeedback | None = None,
    **labels: Unpack[Labels],
) -> Any:
    """output (s elements) = part `rank` of the sum or mean of all ranks' `input` (N s elements), sent as int8, int4 or
    2 bits.

    Counted as one call per hop, each on its own group. Float32, bfloat16 or float16; added up in float32. A world of
    one copies and rounds nothing.

    With `async_op` a handle is returned at once, and both hops, with what is encoded and decoded, go on beside the
    caller's computation (`hierarchy.lane`); `input` and `output` must be left alone until the handle was waited for.
    Otherwise None. `feedback`: the memory of this buffer, for both hops; each call advances it.

    Raises:
        CommArgumentError: sizes, dtypes or operator do not fit.
    """
    name = "quantized_reduce_scatter"
    to, form = member(hierarchy.group), BlockFormat(bits, block_size)
    check_even_split(input, output, to, name, ("input", "output"))
    contiguous(output, name, "output")
    _check_dtype(input, name)
    kind = reduce_kind(op, input, name)
    if kind not in (ReduceOp.SUM, ReduceOp.AVG):
        raise CommArgumentError(f"{name}: op: got {op}, expected ReduceOp.SUM or ReduceOp.AVG")
    reduction = _Reduction(output, input, hierarchy, form, to.size if kind == ReduceOp.AVG else 1, feedback)
    steps = reduction.steps(name, check_labels(labels))
    if not steps:
        with torch.no_grad():
            output.view(-1).copy_(input.reshape(-1))
        return settle(Done(), async_op)
    return hierarchy.lane.do(steps, (input, output), async_op)


class _Reduction:
    """One reduce-scatter under way, hop by hop."""

    def __init__(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        hierarchy: Hierarchy,
        form: BlockFormat,
        divisor: int,
        feedback: QuantizationFeedback | None,
    ) -> None:
        self._feedback = feedback
        self._output, self._source, self._places = output, source, hierarchy
        self._form, self._divisor = form, divisor
        self._sum = source  # of the hops so far

    def steps(self, name: str, labels: Labels) -> list[Step]:
        """The hops that this hierarchy has; none for one rank, or without elements."""
        places, numel = self._places, self._output.numel()
        hops = [(places.intra, places.devices, places.nodes * numel), (places.inter, places.nodes, numel)]
        steps: list[Step] = []
        for group, size, row in hops:
            if group is None or not row:
                continue
            sent = share_volume(self._form.message_bytes(row), size)
            part = row * (self._source.element_size() if not steps else 4)
            call = Call(name, member(group).group, size, part, sent, self._source.device, labels)
            steps.append((call, self._step(group, first=not steps)))
        if steps:
            call, last = steps[-1]
            steps[-1] = (call, self._ending(last))
        return steps

    def _step(self, group: Any, *, first: bool) -> Callable[[], None]:
        def step() -> None:
            if first:
                self._sum = self._in_hop_order()
                if self._feedback is not None:
                    self._feedback.advance()
            self._sum = self._hop(member(group), 0 if first else 1)

        return step

    def _ending(self, last: Callable[[], None]) -> Callable[[], None]:
        def step() -> None:
            last()
            self._output.view(-1).copy_(self._sum.div_(self._divisor))
            self._sum = self._source

        return step

    def _in_hop_order(self) -> torch.Tensor:
        """The input's parts in the order in which the first hop sends them: [devices][nodes][s]."""
        places = self._places
        return self._source.contiguous().view(places.nodes, places.devices, -1).transpose(0, 1).reshape(-1)

    def _hop(self, to: Membership, number: int) -> torch.Tensor:
        """Send row p of what there is to rank p of the group, quantised; the float32 sum of what arrives, in rank
        order.
        """
        rows = self._sum.view(to.size, -1)
        feedback = self._feedback
        messages = quantize_rows(rows, self._form) if feedback is None else feedback.encode(number, rows, self._form)
        received = torch.empty_like(messages)
        settle(start_all_to_all(received.view(-1), messages.view(-1), to), async_op=False)
        return sum_rows(received, rows.shape[1], self._form)
