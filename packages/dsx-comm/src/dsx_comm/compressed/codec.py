"""Compressing and decompressing one range of a flat buffer: everything (the worker) or a chunk (the server).

Two implementations with the same results up to the last bit of a scale: plain torch on lists of runs, and the kernels of
`dsx_ops`, which read and write every element once. `dsx_ops` is optional and looked for at the first use; `codec_status`
says what is used and why.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from . import signs
from .layout import BYTE, Range, Run
from .signs import Measure


class Codec(Protocol):
    """What the all-reduce needs. Buffers are float32, of the elements of `where`; their gaps are zero and stay so."""

    def compress(self, values: torch.Tensor, error: torch.Tensor, where: Range, bits: torch.Tensor) -> torch.Tensor:
        """bits (uint8) = signs of x = values + error; error = x - scale sign(x). Returns the scales of the runs.

        What is left in `values` has no meaning.
        """
        ...

    def mean(self, bits: torch.Tensor, scales: torch.Tensor, where: Range, out: torch.Tensor) -> None:
        """out = mean over the rows of scale * sign; one row of bits and scales per rank, added in their order."""
        ...

    def decompress(self, bits: torch.Tensor, scales: torch.Tensor, where: Range, out: torch.Tensor) -> None:
        """out = scale * sign; there may be more scales than runs."""
        ...


class TorchCodec:
    """In plain torch."""

    def __init__(self, scale: Measure) -> None:
        self._scale: Measure = scale

    def compress(self, values: torch.Tensor, error: torch.Tensor, where: Range, bits: torch.Tensor) -> torch.Tensor:
        """See `Codec`."""
        values.add_(error)
        scales = signs.measure_runs(where.views(values), self._scale)
        signs.pack(values, bits)
        signs.unpack(bits, error)
        signs.scale_runs(where.views(error), -scales)
        error.add_(values)
        where.clear_gaps(error)
        return scales

    def mean(self, bits: torch.Tensor, scales: torch.Tensor, where: Range, out: torch.Tensor) -> None:
        """See `Codec`."""
        part = torch.empty_like(out)
        out.zero_()
        for row, factors in zip(bits, scales):
            self.decompress(row, factors, where, part)
            out.add_(part)
        out.div_(bits.shape[0])

    def decompress(self, bits: torch.Tensor, scales: torch.Tensor, where: Range, out: torch.Tensor) -> None:
        """See `Codec`."""
        signs.unpack(bits, out)
        signs.scale_runs(where.views(out), scales)
        where.clear_gaps(out)


class KernelCodec:
    """By the kernels of `dsx_ops.onebit`, run by run; rms scales only."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def compress(self, values: torch.Tensor, error: torch.Tensor, where: Range, bits: torch.Tensor) -> torch.Tensor:
        """See `Codec`."""
        scales = torch.empty(len(where.runs), device=values.device)
        pairs = zip(where.runs, where.views(values), where.views(error))
        for place, (run, x, kept) in enumerate(pairs):
            packed, scale = self._kernels.compress_with_feedback(x, kept)
            _bytes_of(bits, run, where).copy_(packed)
            scales[place] = scale
        return scales

    def mean(self, bits: torch.Tensor, scales: torch.Tensor, where: Range, out: torch.Tensor) -> None:
        """See `Codec`."""
        for place, (run, target) in enumerate(zip(where.runs, where.views(out))):
            rows = _bytes_of(bits, run, where).contiguous()
            self._kernels.mean_of_signs(rows, scales[:, place].contiguous(), numel=target.numel(), out=target)
        where.clear_gaps(out)

    def decompress(self, bits: torch.Tensor, scales: torch.Tensor, where: Range, out: torch.Tensor) -> None:
        """See `Codec`."""
        for place, (run, target) in enumerate(zip(where.runs, where.views(out))):
            packed = _bytes_of(bits, run, where)
            self._kernels.unpack_signs(packed, scales[place], target.numel(), out=target)
        where.clear_gaps(out)


def _bytes_of(bits: torch.Tensor, run: Run, where: Range) -> torch.Tensor:
    """The bytes of a run in the last dimension of `bits`; runs begin at whole bytes."""
    first = (run.start - where.start) // BYTE
    return bits[..., first : first + -(-(run.stop - run.start) // BYTE)]


def _kernels(device: torch.device, scale: Measure) -> tuple[Any, str]:
    """The module with the kernels, or None and the reason."""
    if scale != "rms":
        return None, f'the kernels of dsx-ops measure scale "rms", this one is "{scale}"'
    if device.type != "cpu":
        return None, f"the kernels of dsx-ops are used for host tensors, these are on {device.type}"
    try:
        import dsx_ops.onebit as kernels  # late: optional, and native code is loaded at the first use
    except ImportError as error:
        return None, f"dsx-ops with 1-bit kernels cannot be imported ({error}): pip install dsx-ops"
    import dsx_ops

    status = dsx_ops.native_status()
    return (kernels, "") if status["native"] else (None, f"dsx-ops runs without native code: {status['reason']}")


def codec_for(device: torch.device, scale: Measure) -> Codec:
    """The quickest implementation there is."""
    kernels, _ = _kernels(device, scale)
    return TorchCodec(scale) if kernels is None else KernelCodec(kernels)


def codec_status(device: torch.device | str = "cpu", scale: Measure = "rms") -> dict[str, Any]:
    """{"native": whether kernels are used, "reason": why not, else ""}."""
    kernels, reason = _kernels(torch.device(device), scale)
    return {"native": kernels is not None, "reason": reason}
