"""Matrix products of segments (grouped GEMM). A segment is a range of consecutive rows with its own matrix.

    segment_matmul(rows [R, n], weights [L, n, m], counts)   ->  [R, m]; with a bias [L, m], it is added
    segment_outer(left [R, n], right [R, m], counts)         ->  [L, n, m]

Segment i consists of the `counts[i]` rows after those of segment i - 1. Empty segments give no rows and zero matrices.
The derivative of each product is made of the other one, so gradients of any order exist. On a CUDA device with bfloat16
all segments are one kernel (`torch.nn.functional.grouped_mm`), if torch has it and it takes the sizes. Otherwise each
segment is one GEMM that writes its part of the result and adds the bias: a repeated bias and a sum would be two more
tensors of the size of the result, whose pages the system clears each time. Left out: transposed outputs, and data types
below 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F


def segment_matmul(
    rows: torch.Tensor, weights: torch.Tensor, counts: Sequence[int], bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[R, m]: every segment of `rows` [R, n] times its matrix of `weights` [L, n, m], plus its row of `bias` [L, m].

    Segment i has `counts[i]` rows, which may be 0. The counts add up to R.
    """
    return _Matmul.apply(rows, weights, bias, tuple(counts))  # type: ignore[no-any-return]


def segment_outer(left: torch.Tensor, right: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """[L, n, m]: for every segment, the transpose of its rows in `left` times its rows in `right`."""
    return _Outer.apply(left, right, tuple(counts))  # type: ignore[no-any-return]


def repeat_per_segment(values: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """[R, m]: row i of `values` [L, m], repeated `counts[i]` times."""
    return _Repeat.apply(values, tuple(counts))  # type: ignore[no-any-return]


def segment_sum(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """[L, m]: the sum of the rows of every segment."""
    return _Sum.apply(rows, tuple(counts))  # type: ignore[no-any-return]


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, counts: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.counts = counts
        if _one_kernel(rows, weights.shape[1], weights.shape[2]):
            out = F.grouped_mm(rows.contiguous(), _unit_stride(weights), offs=_ends(counts, rows.device))
            return out if bias is None else out.add_(repeat_per_segment(bias, counts))
        out = rows.new_empty(rows.shape[0], weights.shape[2])
        for i, (start, end) in enumerate(_bounds(counts)):
            if bias is None:
                torch.mm(rows[start:end], weights[i], out=out[start:end])
            else:
                torch.addmm(bias[i], rows[start:end], weights[i], out=out[start:end])
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, Any, Any, None]:  # type: ignore[override]
        rows, weights = ctx.saved_tensors
        to_rows = segment_matmul(grad, weights.transpose(1, 2), ctx.counts) if ctx.needs_input_grad[0] else None
        to_weights = segment_outer(rows, grad, ctx.counts) if ctx.needs_input_grad[1] else None
        to_bias = segment_sum(grad, ctx.counts) if ctx.needs_input_grad[2] else None
        return to_rows, to_weights, to_bias, None


class _Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        ctx.save_for_backward(left, right)
        ctx.counts = counts
        if _one_kernel(left, left.shape[1], right.shape[1]):
            return F.grouped_mm(left.contiguous().t(), right.contiguous(), offs=_ends(counts, left.device))
        # [m, n] and a transposed view: the weights of linear layers have this layout, and their gradient then needs no
        # copy
        out = left.new_empty(len(counts), right.shape[1], left.shape[1])
        for i, (start, end) in enumerate(_bounds(counts)):
            torch.mm(right[start:end].t(), left[start:end], out=out[i])
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, Any, None]:  # type: ignore[override]
        left, right = ctx.saved_tensors
        to_left = segment_matmul(right, grad.transpose(1, 2), ctx.counts) if ctx.needs_input_grad[0] else None
        to_right = segment_matmul(left, grad, ctx.counts) if ctx.needs_input_grad[1] else None
        return to_left, to_right, None


class _Repeat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        ctx.counts = counts
        return values.repeat_interleave(
            to_device(torch.tensor(counts, device="cpu"), values.device), dim=0, output_size=sum(counts)
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:  # type: ignore[override]
        return segment_sum(grad, ctx.counts), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        ctx.counts = counts
        return torch.stack([part.sum(0) for part in rows.split(counts)])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:  # type: ignore[override]
        return repeat_per_segment(grad, ctx.counts), None


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Host values on a device. They go through locked memory, so that the host does not wait for the copy."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def _bounds(counts: Sequence[int]) -> list[tuple[int, int]]:
    ends = list(accumulate(counts))
    return [(end - count, end) for end, count in zip(ends, counts)]


def _ends(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor(list(accumulate(counts)), dtype=torch.int32, device="cpu"), device)


def _one_kernel(rows: torch.Tensor, inner: int, outer: int) -> bool:
    """Whether torch's grouped kernel takes these tensors: bfloat16 on CUDA, rows of a multiple of 16 bytes."""
    if rows.device.type != "cuda" or rows.dtype != torch.bfloat16 or not hasattr(F, "grouped_mm"):
        return False
    return rows.shape[0] > 0 and inner % 8 == 0 and outer % 8 == 0


def _unit_stride(weights: torch.Tensor) -> torch.Tensor:
    """The weights in a layout that the kernel takes: row-major or column-major matrices."""
    return weights if 1 in weights.stride()[1:] else weights.contiguous()
