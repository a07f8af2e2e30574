"""Compressing and decompressing the messages of a 1-bit all-reduce: values of a flat buffer on one side, messages on
the other.

Two implementations with the same results up to the last bit of a scale. `TorchCodec` is plain torch, run by run.
`KernelCodec` gives all runs to the kernels of `dsx_ops.sign_runs` in one call per phase, on the CPU and on CUDA; they
write signs and scales where the messages want them. `dsx_ops` is optional and looked for at the first use;
`codec_status` says what is used and why.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from . import signs
from .layout import BYTE, SCALE_BYTES, OneBitLayout, Range, Run
from .signs import Measure


class Codec(Protocol):
    """Arithmetic of the 1-bit all-reduce on one rank. Values and errors are float32; padding outside segments is zero
    and stays so.

    `messages` are all ranks' messages one after the other, 1-D uint8; what no scale or sign lies in is left as it is.
    """

    def compress(self, values: torch.Tensor, error: torch.Tensor, messages: torch.Tensor) -> None:
        """The worker's part: messages to all ranks = scales and signs of x = values + error; error = x - scale sign(x).

        What is left in `values` has no meaning.
        """
        ...

    def mean(self, messages: torch.Tensor, out: torch.Tensor) -> None:
        """The server's part, for its chunk: out = mean over the messages, in the order of ranks, of scale * sign."""
        ...

    def compress_chunk(self, values: torch.Tensor, error: torch.Tensor, message: torch.Tensor) -> None:
        """Like `compress`, for this rank's chunk and the one message about it."""
        ...

    def decompress(self, messages: torch.Tensor, out: torch.Tensor) -> None:
        """out (the flat buffer) = scale * sign, chunk r from message r."""
        ...


