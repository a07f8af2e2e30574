"""Error feedback: what one message leaves out is added to the next one.

`ErrorFeedback` holds, for one kind of message, the layout and the two errors of the 1-bit all-reduce: the worker's
(what this rank's signs left out of its own values) and the server's (what the averaged signs left out of this rank's
chunk). Both are float32: 4 bytes per element and 4 / P, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

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
        layout = OneBitLayout.of(lengths, to.size)
        self._begin(layout, to.rank, check_measure(scale), torch.zeros(layout.numel, device=device),
                    torch.zeros(layout.chunk, device=device))  # fmt: skip

    @classmethod
    def around(cls, worker: torch.Tensor, server: torch.Tensor, group: object = None) -> ErrorFeedback:
        """The memory in tensors that the caller keeps: one segment as long as `worker`, in chunks as long as `server`.

        Args:
            worker, server: float32, 1-D, contiguous, on one device; `worker` as long as the group's `server`s together.

        Raises:
            CommArgumentError: lengths, dtypes or devices do not fit.
        """
        to = member(group)
        for role, error in (("worker", worker), ("server", server)):
            if error.dtype != torch.float32 or not error.is_contiguous() or error.device != worker.device:
                raise CommArgumentError(
                    f"{role} error: got {error.dtype} on {error.device}, expected contiguous float32 on {worker.device}"
                )
        if worker.numel() != to.size * server.numel() or server.numel() % BYTE:
            raise CommArgumentError(
                f"got a worker error of {worker.numel()} elements and a server error of {server.numel()}, "
                f"expected {to.size} (ranks) "
                f"times the server error's, and that a multiple of {BYTE}"
            )
        layout = OneBitLayout((worker.numel(),), to.size, server.numel())
        found = cls.__new__(cls)
        found._begin(layout, to.rank, "rms", worker.view(-1), server.view(-1))
        return found

    def _begin(
        self, layout: OneBitLayout, rank: int, scale: Measure, worker: torch.Tensor, server: torch.Tensor
    ) -> None:
        self.layout, self.rank, self.scale = layout, rank, scale
        self.worker, self.server = worker, server
        # `around` is called for every message: the tables of a codec are made for the first one of a layout
        make = codec_for if layout.given_chunk is None else _kept_codec_for
        self.codec: Codec = make(layout, rank, worker.device, scale)

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
        chunk = Range.chunk(self.layout, self.rank)
        for run, view in zip(chunk.runs, chunk.views(self.server)):
            yield run.segment, run.start - self.layout.offsets[run.segment], view


@lru_cache(maxsize=64)
def _kept_codec_for(layout: OneBitLayout, rank: int, device: torch.device, scale: Measure) -> Codec:
    return codec_for(layout, rank, device, scale)
