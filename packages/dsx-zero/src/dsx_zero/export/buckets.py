"""`weight_buckets`: a model's whole tensors, a bucket at a time, for a program that generates with them.

A bucket is one buffer. Every rank writes what it speaks for into zeros, and one all-reduce adds the ranks' buffers as
integers: a sum with zeros keeps every bit. So a bucket costs one message whatever the stage, whoever owns what, with
experts and slices too; its memory is the only memory beside the model's own. Tensors that every rank has are given as
they lie, and nothing is sent. Decision 0073 says why this is no gather.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import dsx_comm
import torch

from ..alike import agree, hash_of, telling
from ..errors import ZeroConfigError
from ..optimizer import ZeroOptimizer
from .adapters import merged_weight
from .contents import Contents, Item, Names, PartOfModel, Source, boxes_of_range, contents_of

__all__ = ["weight_buckets"]

_CALL = "dsx_zero.export.weight_buckets"
_ALIGNMENT = 16
"""Bytes at which tensors begin in a bucket, for any dtype and for vector loads."""
_CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""Dtype and largest value of the codes of `quantised`."""
_LORA = ("merged", "apart")


@dataclass(frozen=True)
class _Slot:
    """A tensor's place in a bucket: its first byte, or None where this rank's own memory is given."""

    item: Item
    start: int | None


@dataclass(frozen=True)
class _Bucket:
    slots: tuple[_Slot, ...]
    nbytes: int


def weight_buckets(
    optimizer: ZeroOptimizer,
    *,
    bucket_bytes: int = 256 << 20,
    dtype: torch.dtype | None = None,
    names: Names = None,
    lora: str = "merged",
    quantised: str | None = None,
    part: PartOfModel | None = None,
) -> Iterator[dict[str, torch.Tensor]]:
    """The whole tensors of a sharded model by name, in buckets (collective).

        for bucket in dsx_zero.export.weight_buckets(optimizer, dtype=torch.bfloat16):
            generator.load_weights(bucket.items())

    Every rank gets every tensor: parameters, a tied one under its first name, and persistent buffers, in one order on
    all ranks. It works while states are offloaded (`offload_states`), too. Every rank has to iterate to the end. A
    bucket's tensors are for reading, and are valid until the next bucket is asked for.

    Args:
        optimizer: what `dsx_zero.shard` returned.
        bucket_bytes: most bytes that the call needs at a time, and that a bucket's tensors have; a tensor that needs
            more has a bucket to itself.
        dtype: of the given floating-point tensors; None: the model's.
        names: `dsx_zero.export.Names`; a function renames (None leaves out), a collection selects.
        lora: "merged": weights with the active adapters of peft, under the names of the model without them; "apart":
            these weights as they are, and the adapters under peft's names.
        quantised: "int8" or "fp8" (e4m3): weights of `nn.Linear` as codes, each row with a factor of its own, fp32
            [rows, 1], under the weight's name and "_scale": weight = codes * factor.
        part: where other ranks hold other parts of the model (an engine's `weight_buckets` gives it).

    Raises:
        ZeroConfigError: an argument that is not valid, or an adapter that cannot be merged.
        ZeroStateError: the model's parameters were replaced, or a step has begun and not ended.
        RanksDifferError: the ranks have different arguments or models, or one of them has failed. In all these cases
            nothing has been sent.
    """
    run = optimizer.runtime
    group = run.ranks.group if part is None else part.group
    with telling(group):
        _check_arguments(bucket_bytes, dtype, lora, quantised)
        optimizer.update.check_readable()
    optimizer.synchronize()
    contents = contents_of(optimizer, names, part, merge=lora == "merged")
    stream = _Stream(contents, dtype, quantised)
    buckets = stream.plan(bucket_bytes)
    _agree(contents, f"{bucket_bytes} {dtype} {lora} {quantised}", group)
    return stream.run(buckets)


def _agree(contents: Contents, arguments: str, group: Any) -> None:
    texts = (f"{i.name} {i.key} {i.shape} {i.dtype} {i.matrix} {i.whole}" for i in contents.items)
    facts = {"names, shapes and dtypes": hash_of(texts), "bucket_bytes, dtype, lora, quantised": arguments}
    agree(_CALL, facts, group)


def _check_arguments(bucket_bytes: int, dtype: torch.dtype | None, lora: str, quantised: str | None) -> None:
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ZeroConfigError("bucket_bytes", f"got {bucket_bytes!r}, expected a positive number of bytes")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ZeroConfigError("dtype", f"got {dtype!r}, expected a floating-point torch.dtype, or None")
    if lora not in _LORA:
        raise ZeroConfigError("lora", f"got {lora!r}, expected one of {', '.join(map(repr, _LORA))}")
    if quantised is not None and quantised not in _CODES:
        raise ZeroConfigError(
            "quantised", f"got {quantised!r}, expected one of {', '.join(map(repr, _CODES))}, or None"
        )


