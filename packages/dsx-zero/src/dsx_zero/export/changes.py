"""`WeightMark`: the elements of this rank that changed since a mark, packed for sending.

Between two pushes most elements of a bf16 model keep their bits, because an update is smaller than a rounding. Each
rank compares its own elements with a copy of them and packs those that differ: values, and where they belong. Positions
take the shortest of these codes:

* all: the range is sent whole, changed or not;
* runs: first and length of each run of changed elements, 8 bytes a run;
* Elias-Fano: k low bits of each position as they are, the high bits as a unary code. For n positions among u that is
  n * (2 + log2(u / n)) bits, within 0.56 bits an element of the least possible for random positions (Elias 1974, Fano
  1971). Where most elements changed, the positions of the others;
* bitmap: a bit for each element, which is the least possible where half of them changed.

With 16-bit values a packet of random positions is at most 5 % longer than the values and the entropy of the positions
(`test_zero_weight_changes.py` counts it).

Left out: tensors are compared by their bits, so that a NaN that stays the same is no change, and -0.0 for 0.0 is one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from dsx_comm.object_tree import host_bytes

from ..errors import ZeroStateError
from ..optimizer import ZeroOptimizer
from .contents import Names, PartOfModel, Source, contents_of

__all__ = ["WeightChange", "WeightMark", "apply_changes", "pack_changes", "unpack_changes"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 1 << 22
"""Elements that are compared, or whose bits are packed, at once."""


@dataclass(frozen=True)
class WeightChange:
    """The changed elements of a range of one tensor.

    Attributes:
        name, shape: of the whole tensor.
        offset, size: the box of it that the rank holds.
        start, stop: the range of the box, in row-major order.
        positions: 1-D int64, ascending, counted from `start`; empty with `stop - start` values: all of them.
        values: 1-D, in the tensor's dtype, on the host.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int
    stop: int
    positions: torch.Tensor = field(repr=False)
    values: torch.Tensor = field(repr=False)

    def apply(self, whole: torch.Tensor) -> None:
        """Write the changed elements into the whole tensor (any dtype and device).

        Raises:
            ZeroStateError: it has another shape.
        """
        if tuple(whole.shape) != self.shape:
            raise ZeroStateError(f"{self.name}: got shape {tuple(whole.shape)}, expected {self.shape}")
        positions = self.positions
        if len(self.values) == self.stop - self.start:
            positions = torch.arange(self.stop - self.start, device="cpu")
        flat, index = positions + self.start, torch.zeros_like(positions)
        for extent, at, full in zip(_strides(self.size), self.offset, _strides(self.shape)):
            index += (flat // extent + at) * full
            flat = flat % extent
        target = whole.detach()
        values = self.values.to(device=target.device, dtype=target.dtype)
        if target.is_contiguous():
            target.view(-1)[index.to(target.device)] = values
        else:
            target[torch.unravel_index(index.to(target.device), target.shape)] = values


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


class WeightMark:
    """Remembers this rank's elements, to tell later which have changed. No communication.

        mark = dsx_zero.export.WeightMark(optimizer)
        ...                                            # steps
        packed = mark.pack()                           # 1-D uint8: this rank's changes; the mark moves to now
        dsx_zero.export.apply_changes(packed, weights)        # at the generator, with the packets of all ranks

    The copy lies in host memory: the parameters' bytes, sharded over the ranks.

    Args:
        optimizer: what `dsx_zero.shard` returned.
        names, part: as for `dsx_zero.export.weight_shards`.

    Raises:
        ZeroConfigError, ZeroStateError: see `dsx_zero.export.weight_buckets`.
    """

    def __init__(self, optimizer: ZeroOptimizer, *, names: Names = None, part: PartOfModel | None = None) -> None:
        self._optimizer, self._names, self._part = optimizer, names, part
        self._known: dict[str, torch.Tensor] = {}
        for name, _, source in self._sources():
            self._known[name] = source.read().reshape(-1).to("cpu", copy=True)

    def _sources(self) -> Iterator[tuple[str, tuple[int, ...], Source]]:
        self._optimizer.update.check_readable()
        contents = contents_of(self._optimizer, self._names, self._part, merge=False, owned=True)
        for item in contents.items:
            source = contents.sources.get(item.key)
            if item.name and source is not None and source.speaks:
                yield item.name, item.shape, source

    def changes(self, *, advance: bool = True) -> Iterator[WeightChange]:
        """The changes since the mark, tensor by tensor; tensors without a change are left out.

        Args:
            advance: move the mark to the values of now, each tensor as it is given. False: the next call gives the
                same again, and what changes until then.
        """
        for name, shape, source in self._sources():
            values, known = source.read().reshape(-1), self._known[name]
            found, new = [], []
            for start in range(0, values.numel(), _AT_ONCE):
                now = values[start : start + _AT_ONCE].to("cpu")
                before = known[start : start + _AT_ONCE]
                kind = _INTEGERS[now.element_size()]
                differ = (now.contiguous().view(kind) != before.view(kind)).nonzero().view(-1)
                found.append(differ + start)
                new.append(now[differ])
                if advance:
                    before.copy_(now)
            positions = torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device="cpu")
            if len(positions):
                yield WeightChange(
                    name, shape, source.offset, source.size, source.start, source.stop, positions, torch.cat(new)
                )

    def pack(self, *, advance: bool = True) -> torch.Tensor:
        """`changes` as one packet: a 1-D uint8 host tensor, for `apply_changes` or `unpack_changes`."""
        return pack_changes(self.changes(advance=advance))


