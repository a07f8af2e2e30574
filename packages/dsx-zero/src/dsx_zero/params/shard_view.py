"""`ShardView`: one rank's part of a tensor, as `torch.distributed.checkpoint` reads and writes it.

dsx-zero cuts a tensor, row by row, into a range of elements per rank. No DTensor placement says that. A range is a few
boxes, though, and torch's checkpoints work with boxes: the rest of a row, whole rows, the beginning of a row.

    shape (4, 3), range [2, 10):   . . a      the boxes: (0, 2) of size (1, 1)
                                   b c d                 (1, 0) of size (2, 3)
                                   e f g                 (3, 0) of size (1, 1)
                                   h . .

A box of a row-major range is contiguous, so that each one is a view of the rank's memory, and a checkpoint is written
from it and read into it without a copy. Other formats that give boxes (FSDP2's DTensors) read the same folder.

Left out: arithmetic. A view is for storing, moving to another device, copying and `full_tensor()`; everything else
raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..errors import ZeroStateError
from ..torch_names import make_wrapper_subclass
from .dtensors import GlobalTensor

__all__ = ["Part", "ShardView", "boxes_of_range"]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its elements begin in the rank's 1-D values."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    first: int

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return prod(self.size)


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Chunk]:
    """The elements `[start, stop)` of a row-major tensor as boxes, in ascending order: at most 2 * dimensions - 1."""
    yield from _boxes(shape, start, stop, 0)


def _boxes(shape: tuple[int, ...], start: int, stop: int, first: int) -> Iterator[Chunk]:
    if start >= stop:
        return
    if not shape:
        yield Chunk((), (), first)
        return
    row = prod(shape[1:])
    top, inside = divmod(start, row)
    if inside or stop - start < row:  # the range begins in a row, or lies in one
        end = min(stop, (top + 1) * row)
        yield from _below(_boxes(shape[1:], inside, end - top * row, first), top)
        yield from _boxes(shape, end, stop, first + end - start)
        return
    rows = (stop - start) // row
    yield Chunk((top, *(0 for _ in shape[1:])), (rows, *shape[1:]), first)
    yield from _boxes(shape, start + rows * row, stop, first + rows * row)


def _below(found: Iterator[Chunk], index: int) -> Iterator[Chunk]:
    for chunk in found:
        yield Chunk((index, *chunk.offset), (1, *chunk.size), chunk.first)


@dataclass(frozen=True)
class Part:
    """Elements `[start, stop)` of the box `offset`, `size` of a tensor of this `shape`, row by row in the box."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def of_range(cls, shape: tuple[int, ...], start: int, stop: int, of: GlobalTensor | None = None) -> Part:
        """Elements of a parameter of this shape, which may be a part of a global tensor (`of`)."""
        if of is not None:
            return cls(of.shape, of.offset, of.size, start, stop)
        return cls(tuple(shape), (0,) * len(shape), tuple(shape), start, stop)

    def chunks(self) -> tuple[Chunk, ...]:
        """The boxes of the tensor that make up the part."""
        inside = boxes_of_range(self.size, self.start, self.stop)
        return tuple(
            Chunk(tuple(o + p for o, p in zip(self.offset, chunk.offset)), chunk.size, chunk.first) for chunk in inside
        )

    def __deepcopy__(self, memo: dict) -> Part:
        return self


_REBUILT = "it came from another process"


