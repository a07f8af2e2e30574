"""An all-gather and a reduce-scatter that send int8 or int4 (ZeRO++, arXiv:2306.10209, sections 3.1 and 3.3).

The gather sends each rank's part quantised; every rank, the sender too, goes on with what the codes say, so that all have
the same bits. The reduce-scatter takes two hops, so that little crosses between nodes: with N nodes of D devices, part
(n, d) of the input belongs to device d of node n. Within a node, device d receives from its neighbours the parts
(0, d) .. (N - 1, d) and adds them up in float32; between nodes, equal devices exchange those sums, quantised again:

    in the node      (D - 1) / D of the input, quantised
    between nodes    (N - 1) / N of 1 / D of it, quantised

Left out: error feedback for gradients (LoCo), stochastic rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..calls import Call, Labels, check_labels, run, share_volume
from ..checks import contiguous, nbytes, reduce_kind, share
from ..collectives import ReduceOp, settle, start_all_gather
from ..errors import CommArgumentError
from ..exchange import start_all_to_all
from ..groups import Membership, member
from ..works import Handle
from .blocks import BlockFormat, dequantize_from, quantize_into
from .hierarchy import Hierarchy

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
    **labels: Unpack[Labels],
) -> Any:
    """output (N s elements) = the ranks' `input` (s elements) one after the other, each rounded to int8 or int4 by blocks.

    Float32, bfloat16 or float16; `input` may be this rank's part of `output`, which then changes too. A world of one
    copies and rounds nothing.
    """
    name = "quantized_all_gather"
    to, form = member(group), BlockFormat(bits, block_size)
    share(output, input, to, name, ("output", "input"))
    contiguous(output, name, "output")
    _check_dtype(input, name)
    message = form.message_bytes(input.numel())
    call = Call(
        name, to.group, to.size, nbytes(input), share_volume(message, to.size), input.device, check_labels(labels)
    )

    def issue() -> Any:
        if to.size == 1 or not input.numel():
            return settle(start_all_gather(output, input, to), async_op)
        return settle(_start_gather(output, input, form, to), async_op)

    return run(call, issue, async_op)


def _check_dtype(tensor: torch.Tensor, name: str) -> None:
    if tensor.dtype not in _FLOATS:
        raise CommArgumentError(f"{name}: got {tensor.dtype}, expected one of {', '.join(map(str, _FLOATS))}")


def _start_gather(output: torch.Tensor, source: torch.Tensor, form: BlockFormat, to: Membership) -> Handle:
    numel = source.numel()
    own = torch.zeros(form.message_bytes(numel), dtype=torch.uint8, device=source.device)
    quantize_into(own, source.contiguous().view(-1), form)
    received = own.new_empty(to.size * own.numel())
    work = start_all_gather(received, own, to)

    def finish() -> None:
        for part, message in zip(output.view(to.size, -1), received.view(to.size, -1)):
            part.copy_(dequantize_from(message, numel, form))

    return Handle([work], finish)


def quantized_reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    hierarchy: Hierarchy,
    bits: int = 4,
    block_size: int = 2048,
    op: Any = ReduceOp.AVG,
    **labels: Unpack[Labels],
) -> None:
    """output (s elements) = part `rank` of the sum or mean of all ranks' `input` (N s elements), sent as int8 or int4.

    Counted as one call per hop, each on its own group. Float32, bfloat16 or float16; added up in float32. A world of one
    copies and rounds nothing.

    Raises:
        CommArgumentError: sizes, dtypes or operator do not fit.
    """
    name = "quantized_reduce_scatter"
    to, form = member(hierarchy.group), BlockFormat(bits, block_size)
    share(input, output, to, name, ("input", "output"))
    contiguous(output, name, "output")
    _check_dtype(input, name)
    kind = reduce_kind(op, input, name)
    if kind not in (ReduceOp.SUM, ReduceOp.AVG):
        raise CommArgumentError(f"{name}: op: got {op}, expected ReduceOp.SUM or ReduceOp.AVG")
    with torch.no_grad():
        rows = input.contiguous().view(hierarchy.nodes, hierarchy.devices, -1).transpose(0, 1).reshape(to.size, -1)
        if hierarchy.intra is not None:  # [devices][nodes x s] -> [nodes x s]
            rows = _hop(rows.view(hierarchy.devices, -1), hierarchy.intra, form, name, labels)
        if hierarchy.inter is not None:
            rows = _hop(rows.view(hierarchy.nodes, -1), hierarchy.inter, form, name, labels)
        total = rows.reshape(-1)
        output.view(-1).copy_(total / to.size if kind == ReduceOp.AVG else total)


def _hop(rows: torch.Tensor, group: Any, form: BlockFormat, name: str, labels: Any) -> torch.Tensor:
    """Send row p to rank p of the group, quantised; the float32 sum of what arrives, in rank order."""
    to, numel = member(group), rows.shape[1]
    size = form.message_bytes(numel)
    part = nbytes(rows) // to.size
    call = Call(name, to.group, to.size, part, share_volume(size, to.size), rows.device, check_labels(labels))
    total = torch.zeros(numel, device=rows.device)

    def issue() -> None:
        if not numel:
            return
        messages = torch.zeros(to.size * size, dtype=torch.uint8, device=rows.device)
        for row, message in zip(rows, messages.view(to.size, -1)):
            quantize_into(message, row, form)
        received = torch.empty_like(messages)
        settle(start_all_to_all(received, messages, to), async_op=False)
        for message in received.view(to.size, -1):
            total.add_(dequantize_from(message, numel, form))

    run(call, issue)
    return total
