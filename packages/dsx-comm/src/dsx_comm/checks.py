"""Checks of tensors and reduction operators before anything is sent.

They check the arguments of this rank; whether the ranks' arguments fit together is not checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from .errors import CommArgumentError
from .groups import Membership

_Kind: Any = dist.ReduceOp.RedOpType
_KINDS = {kind.value: kind for kind in _Kind.__members__.values()}
_BITWISE = (_Kind.BAND, _Kind.BOR, _Kind.BXOR)


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements (not of the storage)."""
    return tensor.numel() * tensor.element_size()


def reduce_kind(op: Any, tensor: torch.Tensor, name: str) -> Any:
    """The plain kind of a reduction operator, always the same object (a `ReduceOp` compares unequal to the enum it
    holds).

    Raises CommArgumentError where the operator has no meaning for the dtype.
    """
    kind = getattr(op, "op", op)  # isinstance(RedOpType.SUM, ReduceOp) is true, so it cannot tell them apart
    if type(kind) is not _Kind:
        raise CommArgumentError(f"{name}: op: got {op!r}, expected a ReduceOp such as ReduceOp.SUM")
    return _kind_of(kind.value, tensor.dtype, name) or op  # PREMUL_SUM carries its factor


# By number, and remembered: torch takes a third of a microsecond to compare two operators.
@lru_cache(maxsize=1024)
def _kind_of(number: int, dtype: torch.dtype, name: str) -> Any:
    kind = _KINDS[number]
    if kind == _Kind.PREMUL_SUM:
        return None
    if kind == _Kind.AVG and not (dtype.is_floating_point or dtype.is_complex):
        raise CommArgumentError(f"{name}: AVG of {dtype} is not defined: reduce with SUM and divide as you need it")
    if kind in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise CommArgumentError(f"{name}: {kind.name} needs integers or booleans, got {dtype}")
    if kind in (_Kind.MIN, _Kind.MAX, _Kind.PRODUCT) and dtype.is_complex:
        raise CommArgumentError(f"{name}: {kind.name} is not available for {dtype}")
    return kind


def described(dtype: torch.dtype, kind: Any = None, root: int | None = None) -> str:
    """Text of the properties that must agree between ranks besides operation and size, as a `Call` carries it."""
    return _described(dtype, None if kind is None else getattr(kind, "op", kind).value, root)


@lru_cache(maxsize=1024)
def _described(dtype: torch.dtype, number: int | None, root: int | None) -> str:
    operator = "" if number is None else f" {_KINDS[number].name}"
    return f" {str(dtype)[6:]}{operator}" + ("" if root is None else f" root {root}")


def tensor_of(value: Any, name: str, what: str = "tensor") -> torch.Tensor:
    """`value` if it is a dense tensor."""
    if not isinstance(value, torch.Tensor):
        raise CommArgumentError(f"{name}: {what}: got {type(value).__name__}, expected a tensor")
    if value.layout != torch.strided:
        raise CommArgumentError(
            f"{name}: {what}: got layout {value.layout}, expected a dense tensor (.to_dense()); sparse_allreduce takes "
            "sparse ones"
        )
    return value


def check_even_split(whole: Any, part: Any, to: Membership, name: str, names: tuple[str, str]) -> None:
    """Check that `whole` is a contiguous tensor of N times the elements of `part`, of the same dtype and device."""
    tensor_of(whole, name, names[0])
    tensor_of(part, name, names[1])
    if whole.dtype != part.dtype or whole.device != part.device:
        raise CommArgumentError(
            f"{name}: {names[0]} is {whole.dtype} on {whole.device}, {names[1]} {part.dtype} on {part.device}; "
            "expected the same dtype and device"
        )
    if whole.numel() != to.size * part.numel():
        raise CommArgumentError(
            f"{name}: {names[0]} has {whole.numel()} elements, {names[1]} {part.numel()}; "
            f"expected {names[0]} = {to.size} (group size) x {names[1]} = {to.size * part.numel()}"
        )


def contiguous(tensor: torch.Tensor, name: str, what: str) -> None:
    """Reject outputs whose memory is not in one piece."""
    if not tensor.is_contiguous():
        raise CommArgumentError(
            f"{name}: {what} of shape {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous; "
            "results are written in place: give a contiguous tensor"
        )


def not_overlapping(output: torch.Tensor, source: torch.Tensor, rank: int, name: str) -> None:
    """Reject an input that lies in the output elsewhere than in this rank's part."""
    begin, at, length = output.data_ptr(), source.data_ptr(), nbytes(source)
    own = begin + rank * length
    if at != own and at < begin + nbytes(output) and begin < at + length:
        raise CommArgumentError(
            f"{name}: input overlaps output at byte {at - begin}; in place it must be this rank's part, byte "
            f"{own - begin}"
        )


def tensor_list(
    values: Any, like: torch.Tensor | None, count: int, name: str, what: str, *, same_size: bool = True
) -> list[torch.Tensor]:
    """Check a list of `count` tensors of `like`'s dtype and device (and number of elements)."""
    if not isinstance(values, Sequence) or len(values) != count:
        got = f"{len(values)} tensors" if isinstance(values, Sequence) else type(values).__name__
        raise CommArgumentError(f"{name}: {what}: got {got}, expected a list of {count} (group size)")
    tensors = [tensor_of(v, name, f"{what}[{i}]") for i, v in enumerate(values)]
    like = tensors[0] if like is None else like
    for i, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype or tensor.device != like.device or (same_size and tensor.numel() != like.numel()):
            raise CommArgumentError(
                f"{name}: {what}[{i}] is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, "
                f"expected {like.numel() if same_size else 'any number of'} elements of {like.dtype} on {like.device}"
            )
    return tensors


def root(
    given: int | None, in_group: int | None, to: Membership, name: str, what: str, default: int | None = None
) -> tuple[int, int]:
    """(global rank, the group's rank) of a source or destination that is given as one or the other.

    `default` is a global rank, for where neither is given.
    """
    if given is not None and in_group is not None:
        raise CommArgumentError(f"{name}: got {what}={given} and group_{what}={in_group}, expected one of them")
    if in_group is not None:
        if not 0 <= in_group < to.size:
            raise CommArgumentError(
                f"{name}: group_{what}: got {in_group}, expected 0 <= group_{what} < {to.size} (group size)"
            )
        return to.ranks[in_group], in_group
    given = default if given is None else given
    if given is None:
        raise CommArgumentError(f"{name}: got neither {what} nor group_{what}, expected one of them")
    return given, group_rank(given, to, name, what)


def group_rank(global_rank: int, to: Membership, name: str, what: str) -> int:
    """The group's rank of a global rank (torch's convention for src and dst)."""
    if global_rank not in to.ranks:
        raise CommArgumentError(
            f"{name}: {what}: got global rank {global_rank}, expected a member of the group {to.ranks}"
        )
    return to.ranks.index(global_rank)
