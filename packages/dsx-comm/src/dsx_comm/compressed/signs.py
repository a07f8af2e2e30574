"""One bit per number: packing signs, measuring scales, and what is left over. The reference in plain torch.

A run of n values x is sent as sign(x) and one scale s. Two scales are known (`Measure`):

    rms   s = ||x||_2 / sqrt(n)   (Seide et al. 2014; 1-bit Adam, arXiv:2102.02888, section 4)
    mean  s = ||x||_1 / n         the s that minimises ||x - s sign(x)||_2 (Karimireddy et al., arXiv:1901.09847)

sign(0) counts as +1, whatever the sign of the zero; NaN as -1, and its scale is NaN, so that it shows. Bits lie in a
byte from the lowest up. `dsx_ops` has kernels for the same; `codec_status` says whether they are in use and, if not,
why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from ..errors import CommArgumentError

Measure = Literal["rms", "mean"]
MEASURES = ("rms", "mean")

# b0 | b1 << 8 | ... | b7 << 56 times this has b0..b7 in its highest byte, and no two terms meet (bits 8i + 56 - 7j
# differ)
_GATHER = sum(1 << (56 - 7 * i) for i in range(8))
_PIECE = 1 << 12  # elements whose norm is taken in float32: over millions that sum would be wrong in the third digit
_BLOCK = 1 << 20  # elements that are unpacked at a time: the 32-bit indices need memory


def check_measure(measure: str) -> Measure:
    """`measure` if it is one of the two.

    Raises:
        CommArgumentError: it is not.
    """
    if measure not in MEASURES:
        raise CommArgumentError(f"scale: got {measure!r}, expected one of {', '.join(MEASURES)}")
    return measure  # type: ignore[return-value]


def pack(values: torch.Tensor, out: torch.Tensor) -> None:
    """out (n/8 uint8) = signs of values (1-D float, contiguous, n a multiple of 8): bit 1 for values >= 0."""
    words = values.ge(0).view(torch.int64)
    out.copy_((words * _GATHER) >> 56)  # the copy keeps the lowest 8 bits


def unpack(bits: torch.Tensor, out: torch.Tensor) -> None:
    """out (n float32, contiguous) = +1 or -1 for every bit of bits (n/8 uint8)."""
    table = _table(out.device)
    rows = out.view(-1, 8)
    for start in range(0, bits.numel(), _BLOCK):
        part = bits[start : start + _BLOCK]
        torch.index_select(table, 0, part.to(torch.int32), out=rows[start : start + _BLOCK])


def _table(device: torch.device) -> torch.Tensor:
    """The eight signs of every byte, 256 x 8."""
    byte = torch.arange(256, device=device).unsqueeze(1)
    return ((byte >> torch.arange(8, device=device)) & 1).to(torch.float32).mul_(2).sub_(1)


def measure_runs(runs: Sequence[torch.Tensor], measure: Measure) -> torch.Tensor:
    """The scale of every run (1-D float32, not empty): a float32 tensor of len(runs) elements."""
    if not runs:
        return torch.empty(0, device="cpu")
    pieces = [piece for run in runs for piece in run.split(_PIECE)]
    order = 2 if measure == "rms" else 1
    norms = torch.stack(torch._foreach_norm(pieces, order)).double()  # pyright: ignore[reportPrivateImportUsage]
    owner = [index for index, run in enumerate(runs) for _ in range(-(-run.numel() // _PIECE))]
    sums = torch.zeros(len(runs), dtype=torch.float64, device=norms.device)
    sums.index_add_(0, torch.tensor(owner, device=norms.device), norms.square() if measure == "rms" else norms)
    sums /= torch.tensor([run.numel() for run in runs], dtype=torch.float64, device=norms.device)
    return (sums.sqrt() if measure == "rms" else sums).to(torch.float32)


def scale_runs(runs: Sequence[torch.Tensor], scales: torch.Tensor) -> None:
    """Multiply every run by its scale, in place; `scales` may be longer than `runs`."""
    if not runs:
        return
    if scales.device.type == "cpu":
        torch._foreach_mul_(list(runs), scales[: len(runs)].tolist())  # pyright: ignore[reportPrivateImportUsage]
    else:  # no waiting for the device
        torch._foreach_mul_(list(runs), list(scales[: len(runs)].unbind()))  # pyright: ignore[reportPrivateImportUsage]
