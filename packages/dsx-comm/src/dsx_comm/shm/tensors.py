"""Tensors on their way to the compiled module: checks, packing, and what must not be overwritten."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from ..errors import CommArgumentError


def require_host_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cpu:
        raise CommArgumentError(
            f'a group of backend "dsx" carries host tensors, got one on {tensor.device}: use an nccl group for it'
        )
    if tensor.layout != torch.strided:
        raise CommArgumentError(f"got layout {tensor.layout}, expected a dense tensor (.to_dense())")
    return tensor


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def pointers(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [t.data_ptr() for t in tensors]


def addresses(tensor: torch.Tensor, parts: int) -> list[int]:
    """Addresses of the equal parts of a contiguous tensor."""
    begin, length = tensor.data_ptr(), nbytes(tensor) // parts
    return [begin + part * length for part in range(parts)]


def packed(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], Any] | None]:
    """(contiguous tensor, how to put its content back); the tensor itself where it is contiguous."""
    if tensor.is_contiguous():
        return tensor, None
    flat = tensor.contiguous()
    return flat, lambda: tensor.copy_(flat)


def packed_list(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], Any] | None]:
    pairs = [packed(require_host_tensor(t)) for t in tensors]
    finishes = [f for _, f in pairs if f is not None]
    return [p for p, _ in pairs], (lambda: [f() for f in finishes]) if finishes else None


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    begin, other = a.data_ptr(), b.data_ptr()
    return begin < other + nbytes(b) and other < begin + nbytes(a)


def unaliased(source: torch.Tensor, outputs: Sequence[torch.Tensor], own: int) -> torch.Tensor:
    """`source`, copied where writing the outputs would change it (in place, at the address `own` of this rank's part,
    is fine).
    """
    if source.data_ptr() == own or not any(overlap(source, o) for o in outputs):
        return source
    return source.clone()


def separated(sources: list[torch.Tensor], outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The pieces of an all-to-all, copied if places overlap them; in place, each piece where its place is, needs no
    copy.
    """
    in_place = all(s.data_ptr() == o.data_ptr() and nbytes(s) == nbytes(o) for s, o in zip(sources, outputs))
    return sources if in_place else without_overlap(sources, outputs)


def without_overlap(sources: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The sources, copied where they share memory with outputs: a call writes those while it still sends. All
    contiguous.
    """
    places = sorted((t.data_ptr(), t.data_ptr() + nbytes(t)) for t in outputs if t.numel())
    begins = [begin for begin, _ in places]
    furthest = list(accumulate((end for _, end in places), max))  # end of what lies before

    def overlaps(source: torch.Tensor) -> bool:
        begin = source.data_ptr()
        before = bisect_left(begins, begin + nbytes(source))  # places that begin in front of the source's end
        return source.numel() > 0 and before > 0 and furthest[before - 1] > begin

    return [source.clone() if overlaps(source) else source for source in sources]


def target(
    output: torch.Tensor, parts: Sequence[torch.Tensor], own: int
) -> tuple[torch.Tensor, Callable[[], Any] | None]:
    """The tensor to write a reduce-scatter's result to, and a function that copies it to `output` afterwards.

    The tensor has no gaps and overlaps no part that is still to be read, except this rank's at `own`. The function is
    None if the tensor is `output`.
    """
    in_place = output.data_ptr() == own
    if output.is_contiguous() and (in_place or not any(overlap(output, p) for p in parts)):
        return output, None
    flat = torch.empty(output.shape, dtype=output.dtype, device="cpu")
    return flat, lambda: output.copy_(flat)


def check_list(name: str, tensors: Sequence[torch.Tensor], like: torch.Tensor, size: int) -> None:
    if len(tensors) != size:
        raise CommArgumentError(f"{name}: got a list of {len(tensors)} tensors, expected {size} (group size)")
    for i, t in enumerate(tensors):
        if t.numel() != like.numel() or t.dtype != like.dtype:
            raise CommArgumentError(
                f"{name}: tensor {i} of the list has {t.numel()} elements of {t.dtype}, expected {like.numel()} of "
                f"{like.dtype}"
            )


def rows(tensor: torch.Tensor, sizes: Sequence[int], count: int, what: str) -> list[torch.Tensor]:
    rows = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        if rows % count:
            raise CommArgumentError(f"all_to_all: {what} has {rows} rows, which {count} (group size) does not divide")
        sizes = [rows // count] * count
    if len(sizes) != count or sum(sizes) != rows or min(sizes) < 0:
        raise CommArgumentError(
            f"all_to_all: {what} split sizes {list(sizes)}: expected {count} that add up to {rows} rows"
        )
    return list(tensor.split(list(sizes)))


def unpack(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        tensor.copy_(part.view(tensor.shape))
