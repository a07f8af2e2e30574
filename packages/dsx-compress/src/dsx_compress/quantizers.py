"""Quantisers: they turn a tensor into integer codes with scales, and back; also as a differentiable operation.

A tensor is cut, in memory order, into groups of equal size; each group has a scale s (and a zero point z). With b bits:

    symmetric    s = 2 max|x| / 2^b          code = clamp(round(x / s), -2^(b-1), 2^(b-1) - 1)      value = code s
    asymmetric   s = (max x - min x) / 2^b   z = s round(min x / s)
                                             code = clamp(round((x - z) / s), 0, 2^b - 1)           value = code s + z
    ternary      t = 0.7 mean|x|             code = sign(x) where |x| > t, else 0                   value = code s
                 s = mean of the |x| > t
    binary       s = mean|x|                 code = sign(x)                                         value = code s

Ties go to the even neighbour (torch.round); stochastic rounding takes floor(x / s + u), u uniform in [0, 1). A group
whose scale is 0 keeps its values: all are the same number. Gradients pass through unchanged, also for clamped codes
(straight-through estimator, Bengio et al. 2013). Ternary weights follow Li et al. 2016, binary ones Rastegari
et al. 2016.

Half-precision tensors are computed in fp32 and rounded once at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from .errors import CompressionDataError, CompressionError

__all__ = ["Encoded", "Kind", "Rounding", "decode", "encode", "fake_quantize", "require_finite", "split_groups"]

Kind = Literal["symmetric", "asymmetric"]
Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True)
class Encoded:
    """A quantised tensor.

    Attributes:
        codes: whole numbers in the dtype of the computation (fp32 or fp64), shape (groups, elements of a group).
        scale: shape (groups, 1).
        zero: zero points, shape (groups, 1); None if the values are `codes * scale`.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None


def split_groups(x: torch.Tensor, groups: int) -> torch.Tensor:
    """View `x` as (groups, elements of a group).

    Raises:
        CompressionError: the elements do not divide into that many groups.
    """
    if groups < 1 or x.numel() % groups:
        raise CompressionError(
            f"quantize_groups: got {groups} for a tensor of shape {tuple(x.shape)} with {x.numel()} elements, expected"
            " a divisor of that number"
        )
    return x.reshape(groups, -1)


def encode(
    x: torch.Tensor,
    bits: int,
    groups: int = 1,
    kind: Kind = "symmetric",
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
) -> Encoded:
    """Quantise a tensor. NaN and infinity make their whole group NaN; see `require_finite`.

    Args:
        x: floating-point tensor.
        bits: 1 (binary), 2 (ternary), or 3 to 16.
        groups: number of groups.
        kind: "symmetric" or "asymmetric"; with 1 or 2 bits only "symmetric".
        rounding: "nearest" or "stochastic"; it has no effect with 1 or 2 bits.
        generator: random generator of stochastic rounding; None: torch's default one.

    Raises:
        CompressionError: `bits` is out of range, the quantiser is asymmetric with 1 or 2 bits, or `groups` does not
            divide the number of elements.
    """
    if not 1 <= bits <= 16:
        raise CompressionError(f"bits: got {bits}, expected 1 to 16")
    if bits <= 2 and kind == "asymmetric":
        raise CompressionError(f"bits: got {bits} asymmetric, expected 3 or more; binary and ternary are symmetric")
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    rows = split_groups(wide, groups)
    if bits == 1:
        return Encoded(rows.sign(), rows.abs().mean(1, keepdim=True), None)
    if bits == 2:
        return _ternary(rows)
    if kind == "symmetric":
        scale = 2.0 * torch.linalg.vector_norm(rows, float("inf"), dim=1, keepdim=True) / 2**bits
        codes = _rounded(rows / _divisor(scale), rounding, generator)
        return Encoded(codes.clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1), scale, None)
    low, high = torch.aminmax(rows, dim=1, keepdim=True)
    scale = (high - low) / 2**bits
    zero = torch.where(scale == 0, low, torch.round(low / _divisor(scale)) * scale)
    codes = _rounded((rows - zero) / _divisor(scale), rounding, generator)
    return Encoded(codes.clamp_(0, 2**bits - 1), scale, zero)


def _ternary(rows: torch.Tensor) -> Encoded:
    size = rows.abs()
    above = size > 0.7 * size.mean(1, keepdim=True)
    count = above.sum(1, keepdim=True).clamp(min=1)
    return Encoded(rows.sign() * above, (size * above).sum(1, keepdim=True) / count, None)


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    """The scale, with 1 instead of 0. A group of equal numbers then has the codes 0, and its value is in `zero`."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _rounded(x: torch.Tensor, rounding: Rounding, generator: torch.Generator | None) -> torch.Tensor:
    """Round `x` in place. Callers pass a temporary tensor."""
    if rounding == "nearest":
        return x.round_()
    return x.add_(torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=generator)).floor_()


def decode(encoded: Encoded) -> torch.Tensor:
    """The values of a quantised tensor, shape (groups, elements of a group)."""
    values = encoded.codes * encoded.scale
    return values if encoded.zero is None else values + encoded.zero


class _StraightThrough(torch.autograd.Function):
    """Returns quantised values in forward and the unchanged gradient in backward. It can be differentiated twice."""

    @staticmethod
    def forward(x: torch.Tensor, bits: int, groups: int, kind: Kind, rounding: Rounding) -> torch.Tensor:
        return decode(encode(x, bits, groups, kind, rounding)).view(x.shape).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return gradients[0], None, None, None, None


def fake_quantize(
    x: torch.Tensor, bits: int, groups: int = 1, kind: Kind = "symmetric", rounding: Rounding = "nearest"
) -> torch.Tensor:
    """Quantise a tensor and restore it; the gradient passes through unchanged.

    Args:
        x: floating-point tensor of any shape.
        bits: bits of each element, 1 to 16.
        groups: number of equal parts of the flattened tensor; each has its own scale.
        kind: "symmetric" or "asymmetric".
        rounding: "nearest" or "stochastic".

    Returns:
        The values of the quantiser, in the shape and dtype of `x`.

    Raises:
        CompressionError: as `encode`.
    """
    return _StraightThrough.apply(x, bits, groups, kind, rounding)  # pyright: ignore[reportReturnType]


def require_finite(x: torch.Tensor, name: str) -> None:
    """Check a tensor before work that is done only once (masks, export, calibration).

    Args:
        name: name of the tensor in the message.

    Raises:
        CompressionDataError: the tensor has NaN or infinity. The message has their counts.
    """
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        nans = int(torch.isnan(x).sum())
        raise CompressionDataError(
            f"{name}: got {nans} NaN and {x.numel() - int(finite.sum()) - nans} infinite of {x.numel()} values,"
            " expected finite ones; restore an earlier checkpoint"
        )
