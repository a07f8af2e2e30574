"""Linear layers whose weight is sliced over ranks.

    up   = ColumnParallelLinear(512, 2048, group=group)     # every rank computes a piece of the output
    down = RowParallelLinear(2048, 512, group=group)        # takes that piece as input and sums the results

The pair needs one all-reduce in the forward and one in the backward. A layer is built whole, from the same random
numbers on every rank, and then cut, so a sliced model starts with the values of the unsliced one under the same seed.
"""

from __future__ import annotations

from typing import Any

import dsx_comm
import torch
from torch import nn

from ..errors import TensorSliceError
from .regions import (
    all_gathered,
    copy_to_slices,
    gather_from_slices,
    gather_sequence,
    reduce_from_slices,
    reduce_scatter_sequence,
    scatter_to_slices,
    start_reduce_scatter,
)
from .slices import check_divides, lengths, mark, slice_of


class _Overlapped(torch.autograd.Function):
    """A linear layer whose backward sums the input's gradient over the ranks while it computes the weight's.

    The weight has the shape [out, in], or [in, out] (`transposed`). With a `sequence_dim` the input is this rank's
    piece of the sequence, which is gathered; its gradient is reduced and scattered.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Any,
        group: Any,
        transposed: bool,
        sequence_dim: int | None,
    ) -> torch.Tensor:
        entered = x if sequence_dim is None else all_gathered(x, sequence_dim, group)
        ctx.save_for_backward(entered, weight)
        ctx.how, ctx.has_bias = (group, transposed, sequence_dim), bias is not None
        return nn.functional.linear(entered, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = (t.to(gradient.dtype) for t in ctx.saved_tensors)  # under autocast they have a wider dtype
        group, transposed, sequence_dim = ctx.how
        pending, of_input, of_weight, of_bias = None, None, None, None
        if ctx.needs_input_grad[0]:
            whole = gradient @ (weight.t() if transposed else weight)
            if sequence_dim is None:
                of_input = whole.contiguous()
                pending = dsx_comm.all_reduce(of_input, group=group, async_op=True)
            else:
                pending, of_input = start_reduce_scatter(whole, sequence_dim, group)
        flat = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[1]:
            rows = x.reshape(-1, x.shape[-1])
            of_weight = rows.t() @ flat if transposed else flat.t() @ rows
        if ctx.has_bias and ctx.needs_input_grad[2]:
            of_bias = flat.sum(0)
        if pending is not None:
            pending.wait()
        return of_input, of_weight, of_bias, None, None, None


class _SlicedLinear(nn.Module):
    """The common part of both layers: a piece of a weight of shape [out, in], or [in, out] (`transposed`)."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, group: Any, transposed: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.group, self.transposed = group, transposed
        self.rank, self.size = dsx_comm.get_rank(group), dsx_comm.get_world_size(group)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight = self.weight.t() if self.transposed else self.weight
        return nn.functional.linear(x, weight, bias)

    def extra_repr(self) -> str:
        """Sizes, and which piece this is."""
        return f"in_features={self.in_features}, out_features={self.out_features}, slice {self.rank} of {self.size}"


def _new_linear_weights(
    in_features: int, out_features: int, bias: bool, transposed: bool, options: dict[str, Any]
) -> Any:
    whole = nn.Linear(in_features, out_features, bias=bias, **options)
    weight = whole.weight.detach()
    return (weight.t() if transposed else weight), (None if whole.bias is None else whole.bias.detach())


