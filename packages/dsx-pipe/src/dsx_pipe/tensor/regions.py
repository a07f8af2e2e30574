"""Communication at the edges of sliced regions, with its counterpart in the backward.

| function | forward | backward |
|---|---|---|
| `copy_to_slices` | nothing | all-reduce |
| `reduce_from_slices` | all-reduce | nothing |
| `gather_from_slices` | all-gather | own piece |
| `scatter_to_slices` | own piece | all-gather |
| `gather_sequence` | all-gather along the sequence | reduce-scatter |
| `reduce_scatter_sequence` | reduce-scatter along the sequence | all-gather |
| `scatter_sequence` | own piece of the sequence | all-gather |

`group` None is the default group. In a group of one rank all of them do nothing.
"""

from __future__ import annotations

from typing import Any

import dsx_comm
import torch
from torch import nn

from .slices import bounds, check_divides, lengths


def all_reduced(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum over the group, in new memory (collective)."""
    out = tensor.detach().clone(memory_format=torch.contiguous_format)
    dsx_comm.all_reduce(out, group=group)
    return out


def all_gathered(tensor: torch.Tensor, dim: int, group: Any, sizes: list[int] | None = None) -> torch.Tensor:
    """Concatenate all ranks' pieces along a dimension (collective).

    `sizes` are the lengths of the pieces along `dim`; None: all are equal.
    """
    size = dsx_comm.get_world_size(group)
    largest = max(sizes) if sizes else tensor.shape[dim]
    front = tensor.detach().movedim(dim, 0)
    if front.shape[0] < largest:
        front = torch.cat([front, front.new_zeros((largest - front.shape[0], *front.shape[1:]))])
    out = front.new_empty((size * largest, *front.shape[1:]))
    dsx_comm.all_gather_into_tensor(out.view(-1), front.contiguous().view(-1), group=group)
    if sizes:
        out = torch.cat([out[r * largest : r * largest + n] for r, n in enumerate(sizes)])
    return out.movedim(0, dim)


def start_reduce_scatter(tensor: torch.Tensor, dim: int, group: Any) -> tuple[Any, torch.Tensor]:
    """Begin a reduce-scatter along a dimension (collective).

    Returns:
        (handle, this rank's piece of the sum over the group). The piece is complete after `handle.wait()`.

    Raises:
        TensorSliceError: the dimension is not a multiple of the ranks.
    """
    size = dsx_comm.get_world_size(group)
    check_divides(tensor.shape[dim], size, f"size of dimension {dim}")
    front = tensor.detach().movedim(dim, 0).contiguous()
    out = front.new_empty((front.shape[0] // size, *front.shape[1:]))
    handle = dsx_comm.reduce_scatter_tensor(out.view(-1), front.view(-1), group=group, async_op=True)
    return handle, out.movedim(0, dim)


def reduce_scattered(tensor: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """This rank's piece, along a dimension, of the sum over the group (collective)."""
    handle, out = start_reduce_scatter(tensor, dim, group)
    handle.wait()
    return out


def own_piece(tensor: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """This rank's piece, along a dimension, of a tensor that every rank has. Nothing is sent."""
    cut = bounds(tensor.shape[dim], dsx_comm.get_world_size(group))
    rank = dsx_comm.get_rank(group)
    return tensor.narrow(dim, cut[rank], cut[rank + 1] - cut[rank]).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return all_reduced(gradient, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        return all_reduced(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, group: Any, sizes: Any) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gathered(tensor, dim, group, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return own_piece(gradient, ctx.dim, ctx.group), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        ctx.sizes = lengths(tensor.shape[dim], dsx_comm.get_world_size(group))
        return own_piece(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        sizes = ctx.sizes if len(set(ctx.sizes)) > 1 else None
        return all_gathered(gradient, ctx.dim, ctx.group, sizes), None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gathered(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return reduce_scattered(gradient, ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scattered(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return all_gathered(gradient, ctx.dim, ctx.group), None, None


def _is_single_rank(group: Any) -> bool:
    return dsx_comm.get_world_size(group) == 1


def copy_to_slices(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Enter a sliced region with a tensor that every rank has."""
    return tensor if _is_single_rank(group) else _Copy.apply(tensor, group)  # type: ignore[return-value]


def reduce_from_slices(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Leave a sliced region with the sum of the ranks' partial results."""
    return tensor if _is_single_rank(group) else _Reduce.apply(tensor, group)  # type: ignore[return-value]


def gather_from_slices(
    tensor: torch.Tensor, dim: int = -1, group: Any = None, sizes: list[int] | None = None
) -> torch.Tensor:
    """Leave a sliced region with all ranks' pieces, concatenated along `dim`.

    `sizes` are the lengths of the pieces along `dim`; None: all are equal.
    """
    return tensor if _is_single_rank(group) else _Gather.apply(tensor, dim, group, sizes)  # type: ignore[return-value]


def scatter_to_slices(tensor: torch.Tensor, dim: int = -1, group: Any = None) -> torch.Tensor:
    """Enter a sliced region with this rank's piece of a tensor that every rank has."""
    return tensor if _is_single_rank(group) else _Scatter.apply(tensor, dim, group)  # type: ignore[return-value]


def gather_sequence(tensor: torch.Tensor, dim: int = 1, group: Any = None) -> torch.Tensor:
    """Go from a sequence-parallel region into a sliced one with the whole sequence."""
    return tensor if _is_single_rank(group) else _GatherSequence.apply(tensor, dim, group)  # type: ignore[return-value]


def reduce_scatter_sequence(tensor: torch.Tensor, dim: int = 1, group: Any = None) -> torch.Tensor:
    """Go from a sliced region into a sequence-parallel one with this rank's piece of the sum.

    Raises:
        TensorSliceError: the length of the sequence is not a multiple of the ranks.
    """
    return tensor if _is_single_rank(group) else _ReduceScatter.apply(tensor, dim, group)  # type: ignore[return-value]


def scatter_sequence(tensor: torch.Tensor, dim: int = 1, group: Any = None) -> torch.Tensor:
    """Enter a sequence-parallel region with this rank's piece of a tensor that every rank has.

    Raises:
        TensorSliceError: the length of the sequence is not a multiple of the ranks.
    """
    check_divides(tensor.shape[dim], dsx_comm.get_world_size(group), f"sequence length (dimension {dim})")
    return scatter_to_slices(tensor, dim, group)


def gather_from_sequence(tensor: torch.Tensor, dim: int = 1, group: Any = None) -> torch.Tensor:
    """Leave a sequence-parallel region with the whole sequence, whose gradient must be equal on all ranks."""
    return gather_from_slices(tensor, dim, group)


def sum_gradients_over_slices(module: nn.Module, group: Any = None, *, recurse: bool = True) -> None:
    """Sum the gradients of a module's parameters over the group, in every backward.

    It is for modules inside a sequence-parallel region (norms), where each rank sees a piece of the sequence, and for
    modules that each rank uses on its own heads. There the gradient of each rank is only a part of the sum. The
    parameters get Megatron's attribute `sequence_parallel`. `recurse=False` leaves submodules out.

    The sum is part of the module's forward, not a hook of the parameter, because sharding replaces parameters. To add
    it, the class of each submodule that has parameters is replaced by a subclass of the same name.
    """
    made: dict[type, type] = {}
    for part in module.modules() if recurse else [module]:
        kind = type(part)
        if "_sums_gradients" in kind.__dict__ or not any(p is not None for p in part._parameters.values()):
            continue
        for parameter in part.parameters(recurse=False):
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        if not _is_single_rank(group):
            if kind not in made:
                made[kind] = _class_that_sums_gradients(kind, group)
            part.__class__ = made[kind]


def _class_that_sums_gradients(kind: type, group: Any) -> type:
    """A subclass of `kind` that uses its parameters through `copy_to_slices`, which sums their gradients."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own: Any = self._parameters
        plain = dict(own)
        try:
            own.update({n: copy_to_slices(p, group) for n, p in plain.items() if p is not None})
            return kind.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        finally:
            own.update(plain)

    body = {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__, "_sums_gradients": True}
    return type(kind.__name__, (kind,), body)
