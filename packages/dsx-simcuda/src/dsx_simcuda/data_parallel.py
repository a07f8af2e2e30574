"""The compiled bindings that torch.nn.DataParallel calls: scatter, gather and broadcast over the devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .streams import StreamContext


def scatter(
    tensor: torch.Tensor, devices: Sequence[int], sizes: Sequence[int] | None, dim: int, streams: Any = None
) -> tuple[torch.Tensor, ...]:
    """One chunk for each device, copied on the stream that is given for it."""
    chunks = tensor.split(list(sizes), dim) if sizes else tensor.chunk(len(devices), dim)
    found = []
    for chunk, device, stream in zip(chunks, devices, streams or [None] * len(devices)):
        with StreamContext(stream):
            found.append(chunk.contiguous().to(f"cuda:{device}", non_blocking=True))
    return tuple(found)


def gather(tensors: Sequence[torch.Tensor], dim: int, destination: int | None) -> torch.Tensor:
    """All tensors behind each other on one device; -1 is the host."""
    place = "cpu" if destination == -1 else f"cuda:{destination or 0}"
    return torch.cat([tensor.to(place) for tensor in tensors], dim)


def broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    """The tensor on every device."""
    return [tensor.to(f"cuda:{device}") for device in devices]


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    """The tensors on every device."""
    return [[tensor.to(f"cuda:{device}") for tensor in tensors] for device in devices]


BINDINGS = {
    "_scatter": scatter,
    "_gather": gather,
    "_broadcast": broadcast,
    "_broadcast_coalesced": broadcast_coalesced,
}