class ColumnParallelLinear(_SlicedLinear):
    """y = x W^T + b, with the output features cut over the ranks.

    Args:
        in_features: size of the input, which every rank has whole.
        out_features: size of the whole output.
        bias: whether there is a bias; it is cut like the output.
        gather_output: True: every rank returns the whole output; False: its piece.
        group: process group that shares the layer; None: the default group.
        sequence_parallel: the input is this rank's piece of the sequence.
        sequence_dim: dimension of the sequence.
        parts: number of equal layers fused into this one (3 for query, key, value); each is cut.
        transposed: the weight has the shape [in, out], as in Hugging Face's Conv1D.
        overlap: sum the input's gradient over the ranks while the weight's gradient is computed.
        input_is_gathered: the caller has gathered the input from pieces of the sequence with `gather_sequence`, which
            also sums its gradient; this layer does not.
        whole: (weight, bias) of the whole layer to cut; default: new ones.
        uneven: pieces may differ in size, as for vocabularies.
        dtype, device: dtype and device of new parameters.

    Raises:
        TensorSliceError: the output features cannot be cut evenly, or options exclude each other.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = False,
        group: Any = None,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        parts: int = 1,
        transposed: bool = False,
        overlap: bool = False,
        input_is_gathered: bool = False,
        whole: tuple[torch.Tensor, torch.Tensor | None] | None = None,
        uneven: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, group, transposed)
        if not uneven:
            check_divides(out_features, self.size, "out_features", parts)
        if input_is_gathered and (overlap or sequence_parallel):
            raise TensorSliceError(
                "input_is_gathered: not together with overlap or sequence_parallel, because the caller has gathered "
                "the input and adds its gradient up; leave one out"
            )
        weight, offset = whole or _new_linear_weights(in_features, out_features, bias, transposed, options)
        dim = 1 if transposed else 0
        self.weight = mark(nn.Parameter(slice_of(weight, dim, self.rank, self.size, parts)), dim, parts)
        self.bias = None
        if offset is not None:
            self.bias = mark(nn.Parameter(slice_of(offset, 0, self.rank, self.size, parts)), 0, parts)
        self._sizes = None if out_features % self.size == 0 else lengths(out_features, self.size)
        self.gather_output, self.parts, self.overlap = gather_output, parts, overlap
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.input_is_gathered = input_is_gathered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> this rank's piece [..., out / ranks], or with `gather_output` the whole [..., out]."""
        if self.overlap and self.size > 1:
            along = self.sequence_dim if self.sequence_parallel else None
            y: Any = _Overlapped.apply(x, self.weight, self.bias, self.group, self.transposed, along)
        else:
            y = self._product(self._whole_input(x), self.bias)
        if not self.gather_output:
            return y
        if self.parts == 1:
            return gather_from_slices(y, -1, self.group, self._sizes)
        pieces = [gather_from_slices(part, -1, self.group) for part in y.tensor_split(self.parts, -1)]
        return torch.cat(pieces, -1)

    def _whole_input(self, x: torch.Tensor) -> torch.Tensor:
        """The whole input, whose gradient is summed over the ranks."""
        if self.input_is_gathered:
            return x
        if self.sequence_parallel:
            return gather_sequence(x, self.sequence_dim, self.group)
        return copy_to_slices(x, self.group)


class RowParallelLinear(_SlicedLinear):
    """y = x W^T + b, with the input features cut over the ranks. The results of the ranks are summed.

    Args:
        in_features: size of the whole input.
        out_features: size of the output, which every rank gets whole.
        bias: whether there is a bias; every rank has it whole, and it is added once.
        input_is_parallel: True: the input is this rank's piece already; False: the whole input is cut here.
        group: process group that shares the layer; None: the default group.
        sequence_parallel: return this rank's piece of the sequence.
        sequence_dim: dimension of the sequence.
        transposed: the weight has the shape [in, out].
        whole: (weight, bias) of the whole layer to cut; default: new ones.
        dtype, device: dtype and device of new parameters.

    Raises:
        TensorSliceError: the input features cannot be cut evenly.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        group: Any = None,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        transposed: bool = False,
        whole: tuple[torch.Tensor, torch.Tensor | None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, group, transposed)
        check_divides(in_features, self.size, "in_features")
        weight, offset = whole or _new_linear_weights(in_features, out_features, bias, transposed, options)
        dim = 0 if transposed else 1
        self.weight = mark(nn.Parameter(slice_of(weight, dim, self.rank, self.size)), dim)
        self.bias = None if offset is None else nn.Parameter(offset.clone())
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        if sequence_parallel and self.bias is not None:
            self.bias.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Input [..., in] or this rank's piece [..., in / ranks] -> output [..., out] or its piece of the sequence."""
        if not self.input_is_parallel:
            x = scatter_to_slices(x, -1, self.group)
        y = self._product(x, None)
        y = (
            reduce_scatter_sequence(y, self.sequence_dim, self.group)
            if self.sequence_parallel
            else reduce_from_slices(y, self.group)
        )
        if self.bias is None:
            return y
        # each rank adds the bias to its own tokens only, so the gradients of all ranks have to be summed
        return y + (copy_to_slices(self.bias, self.group) if self.sequence_parallel else self.bias)
