"""A store that counts what one rank asks of it: requests by kind, and the bytes that come back."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["CountingStore"]


class CountingStore(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
    """One rank's way to a store.

    Attributes:
        inner: the store.
        requests: how many of each kind went through this way.
        read: bytes that came back.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.requests, self.read = inner, Counter(), 0
        self._lock = threading.Lock()

    def _count(self, kind: str, size: int = 0) -> None:
        with self._lock:
            self.requests[kind] += 1
            self.read += size

    def set(self, key: str, value: Any) -> None:
        self._count("set")
        return self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        value = self.inner.get(key)
        self._count("get", len(value))
        return value

    def add(self, key: str, number: int) -> int:
        self._count("add")
        return self.inner.add(key, number)

    def append(self, key: str, value: Any) -> None:
        self._count("append")
        return self.inner.append(key, value)

    def check(self, keys: list[str]) -> bool:
        self._count("check")
        return self.inner.check(keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self._count("compare_set")
        return self.inner.compare_set(key, expected, value)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self._count("wait")
        return self.inner.wait(keys, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self.inner.multi_get(keys)
        self._count("multi_get", sum(map(len, values)))
        return values

    def has_extended_api(self) -> bool:
        return True