# Packets --------------------------------------------------------------------------------------------------------------


def pack_changes(changes: Iterable[WeightChange]) -> torch.Tensor:
    """Changes as one packet: 8 bytes with the length of a JSON header, the header, and the bytes that it describes."""
    entries, chunks = [], []
    for one in changes:
        code, bits, positions = _encode(one.positions, one.stop - one.start)
        dtype = str(one.values.dtype).removeprefix("torch.")
        entries.append(
            [one.name, dtype, one.shape, one.offset, one.size, one.start, one.stop, len(one.values), code, bits,
             positions.numel()]
        )  # fmt: skip
        chunks += [positions, one.values.contiguous().view(torch.uint8)]
    header = json.dumps(entries, separators=(",", ":")).encode()
    length = torch.tensor([len(header)], dtype=torch.int64, device="cpu").view(torch.uint8)
    return torch.cat([length, torch.frombuffer(bytearray(header), dtype=torch.uint8), *chunks])


def unpack_changes(packet: torch.Tensor) -> Iterator[WeightChange]:
    """The changes in a packet of `pack_changes`.

    Raises:
        ZeroStateError: it is no such packet, or was cut off.
    """
    packet = packet.detach().to("cpu").contiguous().view(torch.uint8)
    try:
        length = int(packet[:8].clone().view(torch.int64))
        entries = json.loads(host_bytes(packet[8 : 8 + length]))
        at = 8 + length
        for name, kind, shape, offset, size, start, stop, count, code, bits, nbytes in entries:
            dtype = getattr(torch, kind)
            end = at + nbytes + count * dtype.itemsize
            if end > packet.numel():
                raise ValueError("it ends early")
            positions = _decode(packet[at : at + nbytes], code, bits, count, stop - start)
            values = packet[at + nbytes : end].clone().view(dtype)
            yield WeightChange(name, tuple(shape), tuple(offset), tuple(size), start, stop, positions, values)
            at = end
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ZeroStateError(f"the packet of weight changes is damaged ({error}); expected one of pack()") from error


