"""Compression with memory: what one message leaves out is added to the next.

`ErrorFeedback` holds, for one kind of message, the layout and the two errors of the 1-bit all-reduce: the worker's (what
this rank's signs left out of its own values) and the server's (what the averaged signs left out of this rank's chunk).
Both are float32: 4 bytes per element and 4 / P, P ranks.

`compress` and `decompress` work on one range of the flat buffer: everything (the worker) or a chunk (the server).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..errors import CommArgumentError
from ..groups import member
from . import signs
from .layout import BYTE, OneBitLayout, Run


@dataclass(frozen=True)
class Range:
    """A range of the flat buffer that begins at `start`: its runs and its gaps."""

    start: int
    runs: tuple[Run, ...]
    gaps: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, layout: OneBitLayout) -> Range:
        """The flat buffer, a run per segment: the worker's scales are measured on whole segments."""
        return cls(0, layout.runs, layout.gaps)

    @classmethod
    def chunk(cls, layout: OneBitLayout, rank: int) -> Range:
        """A rank's chunk."""
        low, high = rank * layout.chunk, (rank + 1) * layout.chunk
        cut = ((max(a, low), min(b, high)) for a, b in layout.gaps)
        return cls(low, layout.chunk_runs(rank), tuple((a, b) for a, b in cut if a < b))

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The runs in a buffer that holds this range."""
        return [buffer[run.start - self.start : run.stop - self.start] for run in self.runs]

    def clear_gaps(self, buffer: torch.Tensor) -> None:
        """Zero what belongs to no segment."""
        for a, b in self.gaps:
            buffer[a - self.start : b - self.start].zero_()


def compress(
    values: torch.Tensor, error: torch.Tensor, where: Range, measure: signs.Measure, bits: torch.Tensor
) -> torch.Tensor:
    """values += error; bits = their signs; error = values - scale * sign. Returns the scales of the runs.

    Args:
        values, error: float32, the elements of `where`; gaps must be zero in both and stay so.
        bits: uint8, an eighth of them.
    """
    values.add_(error)
    scales = signs.measure_runs(where.views(values), measure)
    signs.pack(values, bits)
    signs.unpack(bits, error)
    signs.scale_runs(where.views(error), -scales)
    error.add_(values)
    where.clear_gaps(error)
    return scales


def decompress(bits: torch.Tensor, scales: torch.Tensor, where: Range, out: torch.Tensor) -> None:
    """out (the elements of `where`) = scale * sign; gaps are zeroed."""
    signs.unpack(bits, out)
    signs.scale_runs(where.views(out), scales)
    where.clear_gaps(out)


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
        scale: signs.Measure = "rms",
    ) -> None:
        to = member(group)
        self.layout = OneBitLayout.of(lengths, to.size)
        self.rank = to.rank
        self.scale = signs.check_measure(scale)
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
