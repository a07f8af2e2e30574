"""The memory that a replayed rank holds: by class, by tier, at every moment.

A storage counts from the operator that made it until nothing refers to it any more, and as large as it is at the time
(`resize_`). Its class follows from who asked for it and when; tensors that the engine can name itself (parameters, fp32
master weights, optimizer states) are named by `rename`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["CLASSES", "DEVICE", "DISK", "HOST", "Ledger", "Peak"]

DEVICE, HOST, DISK = "device", "host", "disk"

CLASSES = (
    "parameters", "gathered", "gradients", "masters", "states", "activations", "workspace", "messages", "buffers",
    "inputs",
)  # fmt: skip
"""Parameters (shards, at stages 0-2 whole), parameters gathered for their use, gradients (buffers and reduced ones),
fp32 master weights, optimizer states, what a forward made, what a backward or step made, buffers of communication and
copies, the model's own buffers, the batch."""


@dataclass(frozen=True)
class Peak:
    """The greatest sum seen.

    Attributes:
        nbytes: how much.
        classes: what it was made of.
        at: number of events that had been seen.
    """

    nbytes: int = 0
    classes: dict[str, int] = field(default_factory=dict)
    at: int = 0


class _Entry:
    __slots__ = ("kind", "nbytes", "number", "ref", "tier")

    def __init__(self, ref: Any, number: int, nbytes: int, kind: str, tier: str) -> None:
        self.ref, self.number, self.nbytes, self.kind, self.tier = ref, number, nbytes, kind, tier


class Ledger:
    """Counts the bytes that a replayed rank holds, by class and tier.

    `clock()`: number of events so far, noted with peaks and with the curve.
    """

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self._entries: dict[int, _Entry] = {}
        self.in_use: dict[str, dict[str, int]] = {DEVICE: {}, HOST: {}, DISK: {}}
        self.total = {DEVICE: 0, HOST: 0, DISK: 0}
        self.peaks = {DEVICE: Peak(), HOST: Peak(), DISK: Peak()}
        self.memory = Peak()
        """The peak of device and host together, at one time: the need of a rank where both are one memory."""
        self.curve: list[tuple[int, int, int]] = []
        """(events, bytes on the device, bytes in host memory) at each change, while `recording`."""
        self.requests: list[tuple[int, int]] = []
        """Changes on the device since `record`: number of a storage and its bytes, 0 where it gave its memory back."""
        self.recording = False
        self._number = 0

    # - storages

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Is it counted already?"""
        return storage._cdata in self._entries

    def tier_of(self, tensor: torch.Tensor) -> str:
        """The tier of a tensor's memory; the device for memory that is not counted."""
        entry = self._entries.get(tensor.untyped_storage()._cdata)
        return DEVICE if entry is None else entry.tier

    def key_of(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """An identifier of a tensor's storage, also when another one has its place later; None if it is not counted."""
        key = tensor.untyped_storage()._cdata
        entry = self._entries.get(key)
        return None if entry is None else (key, entry.number)

    def holds(self, key: tuple[int, int]) -> bool:
        """Is a storage of `key_of` still there?"""
        entry = self._entries.get(key[0])
        return entry is not None and entry.number == key[1]

    def add(self, storage: torch.UntypedStorage, kind: str, tier: str = DEVICE) -> None:
        """Count a new storage."""
        key = storage._cdata
        if key in self._entries:
            return
        self._number += 1
        entry = _Entry(weakref.ref(storage, lambda _: self._gone(key)), self._number, storage.nbytes(), kind, tier)
        self._entries[key] = entry
        self.add_bytes(tier, kind, entry.nbytes)
        self._request(entry, entry.nbytes)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size now."""
        entry = self._entries.get(storage._cdata)
        if entry is not None and entry.nbytes != (size := storage.nbytes()):
            old, entry.nbytes = entry.nbytes, size
            self.add_bytes(entry.tier, entry.kind, size - old)
            self._request(entry, 0)
            self._request(entry, size)

    def rename(self, tensors: Iterable[torch.Tensor], kind: str, tier: str | None = None) -> None:
        """Set the class (and tier) of these tensors' storages, which was not known when they were made."""
        for tensor in tensors:
            self.move(tensor.untyped_storage(), kind, tier)

    def move(self, storage: torch.UntypedStorage, kind: str, tier: str | None = None) -> None:
        """`rename` for one storage."""
        entry = self._entries.get(storage._cdata)
        if entry is None:
            self.add(storage, kind, tier or DEVICE)
            return
        wanted = tier or entry.tier
        if (entry.kind, entry.tier) != (kind, wanted):
            self.add_bytes(entry.tier, entry.kind, -entry.nbytes)
            entry.kind, entry.tier = kind, wanted
            self.add_bytes(wanted, kind, entry.nbytes)

    def _gone(self, key: int) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.add_bytes(entry.tier, entry.kind, -entry.nbytes)
            self._request(entry, 0)

    def _request(self, entry: _Entry, nbytes: int) -> None:
        if self.recording and entry.tier == DEVICE:
            self.requests.append((entry.number, nbytes))

    def record(self) -> None:
        """From now on note every change, beginning with what is there."""
        self.reset_peaks()
        self.recording = True
        self.curve.append((self._clock(), self.total[DEVICE], self.total[HOST]))
        for entry in self._entries.values():
            if entry.nbytes:
                self._request(entry, entry.nbytes)

    # - sums

    def add_bytes(self, tier: str, kind: str, nbytes: int) -> None:
        """Count bytes; also those that are no storage of this process (a store on disk)."""
        if not nbytes:
            return
        classes = self.in_use[tier]
        classes[kind] = classes.get(kind, 0) + nbytes
        self.total[tier] += nbytes
        if self.total[tier] > self.peaks[tier].nbytes:
            self.peaks[tier] = self._peak_now(tier)
        if tier != DISK and self.total[DEVICE] + self.total[HOST] > self.memory.nbytes:
            self.memory = self._peak_now(DEVICE, HOST)
        if self.recording and tier != DISK:
            self.curve.append((self._clock(), self.total[DEVICE], self.total[HOST]))

    def _peak_now(self, *tiers: str) -> Peak:
        classes = Counter[str]()
        for tier in tiers:
            classes.update({name: size for name, size in self.in_use[tier].items() if size})
        return Peak(sum(self.total[tier] for tier in tiers), dict(classes), self._clock())

    def reset_peaks(self) -> None:
        """Let peaks begin at what is in use now."""
        self.peaks = {tier: self._peak_now(tier) for tier in self.peaks}
        self.memory = self._peak_now(DEVICE, HOST)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside the block peaks are those of the block, and nothing is recorded; afterwards all is as before."""
        kept = self.peaks, self.memory, self.recording
        self.recording = False
        self.reset_peaks()
        try:
            yield
        finally:
            self.peaks, self.memory, self.recording = kept

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Inside the block a storage that is resized is counted again: no operator reports the resize."""
        cls: Any = torch.UntypedStorage
        own, original = "resize_" in vars(cls), cls.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self.resized(storage)
            return result

        cls.resize_ = resize
        try:
            yield
        finally:
            if own:
                cls.resize_ = original
            else:
                del cls.resize_
