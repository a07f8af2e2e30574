"""Objects of all ranks to one rank, and from one rank to all, along one tree.

A rank passes on what those below it have sent, so that no rank talks to more than log2 of them. The place of a rank is
its distance from the root; a place that ends in k zeros, as a binary number, has k places below it:

    0:  1, 2, 4, 8 ..      2:  3      4:  5, 6      6:  7      8:  9, 10, 12

Each of them stands for the places up to the next one, so what a rank passes on is that of neighbours. Messages are
packed whole: ranks mostly say nearly the same, which then is sent nearly once.
"""

from __future__ import annotations

import ctypes
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from .calls import Call, Labels, guarded, run
from .errors import CommArgumentError
from .groups import Membership, get_global_rank
from .p2p import start_p2p

__all__ = ["NotJoined", "ObjectTree", "children_of", "host_bytes", "packed", "parent_of", "unpacked"]

T = TypeVar("T")
_TAG = 0x40000004  # beyond what users may take; of lengths and pickles
_WORTH_PACKING = 512  # bytes
_PROBE = 1 << 16  # bytes in the middle of a long message that are packed first
_LENGTH_BYTES = 8


def children_of(place: int, size: int) -> Iterator[tuple[int, int]]:
    """The places below a place, each with the end of the range of places that it stands for."""
    step = 1
    while place & step == 0 and place + step < size:
        yield place + step, min(place + 2 * step, size)
        step *= 2


def parent_of(place: int) -> int:
    """The place above a place; not for 0."""
    return place & (place - 1)


def _one_of_each(one: list[bytes], other: list[bytes]) -> list[bytes]:
    """Both lists, with equal bytes as one object, which a pickle has once."""
    known: dict[bytes, bytes] = {}
    return [known.setdefault(part, part) for part in (*one, *other)]


def packed(data: bytes) -> bytes:
    """The bytes with a letter before them that says whether they were made smaller."""
    middle = memoryview(data)[len(data) // 2 :][:_PROBE]
    # Numbers of tensors do not get smaller, and packing them takes longer than sending them.
    if len(data) >= _WORTH_PACKING and (len(data) < 8 * _PROBE or 2 * len(zlib.compress(middle, 1)) < len(middle)):
        smaller = zlib.compress(data, 1)
        if len(smaller) < len(data):
            return b"z" + smaller
    return b"p" + data


def unpacked(data: bytes) -> bytes | memoryview:
    """The bytes that `packed` was given."""
    return zlib.decompress(memoryview(data)[1:]) if data[:1] == b"z" else memoryview(data)[1:]


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


@dataclass(frozen=True)
class NotJoined:
    """Goes up the tree in the place of a value that could not be made: what failed first."""

    words: str


class ObjectTree:
    """One use of the tree by the ranks of a group. Every method is collective.

    Args:
        root: the rank within the group to which or from which objects go.
        name: of the public function, under which bytes are counted.
    """

    def __init__(self, to: Membership, root: int, name: str, labels: Labels) -> None:
        self._to, self._root, self._name, self._labels = to, root, name, labels
        self._place = (to.rank - root) % to.size
        self.error: Exception | None = None
        """The error of this rank in `join`; None if it did not fail."""

    def gather(self, data: bytes) -> list[bytes]:
        """The ranks' bytes, by rank, on the root; an empty list on the others."""
        held = self._up([data], _one_of_each)
        return [held[(rank - self._root) % self._to.size] for rank in range(self._to.size)] if held else []

    def join(self, value: T, joining: Callable[[T, T], T]) -> T | NotJoined | None:
        """On the root what `joining` makes of the ranks' values, which are joined with those of the places behind
        them, two at a time; None on the others. What fails on the way is passed on, because the root waits.
        """

        def both(one: T | NotJoined, other: T | NotJoined) -> T | NotJoined:
            if isinstance(one, NotJoined):
                return one
            if isinstance(other, NotJoined):
                return other
            try:
                return joining(one, other)
            except Exception as error:  # noqa: BLE001 - whatever it is, the ranks above wait for this one
                return self._failing("joining", error)

        def pickled(found: T | NotJoined) -> bytes:
            try:
                return _pickled(found)
            except Exception as error:  # noqa: BLE001 - as above
                return _pickled(self._failing("pickling its object", error))

        return self._up(value, both, pickled)

    def _failing(self, doing: str, error: Exception) -> NotJoined:
        self.error = error
        return NotJoined(f"{self._name}: rank {self._to.rank} failed {doing}: {type(error).__name__}: {error}")

    def _up(self, value: T, joining: Callable[[T, T], T], pickled: Callable[[T], bytes] = _pickled) -> T | None:
        found = [value]

        def receive() -> None:
            for child, _ in children_of(self._place, self._to.size):
                found[0] = joining(found[0], pickle.loads(unpacked(self._receive(child))))

        guarded(self._call(0, 0), receive)
        data = packed(pickled(found[0])) if self._place else b""
        sent = len(data) + _LENGTH_BYTES if data else 0
        run(self._call(len(data), sent), lambda: self._send(data, parent_of(self._place)) if data else None)
        return None if self._place else found[0]

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """This rank's of the parts that the root gives, by rank; the others give nothing."""
        size = self._to.size
        held = [parts[(place + self._root) % size] for place in range(size)] if self._place == 0 else []

        def receive() -> None:
            held.extend(pickle.loads(unpacked(self._receive(parent_of(self._place)))))

        guarded(self._call(0, 0), receive if self._place else lambda: None)
        messages = {
            child: packed(pickle.dumps(held[child - self._place : end - self._place], pickle.HIGHEST_PROTOCOL))
            for child, end in children_of(self._place, size)
        }
        sent = sum(len(data) + _LENGTH_BYTES for data in messages.values())

        def send() -> None:
            for child in reversed(messages):  # first to the one that has most to pass on
                self._send(messages[child], child)

        run(self._call(max(map(len, messages.values()), default=0), sent), send)
        return held[0]

    def _call(self, message: int, sent: int) -> Call:
        to = self._to
        return Call(self._name, to.group, to.size, message, sent, to.message_device, self._labels)

    def _peer(self, place: int) -> int:
        return get_global_rank(self._to.group, (place + self._root) % self._to.size)

    def _send(self, data: bytes, place: int) -> None:
        device, peer = self._to.message_device, self._peer(place)
        for tensor in (torch.tensor([len(data)], device="cpu"), torch.frombuffer(bytearray(data), dtype=torch.uint8)):
            start_p2p(tensor.to(device), peer, self._to, _TAG, sending=True).wait()

    def _receive(self, place: int) -> bytes:
        device, peer = self._to.message_device, self._peer(place)
        length = torch.zeros(1, dtype=torch.int64, device=device)
        start_p2p(length, peer, self._to, _TAG, sending=False).wait()
        payload = torch.empty(int(length), dtype=torch.uint8, device=device)
        start_p2p(payload, peer, self._to, _TAG, sending=False).wait()
        return host_bytes(payload.cpu())


def host_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of the bytes of a contiguous host tensor of any dtype. `Tensor.numpy` would need numpy to be installed."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise CommArgumentError(f"host_bytes: got a tensor on {tensor.device}, expected a contiguous one on the host")
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()) if tensor.numel() else b""