class ShardView(torch.Tensor):
    """One rank's part of a tensor of a sharded model. It has the shape, dtype and device of the tensor, and this rank's
    elements: `values` (1-D), in the rank's own memory or a copy of it.

    `torch.distributed.checkpoint` saves it and loads into it. `full_tensor()` gives the whole tensor.
    """

    _values: torch.Tensor
    _part: Part
    _whole: Callable[[torch.Tensor], torch.Tensor] | None
    _on_load: Callable[[], None] | None
    _loaded: bool
    _mine: int | None

    @staticmethod
    def __new__(
        cls,
        values: torch.Tensor,
        part: Part,
        *,
        whole: Callable[[torch.Tensor], torch.Tensor] | None = None,
        on_load: Callable[[], None] | None = None,
        mine: int | None = None,
    ) -> ShardView:
        """A view over `values`, 1-D.

        Args:
            whole: makes the whole tensor of all ranks' values (collective). A plain function: copies share it.
            on_load: called before a checkpoint is read into the view; a plain function, too.
            mine: a word for whose memory the values are; None for a copy.
        """
        self = make_wrapper_subclass(cls, part.shape, dtype=values.dtype, device=values.device, requires_grad=False)
        self._values, self._part, self._whole = values.detach(), part, whole
        self._on_load, self._loaded, self._mine = on_load, False, mine
        return self

    @property
    def values(self) -> torch.Tensor:
        """This rank's elements, 1-D."""
        return self._values

    @property
    def part(self) -> Part:
        """The part of the whole tensor that these elements are."""
        return self._part

    @property
    def loaded(self) -> bool:
        """Whether a checkpoint was read into it."""
        return self._loaded

    @property
    def in_place(self) -> bool:
        """Whether the values are the model's own memory, not a copy."""
        return self._mine is not None

    def is_of(self, owner: int) -> bool:
        """Whether the values are `owner`'s own memory."""
        return self._mine == owner

    def chunks(self) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        """This rank's boxes of the tensor: (offset, values), views of the memory."""
        return [(c.offset, self._values[c.first : c.first + c.numel].view(c.size)) for c in self._part.chunks()]

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, new, on every rank. Collective: every rank must call it."""
        if self._whole is None:
            raise ZeroStateError(
                f"full_tensor(): this is a part of a tensor of shape {tuple(self.shape)}, and {_REBUILT}, where no rank"
                " can be asked for the rest; take it from get_model_state_dict or get_optimizer_state_dict"
            )
        return self._whole(self._values)

    def cut(self, value: torch.Tensor) -> torch.Tensor:
        """The elements of a whole tensor that this rank has, 1-D."""
        part = self._part
        for dim, (start, size) in enumerate(zip(part.offset, part.size)):
            value = value.narrow(dim, start, size)
        return value.reshape(-1)[part.start : part.stop]

    def _with(self, values: torch.Tensor) -> ShardView:
        return ShardView(values, self._part, whole=self._whole)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """The logical facts and the range, without values."""
        part = self._part
        return (
            f"ShardView(shape={part.shape}, elements {part.start} to {part.stop} of the box at {part.offset} of size"
            f" {part.size}, dtype={self.dtype}, device='{self.device}')"
        )

    def __deepcopy__(self, memo: dict) -> ShardView:
        memo[id(self)] = copy = self._with(self._values.clone())
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ShardView, (self._values, self._part)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copies and conversions of this rank's values. Everything else raises ZeroStateError."""
        kwargs, aten = kwargs or {}, torch.ops.aten
        first = args[0] if args else None
        if isinstance(first, ShardView):
            if func in (aten.detach.default, aten.alias.default):
                return first._alias()
            if func is aten.clone.default:
                return first._with(first._values.clone())
            if func is aten._to_copy.default:
                return first._with(first._values.to(**_moves(kwargs), copy=True))
            if func is aten.copy_.default:
                return first._copy(args[1], *args[2:])
            if func in (aten.new_empty.default, aten.empty_like.default, aten.zeros_like.default):
                # The stager of `async_save` asks for `new_empty([])` and then sets the attributes.
                options = {"dtype": first.dtype, "device": first.device, **_only(kwargs)}
                return first._with(torch.zeros(first._values.shape, **options))
        if func is aten.copy_.default and isinstance(args[1], ShardView):
            return first.copy_(args[1].full_tensor(), *args[2:])
        raise ZeroStateError(
            f"{func}: a ShardView is one rank's part of a tensor, for checkpoints; it computes nothing. Take the whole"
            " tensor with view.full_tensor() on every rank, or this rank's elements with view.values"
        )

    def _alias(self) -> ShardView:
        found = ShardView(self._values, self._part, whole=self._whole, on_load=self._on_load, mine=self._mine)
        found._loaded = self._loaded
        return found

    def _copy(self, source: Any, non_blocking: bool = False) -> ShardView:
        if isinstance(source, ShardView) and source._part != self._part:
            source = source.full_tensor()
        if tuple(source.shape) != tuple(self.shape):
            raise ZeroStateError(f"got a tensor of shape {tuple(source.shape)}, expected {tuple(self.shape)}")
        values = source._values if isinstance(source, ShardView) else self.cut(source)
        self._values.copy_(values, non_blocking=non_blocking)
        return self

    # What torch's checkpoints ask ------------------------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        """One item for each box (torch's protocol for what it saves)."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(chunk.offset)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(chunk.offset), sizes=torch.Size(chunk.size)),
                    properties=TensorProperties(dtype=self.dtype),
                    size=torch.Size(self._part.shape),
                ),
            )
            for chunk in self._part.chunks()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """The boxes to be filled (torch's protocol for what it loads)."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        self._loaded = True
        if self._on_load is not None:
            self._on_load()
        return [
            ChunkStorageMetadata(offsets=torch.Size(chunk.offset), sizes=torch.Size(chunk.size))
            for chunk in self._part.chunks()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """The memory of one box."""
        for offset, values in self.chunks():
            if offset == tuple(index.offset or ()):
                return values
        raise ZeroStateError(f"{index.fqn}: this rank has no box at {tuple(index.offset or ())}; it has {self!r}")


def _only(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key in ("dtype", "device") and value is not None}


def _moves(kwargs: dict[str, Any]) -> dict[str, Any]:
    return _only(kwargs) | {"non_blocking": bool(kwargs.get("non_blocking", False))}