def apply_changes(packet: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> int:
    """Write the changes of a packet into whole tensors by name. Returns how many elements were written.

    Raises:
        ZeroStateError: a tensor is missing or has another shape, or the packet is damaged. Nothing has been written.
    """
    changes = list(unpack_changes(packet))
    for one in changes:
        if one.name not in weights or tuple(weights[one.name].shape) != one.shape:
            got = tuple(weights[one.name].shape) if one.name in weights else "no such tensor"
            raise ZeroStateError(f"{one.name}: got {got}, expected shape {one.shape}")
    for one in changes:
        one.apply(weights[one.name])
    return sum(len(one.values) for one in changes)


# Positions ------------------------------------------------------------------------------------------------------------


def _encode(positions: torch.Tensor, among: int) -> tuple[str, int, torch.Tensor]:
    """The shortest code of ascending positions below `among`: its name, its low bits, and its bytes."""
    count = len(positions)
    if count == among:
        return "all", 0, torch.empty(0, dtype=torch.uint8, device="cpu")
    new = torch.ones(count, dtype=torch.bool, device="cpu")
    new[1:] = positions[1:] != positions[:-1] + 1
    firsts = new.nonzero().view(-1)
    named = min(count, among - count)
    bits = max(0, math.floor(math.log2(among / named * math.log(2))))
    sparse, dense = (named * bits + 7) // 8 + (named + (among >> bits) + 8) // 8, (among + 7) // 8
    if 8 * len(firsts) <= min(sparse, dense):
        lengths = torch.diff(firsts, append=torch.tensor([count], device="cpu"))
        pairs = torch.stack([positions[firsts], lengths], 1)
        if among < 1 << 31:
            return "runs", 32, pairs.to(torch.int32).view(-1).view(torch.uint8)
        return "runs", 64, pairs.view(-1).view(torch.uint8)
    if dense <= sparse or named < count:
        changed = torch.zeros(among, dtype=torch.bool, device="cpu")
        changed[positions] = True
        if dense <= sparse:
            return "bitmap", 0, _pack_bits(changed)
        return "elias-fano of the others", bits, _elias_fano((~changed).nonzero().view(-1), among, bits)
    return "elias-fano", bits, _elias_fano(positions, among, bits)


def _elias_fano(positions: torch.Tensor, among: int, bits: int) -> torch.Tensor:
    count = len(positions)
    high = torch.zeros(count + (among >> bits) + 1, dtype=torch.bool, device="cpu")
    high[(positions >> bits) + torch.arange(count, device="cpu")] = True
    return torch.cat([_pack_low(positions, bits), _pack_bits(high)])


def _decode(data: torch.Tensor, code: str, bits: int, count: int, among: int) -> torch.Tensor:
    if code == "all":
        return torch.empty(0, dtype=torch.int64, device="cpu")
    if code == "runs":
        pairs = data.clone().view(torch.int32 if bits == 32 else torch.int64).view(-1, 2).to(torch.int64)
        starts = torch.repeat_interleave(pairs[:, 0] - (pairs[:, 1].cumsum(0) - pairs[:, 1]), pairs[:, 1])
        return starts + torch.arange(len(starts), device="cpu")
    if code == "bitmap":
        return _unpack_bits(data).nonzero().view(-1)
    if code == "elias-fano of the others":
        changed = torch.ones(among, dtype=torch.bool, device="cpu")
        changed[_decode(data, "elias-fano", bits, among - count, among)] = False
        return changed.nonzero().view(-1)
    if code != "elias-fano":
        raise ValueError(f"unknown code {code!r}")
    low_bytes = (count * bits + 7) // 8
    low = _unpack_bits(data[:low_bytes])[: count * bits].view(count, bits).to(torch.int64)
    value = (
        (low << torch.arange(bits, device="cpu")).sum(1)
        if bits
        else torch.zeros(count, dtype=torch.int64, device="cpu")
    )
    ones = _unpack_bits(data[low_bytes:]).nonzero().view(-1)
    return ((ones - torch.arange(count, device="cpu")) << bits) + value


def _pack_low(positions: torch.Tensor, bits: int) -> torch.Tensor:
    """The `bits` low bits of each position, one after the other."""
    parts = [
        (some.unsqueeze(1) >> torch.arange(bits, device="cpu")).bitwise_and_(1).view(-1).to(torch.bool)
        for some in positions.split(_AT_ONCE)
    ]
    return _pack_bits(torch.cat(parts))


def _pack_bits(bits: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(-(-len(bits) // 8) * 8, dtype=torch.uint8, device="cpu")
    padded[: len(bits)] = bits
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device="cpu")
    return (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def _unpack_bits(data: torch.Tensor) -> torch.Tensor:
    return ((data.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device="cpu")) & 1).view(-1).to(torch.bool)
