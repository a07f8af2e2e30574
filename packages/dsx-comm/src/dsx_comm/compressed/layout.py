"""The layout of the elements of a 1-bit all-reduce, and the bytes that it sends: arithmetic only.

A flat buffer holds *segments* (for example one per parameter), each with a scale of its own. Segments begin at
multiples of 8 elements, so that the sign bits of each fill whole bytes; the buffer is cut into one equal *chunk* per
rank, the part that rank averages as a server. A *run* is what a segment and a chunk have in common: the unit that has a
scale on the wire.

One message, of the same length for every pair of ranks and both phases:

    [scales: fp32 x most runs of any chunk][signs: 1 bit x elements of a chunk, element i of a byte in bit i][padding to
    4 bytes]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from ..errors import CommArgumentError

if TYPE_CHECKING:
    import torch

BYTE = 8  # elements per byte of signs
CHUNK_MULTIPLE = 32  # elements: the scales of the next message are aligned to 4 bytes
SCALE_BYTES = 4


@dataclass(frozen=True)
class Run:
    """Elements [start, stop) of the flat buffer, all of segment `segment`."""

    start: int
    stop: int
    segment: int


@dataclass(frozen=True)
class OneBitLayout:
    """The layout for segments of `lengths` elements among `world_size` ranks.

    `given_chunk`: elements of a chunk, for callers whose buffers have a length already; None chooses the least that
    fits.
    """

    lengths: tuple[int, ...]
    world_size: int
    given_chunk: int | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1 or any(length < 0 for length in self.lengths):
            raise CommArgumentError(
                f"got segments {self.lengths} among {self.world_size} ranks, expected lengths >= 0 and at "
                "least one rank"
            )
        given = self.given_chunk
        if given is not None and (given % BYTE or given * self.world_size < self._end):
            raise CommArgumentError(
                f"got chunks of {given} elements among {self.world_size} ranks, expected a multiple of "
                f"{BYTE} that holds {self._end} elements"
            )

    @classmethod
    def of(cls, lengths: int | Sequence[int], world_size: int) -> OneBitLayout:
        """The layout of one segment or several, from their lengths."""
        return cls((lengths,) if isinstance(lengths, int) else tuple(lengths), world_size)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first element of each segment."""
        padded = [-(-length // BYTE) * BYTE for length in self.lengths]
        return tuple(accumulate(padded, initial=0))[:-1]

    @property
    def _end(self) -> int:
        return self.offsets[-1] + self.lengths[-1] if self.lengths else 0

    @cached_property
    def chunk(self) -> int:
        """Elements of one chunk, padding included; 0 without any element."""
        if self.given_chunk is not None:
            return self.given_chunk
        per_rank = -(-self._end // self.world_size)
        return -(-per_rank // CHUNK_MULTIPLE) * CHUNK_MULTIPLE

    @property
    def numel(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.chunk * self.world_size

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """All segments that are not empty, whole."""
        pairs = enumerate(zip(self.offsets, self.lengths))
        return tuple(Run(start, start + length, index) for index, (start, length) in pairs if length)

    @cached_property
    def runs_of_chunks(self) -> tuple[tuple[Run, ...], ...]:
        """The runs of segments in each rank's chunk, in coordinates of the flat buffer."""
        found: list[list[Run]] = [[] for _ in range(self.world_size)]
        for run in self.runs:
            for rank in range(run.start // self.chunk, (run.stop - 1) // self.chunk + 1):
                low, high = rank * self.chunk, (rank + 1) * self.chunk
                found[rank].append(Run(max(run.start, low), min(run.stop, high), run.segment))
        return tuple(map(tuple, found))

    def chunk_runs(self, rank: int) -> tuple[Run, ...]:
        """The runs of segments in one rank's chunk, in coordinates of the flat buffer."""
        return self.runs_of_chunks[rank]

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges that belong to no segment."""
        edges = [0, *(edge for run in self.runs for edge in (run.start, run.stop)), self.numel]
        return tuple((a, b) for a, b in zip(edges[::2], edges[1::2]) if a < b)

    @cached_property
    def scales(self) -> int:
        """Scales per message: the most runs that any chunk has."""
        return max(map(len, self.runs_of_chunks), default=0)

    @property
    def signs_at(self) -> int:
        """The byte of a message at which the signs begin."""
        return self.scales * SCALE_BYTES

    @property
    def message_bytes(self) -> int:
        """Bytes of one message, a multiple of 4."""
        return self.signs_at + -(-self.chunk // (BYTE * SCALE_BYTES)) * SCALE_BYTES

    @property
    def sent_bytes(self) -> int:
        """Bytes one rank sends in one all-reduce, both phases: 2 (P-1) messages. A world of one sends nothing."""
        return 2 * (self.world_size - 1) * self.message_bytes


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
