"""The word in which a storage keeps its memory's address, so that the compiled module sees when the memory is gone.

A program may free the memory of a tensor while an asynchronous call uses it (`untyped_storage().resize_(0)`), and torch
has no way to forbid it for a while. The module therefore looks at the address in the storage after each wait
(native/include/dsx_comm/lease.h). Where in a storage that word lies is found by trying: its place belongs to torch's
version, and this package is compiled for none. Where it cannot be found nothing is watched.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

_WORD, _WORDS = 8, 12


def words_of(tensors: Any) -> tuple[dict[int, Any], list[int]]:
    """(the storages of nested lists of tensors, the addresses of their words).

    Keep the storages as long as the words are looked at: a tensor may be given another storage (`tensor.data = ...`).
    """
    found: dict[int, Any] = {}
    _collect(tensors, found)
    offset = _offset()
    return found, [] if offset is None else [place + offset for place in found]


def _collect(tensors: Any, found: dict[int, Any]) -> None:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage
        else:
            _collect(tensor, found)


@lru_cache(maxsize=1)
def _offset() -> int | None:
    """Bytes from the beginning of a storage to the word with the address of its memory; None if no word fits."""
    own, borrowed = torch.empty(64, device="cpu"), torch.frombuffer(bytearray(256), dtype=torch.uint8)
    fitting = _fitting(own) & _fitting(borrowed)
    own.untyped_storage().resize_(1 << 16)  # moves
    fitting &= _fitting(own)
    return fitting.pop() if len(fitting) == 1 else None


def _fitting(tensor: torch.Tensor) -> set[int]:
    storage = tensor.untyped_storage()
    words = (ctypes.c_uint64 * _WORDS).from_address(storage._cdata)
    return {_WORD * place for place, word in enumerate(words) if word == storage.data_ptr()}