class _Stream:
    """Plans the buckets of one call, and fills them."""

    def __init__(self, contents: Contents, dtype: torch.dtype | None, quantised: str | None) -> None:
        self._contents, self._dtype, self._quantised = contents, dtype, quantised
        self._by_key = {item.key: item for item in contents.items}

    def _given_dtype(self, item: Item) -> torch.dtype:
        return self._dtype if self._dtype is not None and item.dtype.is_floating_point else item.dtype

    def _sent_dtype(self, item: Item) -> torch.dtype:
        """Casts are done before the bytes travel, but for a sum, which is rounded once."""
        return item.dtype if item.key in self._contents.adapters else self._given_dtype(item)

    def _codes(self, item: Item) -> bool:
        return self._quantised is not None and item.matrix and item.dtype.is_floating_point

    def _members(self, item: Item) -> list[Item]:
        """The item, and the adapters that are merged into it."""
        adapters = self._contents.adapters.get(item.key, ())
        return [item, *(self._by_key[name] for one in adapters for name in (one.down, one.up))]

    def _extra(self, item: Item) -> int:
        """Bytes beside the buffer that giving the item needs. Copies count twice: the caller still holds those of
        the bucket before while this one is made.
        """
        numel, given = prod(item.shape), self._given_dtype(item)
        extra = 0
        if item.key in self._contents.adapters:
            extra += numel * max(self._by_key[a.up].dtype.itemsize for a in self._contents.adapters[item.key])
            if any(self._by_key[a.up].dtype.itemsize < 4 for a in self._contents.adapters[item.key]):
                extra += 4 * numel  # on a CPU the product is made in fp32
        if given != self._sent_dtype(item) or (item.whole and given != item.dtype):
            extra += 2 * numel * given.itemsize
        if self._codes(item):
            extra += 4 * numel + 2 * (numel + 4 * item.shape[0])  # in fp32; codes and factors
        return extra

    def plan(self, bucket_bytes: int) -> list[_Bucket]:
        """Divide the items among buckets, in their order."""
        found: list[_Bucket] = []
        slots: list[_Slot] = []
        start = extra = given = 0
        for item in self._contents.items:
            if not item.name:
                continue
            members, more = self._members(item), self._extra(item)
            merges = len(members) > 1
            size = sum(_rounded(self._size(one)) for one in members if merges or not one.whole)
            out = prod(item.shape) * self._given_dtype(item).itemsize
            if slots and max(start + size + extra + more, given + out) > bucket_bytes:
                found.append(_Bucket(tuple(slots), start))
                slots, start, extra, given = [], 0, 0, 0
            for one in members:
                if one.whole and not merges:
                    slots.append(_Slot(one, None))
                else:
                    slots.append(_Slot(one, start))
                    start += _rounded(self._size(one))
            extra, given = extra + more, given + out
        if slots:
            found.append(_Bucket(tuple(slots), start))
        return found

    def _size(self, item: Item) -> int:
        return prod(item.shape) * self._sent_dtype(item).itemsize

    @torch.no_grad()
    def run(self, buckets: list[_Bucket]) -> Iterator[dict[str, torch.Tensor]]:
        largest = max((bucket.nbytes for bucket in buckets), default=0)
        buffer = torch.empty(largest, dtype=torch.uint8, device=self._contents.device)
        for bucket in buckets:
            yield self._filled(bucket, buffer[: bucket.nbytes])

    def _filled(self, bucket: _Bucket, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        joined = [slot for slot in bucket.slots if slot.start is not None]
        sent = any(not slot.item.whole for slot in joined)
        buffer.zero_()
        views = {slot.item.key: self._view(buffer, slot) for slot in joined}
        for slot in joined:
            source = self._contents.sources.get(slot.item.key)
            if source is not None and (source.speaks or slot.item.whole) and not (sent and slot.item.whole):
                _write(views[slot.item.key], source)
        if sent and self._contents.size > 1:
            dsx_comm.all_reduce(buffer.view(torch.int32), group=self._contents.group)
        if sent:
            for slot in joined:
                if slot.item.whole:
                    _write(views[slot.item.key], self._contents.sources[slot.item.key])
        given: dict[str, torch.Tensor] = {}
        for slot in bucket.slots:
            item = slot.item
            if item.name:
                whole = views[item.key] if slot.start is not None else self._own(item)
                self._give(given, item, whole, views)
        return given

    def _own(self, item: Item) -> torch.Tensor:
        return self._contents.sources[item.key].read().view(item.shape)

    def _view(self, buffer: torch.Tensor, slot: _Slot) -> torch.Tensor:
        start = slot.start or 0
        return buffer[start : start + self._size(slot.item)].view(self._sent_dtype(slot.item)).view(slot.item.shape)

    def _give(self, given: dict, item: Item, whole: torch.Tensor, views: dict[str, torch.Tensor]) -> None:
        """Put the tensor, or its codes, into what is given."""
        adapters = self._contents.adapters.get(item.key, ())
        merged_weight(whole, [(one, views[one.down], views[one.up]) for one in adapters])
        whole = whole.to(device=self._contents.device, dtype=self._given_dtype(item))
        if not self._codes(item):
            given[item.name] = whole
            return
        kind, most = _CODES[self._quantised or ""]
        values = whole.float()
        scale = values.abs().amax(1, keepdim=True).div_(most) if values.numel() else values.new_ones(len(values), 1)
        values = values / torch.where(scale > 0, scale, 1.0)
        given[item.name] = (values.round_() if kind is torch.int8 else values.clamp_(-most, most)).to(kind)
        given[f"{item.name}_scale"] = scale


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _write(whole: torch.Tensor, source: Source) -> None:
    """Copy what this rank holds of a tensor into it."""
    values = source.read().reshape(-1)
    if source.size == tuple(whole.shape):
        whole.view(-1)[source.start : source.stop].copy_(values)
        return
    box = whole[tuple(slice(at, at + size) for at, size in zip(source.offset, source.size))]
    done = 0
    for offset, size in boxes_of_range(source.size, source.start, source.stop):
        part = box[tuple(slice(at, at + extent) for at, extent in zip(offset, size))]
        part.copy_(values[done : done + prod(size)].view(size))
        done += prod(size)