class TorchCodec:
    """The codec in plain torch."""

    def __init__(self, layout: OneBitLayout, rank: int, scale: Measure) -> None:
        self._layout = layout
        self._scale: Measure = scale
        self._whole = Range.whole(layout)
        self._chunks = [Range.chunk(layout, r) for r in range(layout.world_size)]
        self._own = self._chunks[rank]

    def compress(self, values: torch.Tensor, error: torch.Tensor, messages: torch.Tensor) -> None:
        """See `Codec`."""
        layout = self._layout
        bits = torch.empty(layout.numel // BYTE, dtype=torch.uint8, device=values.device)
        scales = self._compress(values, error, self._whole, bits)
        scale_rows, sign_rows = rows_of(messages, layout)
        sign_rows.copy_(bits.view(layout.world_size, -1))
        number = {run.segment: place for place, run in enumerate(layout.runs)}
        for row, runs in zip(scale_rows, layout.runs_of_chunks):
            first = number[runs[0].segment] if runs else 0  # the runs of a chunk follow one another
            row[: len(runs)] = scales[first : first + len(runs)]

    def mean(self, messages: torch.Tensor, out: torch.Tensor) -> None:
        """See `Codec`."""
        part = torch.empty_like(out)
        out.zero_()
        for scales, bits in zip(*rows_of(messages, self._layout)):
            self._decompress(bits, scales, self._own, part)
            out.add_(part)
        out.div_(self._layout.world_size)

    def compress_chunk(self, values: torch.Tensor, error: torch.Tensor, message: torch.Tensor) -> None:
        """See `Codec`."""
        (scale_row,), (bits,) = rows_of(message, self._layout, 1)
        scales = self._compress(values, error, self._own, bits)
        scale_row[: scales.numel()] = scales

    def decompress(self, messages: torch.Tensor, out: torch.Tensor) -> None:
        """See `Codec`."""
        parts = out.view(self._layout.world_size, -1)
        for chunk, part, scales, bits in zip(self._chunks, parts, *rows_of(messages, self._layout)):
            self._decompress(bits, scales, chunk, part)

    def _compress(self, values: torch.Tensor, error: torch.Tensor, where: Range, bits: torch.Tensor) -> torch.Tensor:
        """bits = signs of values + error, error = what they leave out; returns the scales of the runs."""
        values.add_(error)
        scales = signs.measure_runs(where.views(values), self._scale)
        signs.pack(values, bits)
        signs.unpack(bits, error)
        signs.scale_runs(where.views(error), -scales)
        error.add_(values)
        where.clear_gaps(error)
        return scales

    @staticmethod
    def _decompress(bits: torch.Tensor, scales: torch.Tensor, where: Range, out: torch.Tensor) -> None:
        signs.unpack(bits, out)
        signs.scale_runs(where.views(out), scales)
        where.clear_gaps(out)


class KernelCodec:
    """The codec by the kernels of `dsx_ops`, all runs of a phase in one call; rms scales only.

    Args:
        layout, rank: whose messages.
        device: where the buffers are; the tables of places lie there too.
        ops: the module `dsx_ops.sign_runs`.
    """

    def __init__(self, layout: OneBitLayout, rank: int, device: torch.device, ops: Any) -> None:
        self._layout, self._ops = layout, ops
        own = layout.chunk_runs(rank)
        self._to_all = ops.SignRuns([self._stretches(run) for run in layout.runs], device)
        self._own = ops.SignRuns([[self._stretch(run, rank, place)] for place, run in enumerate(own)], device)
        numbered = enumerate(layout.runs_of_chunks)
        placed = [(rank, place, run) for rank, runs in numbered for place, run in enumerate(runs)]
        row = layout.message_bytes // SCALE_BYTES
        self._from_all = ops.SignRuns([[self._stretch(run, r, r * row + place, r)] for r, place, run in placed], device)
        # a segment's one scale goes to every rank whose chunk holds a part of it
        number = {run.segment: place for place, run in enumerate(layout.runs)}
        self._scale_of = torch.tensor([number[run.segment] for _, _, run in placed], dtype=torch.int64, device=device)
        self._scale_at = torch.tensor([r * row + place for r, place, _ in placed], dtype=torch.int64, device=device)

    def _stretches(self, run: Run) -> list[tuple[int, int, int]]:
        """A segment's parts in the messages to all ranks."""
        chunk, size = self._layout.chunk, self._layout.message_bytes
        parts = []
        for rank in range(run.start // chunk, (run.stop - 1) // chunk + 1):
            begin, end = max(run.start, rank * chunk), min(run.stop, (rank + 1) * chunk)
            parts.append((begin, end, rank * size + self._layout.signs_at + (begin - rank * chunk) // BYTE))
        return parts

    def _stretch(self, run: Run, rank: int, scale: int, row: int | None = None) -> tuple[int, int, int, int]:
        """A run of `rank`'s chunk: in the chunk and its one message, or (`row` given) in the flat buffer and message
        `row`.
        """
        begin = run.start - rank * self._layout.chunk
        byte = self._layout.signs_at + begin // BYTE
        if row is None:
            return begin, begin + run.stop - run.start, byte, scale
        return run.start, run.stop, row * self._layout.message_bytes + byte, scale

    def compress(self, values: torch.Tensor, error: torch.Tensor, messages: torch.Tensor) -> None:
        """See `Codec`."""
        scales = torch.empty(len(self._to_all), device=values.device)
        self._ops.compress_runs(values, error, self._to_all, messages, scales)
        messages.view(torch.float32).index_copy_(0, self._scale_at, scales.index_select(0, self._scale_of))

    def mean(self, messages: torch.Tensor, out: torch.Tensor) -> None:
        """See `Codec`."""
        size = self._layout.message_bytes
        strides = {"ranks": self._layout.world_size, "bit_stride": size, "scale_stride": size // SCALE_BYTES}
        self._ops.mean_of_runs(messages, messages.view(torch.float32), self._own, out, **strides)

    def compress_chunk(self, values: torch.Tensor, error: torch.Tensor, message: torch.Tensor) -> None:
        """See `Codec`."""
        self._ops.compress_runs(values, error, self._own, message, message.view(torch.float32))

    def decompress(self, messages: torch.Tensor, out: torch.Tensor) -> None:
        """See `Codec`."""
        self._ops.unpack_runs(messages, messages.view(torch.float32), self._from_all, out)


def rows_of(
    messages: torch.Tensor, layout: OneBitLayout, count: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales (count x K float32) and signs (count x chunk/8 uint8) in messages (1-D uint8), sharing their
    memory.
    """
    rows = messages.view(layout.world_size if count is None else count, layout.message_bytes)
    cut = layout.signs_at
    return rows[:, :cut].view(torch.float32), rows[:, cut : cut + layout.chunk // BYTE]


def _kernels(device: torch.device, scale: Measure) -> tuple[Any, str]:
    """The module with the kernels, or None and the reason."""
    if scale != "rms":
        return None, f'the kernels of dsx-ops measure scale "rms", this one is "{scale}"'
    try:
        import dsx_ops.sign_runs  # lazy import: optional, and native code is loaded at the first use
    except ImportError as error:
        return None, f"dsx-ops cannot be imported ({error}): in a checkout of dsx, pip install ./packages/dsx-ops"
    reason = dsx_ops.status.missing_kernels(device)
    return (None, f"dsx-ops has no kernels for {device.type} tensors: {reason}") if reason else (dsx_ops.sign_runs, "")


def codec_for(layout: OneBitLayout, rank: int, device: torch.device, scale: Measure) -> Codec:
    """The quickest implementation there is for one rank's part in all-reduces of a layout."""
    kernels, _ = _kernels(device, scale)
    if kernels is None or not layout.chunk:
        return TorchCodec(layout, rank, scale)
    return KernelCodec(layout, rank, device, kernels)


def codec_status(device: torch.device | str = "cpu", scale: Measure = "rms") -> dict[str, Any]:
    """{"native": whether kernels are used on a device, "reason": why not, else ""}."""
    kernels, reason = _kernels(torch.device(device), scale)
    return {"native": kernels is not None, "reason": reason}
