"""Compression with memory: what one message leaves out is added to the next.

`ErrorFeedback` holds, for one kind of message, the layout and the two errors of the 1-bit all-reduce: the worker's (what
this rank's signs left out of its own values) and the server's (what the averaged signs left out of this rank's chunk).
Both are float32: 4 bytes per element and 4 / P, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..errors import CommArgumentError
from ..groups import member
from .codec import Codec, codec_for
from .layout import BYTE, OneBitLayout, Range
from .signs import Measure, check_measure


class ErrorFeedback:
    """The memory of a 1-bit all-reduce that is done again and again with the same shapes on the same group.

    Args:
        lengths: elements, or elements of each segment that gets scales of its own.
        group: the process group; None: all ranks.
        device: where the tensors to reduce are.
        scale: "rms" (the published algorithm) or "mean" (the least error per message).
    """

    def __init__(
        self,
        lengths: int | Sequence[int],
        group: object = None,
        device: torch.device | str = "cpu",
        scale: Measure = "rms",
    ) -> None:
        to = member(group)
        self.layout = OneBitLayout.of(lengths, to.size)
        self.rank = to.rank
        self.scale = check_measure(scale)
        self.codec: Codec = codec_for(torch.device(device), self.scale)
        self.worker = torch.zeros(self.layout.numel, device=device)
        self.server = torch.zeros(self.layout.chunk, device=device)
        self.everything = Range.whole(self.layout)
        self.chunks = tuple(Range.chunk(self.layout, rank) for rank in range(to.size))

    def reset(self) -> None:
        """Forget both errors: the next message has nothing to make up for."""
        self.worker.zero_()
        self.server.zero_()

    def nbytes(self) -> int:
        """Bytes of both errors."""
        return (self.worker.numel() + self.server.numel()) * self.worker.element_size()

    def flat(self) -> torch.Tensor:
        """A zeroed flat buffer of this layout, to lay values out in."""
        return torch.zeros_like(self.worker)

    def segments(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The segments in a flat buffer, 1-D, empty ones too."""
        layout = self.layout
        if flat.numel() != layout.numel:
            raise CommArgumentError(f"got a buffer of {flat.numel()} elements, expected {layout.numel} (padded)")
        return [flat[start : start + length] for start, length in zip(layout.offsets, layout.lengths)]

    def server_ranges(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(segment, first element in it, this rank's server errors there): what this rank keeps of a global tensor."""
        chunk = self.chunks[self.rank]
        for run, view in zip(chunk.runs, chunk.views(self.server)):
            yield run.segment, run.start - self.layout.offsets[run.segment], view


def chunk_rows(buffer: torch.Tensor, layout: OneBitLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales (P x K float32) and signs (P x chunk/8 uint8) in a buffer of P messages, sharing its memory."""
    rows = buffer.view(layout.world_size, layout.message_bytes)
    cut = rows.shape[1] - layout.chunk // BYTE
    return rows[:, :cut].view(torch.float32), rows[:, cut:]
