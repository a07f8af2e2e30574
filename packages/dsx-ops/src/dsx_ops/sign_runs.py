"""One bit per element for many runs of one flat buffer at a time: what `onebit` does to one tensor, in one call for all
parameters.

A *run* is a range of a flat fp32 buffer with a scale of its own (one parameter, say). Its signs may go to several
places of what is sent (the messages to several ranks): each such *stretch* names its elements and the byte at which its
signs begin.

    runs = SignRuns([[(0, 40, 4)], [(40, 64, 9), (64, 100, 24)]], device)
    compress_runs(x, error, runs, bits, scales)          # t = x + error; scales[r] = |t|_2 / sqrt(n); error = t - scale
    sign(t) mean_of_runs(bits, scales, runs, out, ranks=P, ...)  # out = mean over P messages of scale sign
    unpack_runs(bits, scales, runs, out)                 # out = scale sign

The scale, signs and order of sums are those of `onebit`; runs are cut into pieces of 16384 elements for threads and
blocks. Elements and bytes of no stretch are neither read nor written. The table of pieces is made once, on the device
of the buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import library, native
from .checks import check
from .errors import TensorError
from .onebit import reference_mean_of_signs, reference_pack_signs, reference_unpack_signs

PIECE = 1 << 14  # SIGN_PIECE of native/include/dsx_ops/kernels.h
OCTET = 8  # elements of a byte


class Stretch(NamedTuple):
    """Elements [begin, end) of the flat buffer, `begin` a multiple of 8; the byte at which their signs begin; the index
    of their scale.
    """

    begin: int
    end: int
    byte: int
    scale: int | None = None


class SignRuns:
    """The places of runs, their signs and their scales; immutable.

    Args:
        runs: for each run its stretches, as `Stretch` or tuples (begin, end, byte[, scale]). Without a scale the run's
            number counts; `compress_runs` writes scales by that number only.
        device: where the buffers are.

    Raises:
        TensorError: an empty run or stretch, or one that does not begin at a multiple of 8.
    """

    def __init__(self, runs: Sequence[Sequence[Any]], device: torch.device | str = "cpu") -> None:
        rows: list[tuple[int, int, int, int]] = []
        first = [0]
        self.in_order = True
        for number, run in enumerate(runs):
            for stretch in (Stretch(*s) for s in run):
                if stretch.begin % OCTET or not 0 <= stretch.begin < stretch.end or stretch.byte < 0:
                    raise TensorError(
                        f"run {number}: got {stretch}, expected a range that is not empty and begins at a multiple of 8"
                    )
                scale = number if stretch.scale is None else stretch.scale
                self.in_order = self.in_order and scale == number
                rows.extend(_pieces(stretch, scale))
            if len(rows) == first[-1]:
                raise TensorError(f"run {number}: got no stretch, expected at least one")
            first.append(len(rows))
        self.elements = max((row[1] for row in rows), default=0)
        self.bytes = max((row[2] + -(-(row[1] - row[0]) // OCTET) for row in rows), default=0)
        self.scales = max((row[3] + 1 for row in rows), default=0)
        self.pieces = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 4)
        self.first = torch.tensor(first, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        """Number of runs."""
        return self.first.numel() - 1


def _pieces(stretch: Stretch, scale: int) -> Iterator[tuple[int, int, int, int]]:
    for begin in range(stretch.begin, stretch.end, PIECE):
        yield begin, min(begin + PIECE, stretch.end), stretch.byte + (begin - stretch.begin) // OCTET, scale


def compress_runs(x: Tensor, error: Tensor, runs: SignRuns, bits: Tensor, scales: Tensor) -> None:
    """For each run: t = x + error, its scale, the signs of t into `bits`, and what they leave out into `error`.

    Args:
        x: fp32 [n], unchanged.
        error: fp32 [n], changed.
        runs: every scale by its run's number.
        bits: uint8, receives the signs; `scales`: fp32 [runs or more], receives the scales.

    Raises:
        TensorError: a tensor does not fit, or is too short; then nothing is written.
    """
    if not runs.in_order:
        raise TensorError("compress_runs: got runs with scales at places of their own, expected scale r for run r")
    _check(runs, x=x, error=error, bits=bits, scales=scales)
    torch.ops.dsx_ops.compress_sign_runs(x, error, runs.pieces, runs.first, bits, scales)


def unpack_runs(bits: Tensor, scales: Tensor, runs: SignRuns, out: Tensor) -> None:
    """out (fp32 [n]) = +scale for set bits, -scale for others, in every run. Raises `TensorError`; then nothing is
    written.
    """
    _check(runs, out=out, bits=bits, scales=scales)
    torch.ops.dsx_ops.unpack_sign_runs(bits, scales, runs.pieces, out)


def mean_of_runs(
    bits: Tensor, scales: Tensor, runs: SignRuns, out: Tensor, *, ranks: int, bit_stride: int, scale_stride: int
) -> None:
    """out (fp32 [n]) = (1/ranks) sum over the ranks' messages, in their order, of scale * sign, in every run.

    Args:
        bits, scales: all messages; rank r's bits begin r `bit_stride` bytes further, its scales r `scale_stride`
            numbers further.
        runs: places in rank 0's message.

    Raises:
        TensorError: a tensor does not fit, or is too short; then nothing is written.
    """
    if ranks < 1 or bit_stride < 0 or scale_stride < 0:
        raise TensorError(
            f"mean_of_runs: got {ranks} ranks, strides {bit_stride} and {scale_stride}, expected at least one rank"
        )
    further = ranks - 1
    _check(runs, out=out, bits=bits, scales=scales, more_bytes=further * bit_stride, more_scales=further * scale_stride)
    torch.ops.dsx_ops.mean_of_sign_runs(bits, scales, runs.pieces, ranks, bit_stride, scale_stride, out)


def _check(
    runs: SignRuns, *, bits: Tensor, scales: Tensor, more_bytes: int = 0, more_scales: int = 0, **floats: Tensor
) -> None:
    for role, tensor in floats.items():
        check(tensor, role, dtypes=(torch.float32,), like=bits)
        _check_length(role, tensor, runs.elements, "elements")
    check(bits, "bits", dtypes=(torch.uint8,), like=runs.pieces)
    check(scales, "scales", dtypes=(torch.float32,), like=bits)
    _check_length("bits", bits, runs.bytes + more_bytes, "bytes")
    _check_length("scales", scales, runs.scales + more_scales, "scales")


def _check_length(role: str, tensor: Tensor, needed: int, what: str) -> None:
    if tensor.numel() < needed:
        raise TensorError(f"{role}: got {tensor.numel()} {what}, expected at least {needed}")


# ---- reference
# ----------------------------------------------------------------------------------------------------------


def _rows(pieces: Tensor) -> list[tuple[int, int, int, int]]:
    return [tuple(row) for row in pieces.tolist()]  # type: ignore[misc]


def reference_compress_runs(
    x: Tensor, error: Tensor, pieces: Tensor, first: Tensor, bits: Tensor, scales: Tensor
) -> None:
    """`compress_runs` in plain PyTorch, run by run."""
    rows, starts = _rows(pieces), first.tolist()
    for run, (low, high) in enumerate(pairwise(starts)):
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for a, b, _, _ in rows[low:high]:
            total += (x[a:b] + error[a:b]).double().square_().sum()
        scales[run] = scale = (total / sum(b - a for a, b, _, _ in rows[low:high])).sqrt().float()
        for a, b, byte, _ in rows[low:high]:
            t = x[a:b] + error[a:b]
            packed = reference_pack_signs(t)
            bits[byte : byte + packed.numel()] = packed
            error[a:b] = t - torch.where(t >= 0, scale, -scale)


def reference_unpack_runs(bits: Tensor, scales: Tensor, pieces: Tensor, out: Tensor) -> None:
    """`unpack_runs` in plain PyTorch, piece by piece."""
    for a, b, byte, scale in _rows(pieces):
        packed = bits[byte : byte + -(-(b - a) // OCTET)]
        out[a:b] = reference_unpack_signs(packed, scales[scale], b - a, torch.float32)


def reference_mean_of_runs(
    bits: Tensor, scales: Tensor, pieces: Tensor, ranks: int, bit_stride: int, scale_stride: int, out: Tensor
) -> None:
    """`mean_of_runs` in plain PyTorch, piece by piece."""
    for a, b, byte, scale in _rows(pieces):
        starts = [byte + r * bit_stride for r in range(ranks)]
        packed = torch.stack([bits[s : s + -(-(b - a) // OCTET)] for s in starts])
        of_ranks = torch.stack([scales[scale + r * scale_stride] for r in range(ranks)])
        out[a:b] = reference_mean_of_signs(packed, of_ranks, b - a)


# ---- operators
# ----------------------------------------------------------------------------------------------------------


def _run_compress(x: Tensor, error: Tensor, pieces: Tensor, first: Tensor, bits: Tensor, scales: Tensor) -> None:
    module = native.module_for(x, "compress_runs")
    if module is None:
        return reference_compress_runs(x, error, pieces, first, bits, scales)
    addresses = [t.data_ptr() for t in (x, error, bits, scales)]
    table = pieces.data_ptr(), pieces.shape[0], first.data_ptr(), first.numel() - 1
    module.compress_sign_runs(*table, addresses, native.threads())


def _run_unpack(bits: Tensor, scales: Tensor, pieces: Tensor, out: Tensor) -> None:
    module = native.module_for(out, "unpack_runs")
    if module is None:
        return reference_unpack_runs(bits, scales, pieces, out)
    addresses = bits.data_ptr(), scales.data_ptr(), out.data_ptr()
    module.unpack_sign_runs(pieces.data_ptr(), pieces.shape[0], *addresses, native.threads())


def _run_mean(
    bits: Tensor, scales: Tensor, pieces: Tensor, ranks: int, bit_stride: int, scale_stride: int, out: Tensor
) -> None:
    module = native.module_for(out, "mean_of_runs", ranks * out.numel())
    if module is None:
        return reference_mean_of_runs(bits, scales, pieces, ranks, bit_stride, scale_stride, out)
    strides, target = [bit_stride, scale_stride], (ranks, out.data_ptr())
    table = pieces.data_ptr(), pieces.shape[0]
    module.mean_of_sign_runs(*table, bits.data_ptr(), scales.data_ptr(), strides, *target, native.threads())


def _fake(*_: Any) -> None:
    """Nothing is made."""


library.operator(
    "compress_sign_runs(Tensor x, Tensor(a!) error, Tensor pieces, Tensor first, Tensor(b!) bits, "
    "Tensor(c!) scales) -> ()",
    _run_compress,
    _fake,
)
library.operator(
    "unpack_sign_runs(Tensor bits, Tensor scales, Tensor pieces, Tensor(a!) out) -> ()",
    _run_unpack,
    _fake,
)
library.operator(
    "mean_of_sign_runs(Tensor bits, Tensor scales, Tensor pieces, int ranks, int bit_stride, int scale_stride, "
    "Tensor(a!) out) -> ()",
    _run_mean,
    _fake,
)
