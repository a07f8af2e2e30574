"""Rules for operators outside of the common layers: bilinear forms, distances, Fourier transforms, sparse products.

As in `rules`: a rule takes the arguments and the result of an operator and returns (flops, macs); a distance costs the
same whichever algorithm finds it. Counts of complex numbers are counts of real operations.
"""

from __future__ import annotations

from math import log2, prod
from typing import Any

__all__ = ["SPECIAL_RULES"]

Cost = tuple[int, int]


def _trilinear(args: tuple[Any, ...], out: Any) -> Cost:
    """The sum over `summed` of i1 * i2 * i3 (`nn.Bilinear` and its gradients), in two products as PyTorch does it.

    Each factor lacks some dimensions (`expand`) and has size 1 there. First i1 and i2 are multiplied and summed over
    the dimensions that i3 does not have; then the result is multiplied with i3 and summed over the rest.
    """
    i1, i2, i3, expand1, expand2, expand3, summed = args[:7]
    sizes = [_expanded(tensor.shape, places) for tensor, places in ((i1, expand1), (i2, expand2), (i3, expand3))]
    first = [max(a, b) for a, b in zip(sizes[0], sizes[1])]
    between = [1 if place in summed and place in expand3 else size for place, size in enumerate(first)]
    second = [max(a, b) for a, b in zip(between, sizes[2])]
    macs = prod(first) + prod(second)
    return 2 * macs, macs


def _expanded(shape: Any, places: Any) -> list[int]:
    """The shape with ones at `places`."""
    sizes = list(shape)
    for place in sorted(places):
        sizes.insert(place, 1)
    return sizes


def _distances(args: tuple[Any, ...], out: Any) -> Cost:
    """All distances between rows of x1 and x2: a difference, a power and a sum per coordinate, and a root."""
    (power,) = args[2:3] or (2.0,)
    return _pairs(out.numel(), args[0].shape[-1], power)


def _own_distances(args: tuple[Any, ...], out: Any) -> Cost:
    (power,) = args[1:2] or (2.0,)
    return _pairs(out.numel(), args[0].shape[-1], power)


def _pairs(pairs: int, width: int, power: float) -> Cost:
    return pairs * (3 * width + 1), pairs * width if power == 2 else 0


def _distances_backward(args: tuple[Any, ...], out: Any) -> Cost:
    """The gradient of one of the two sides: per pair and coordinate a difference, a factor and a sum."""
    return 3 * args[0].numel() * args[1].shape[-1], 0


def _own_distances_backward(args: tuple[Any, ...], out: Any) -> Cost:
    """Like `_distances_backward`, but added to one row of each pair and subtracted from the other."""
    return 4 * args[0].numel() * args[1].shape[-1], 0


def _distance(args: tuple[Any, ...], out: Any) -> Cost:
    return 3 * args[0].numel() + 1, 0


def _complex_fourier(args: tuple[Any, ...], out: Any) -> Cost:
    """5 n log2 n per transform of n complex numbers, the convention of FFT benchmarks (FFTW's)."""
    return _fourier(5.0, args[0], args[1]), 0


def _fourier_of_reals(args: tuple[Any, ...], out: Any) -> Cost:
    """Half of a complex transform of that length."""
    return _fourier(2.5, args[0], args[1]), 0


def _fourier_to_reals(args: tuple[Any, ...], out: Any) -> Cost:
    return _fourier(2.5, out, args[1]), 0


def _fourier(factor: float, whole: Any, dims: Any) -> int:
    length = prod(whole.shape[dim] for dim in dims)
    return round(factor * whole.numel() * log2(length)) if length > 1 else 0


def _sparse_addmm(args: tuple[Any, ...], out: Any) -> Cost:
    """Every stored element of the sparse matrix multiplies a row of the dense one; then a matrix is added."""
    macs = args[1]._nnz() * args[2].shape[-1]
    return 2 * macs + out.numel(), macs


def _outer_product_added(args: tuple[Any, ...], out: Any) -> Cost:
    return 2 * out.numel(), out.numel()


def _conv_tbc(args: tuple[Any, ...], out: Any) -> Cost:
    """Result (time, batch, out); weight (kernel, in, out)."""
    weight = args[1]
    macs = out.numel() * weight.shape[0] * weight.shape[1]
    return 2 * macs + out.numel(), macs


def _affine_grid(args: tuple[Any, ...], out: Any) -> Cost:
    """The product of every place, extended by a one, with the rows of theta (batch, 2, 3) or (batch, 3, 4)."""
    macs = out.numel() * args[0].shape[-1]
    return 2 * macs, macs


def _cross(args: tuple[Any, ...], out: Any) -> Cost:
    return 3 * out.numel(), 0


def _weight_norm(args: tuple[Any, ...], out: Any) -> Cost:
    """A square and a sum per element for the norms, and a factor."""
    return 3 * args[0].numel(), 0


def _weight_norm_backward(args: tuple[Any, ...], out: Any) -> Cost:
    """Two products and a sum per element for the norms' gradient, two products and a difference for the direction's."""
    return 6 * args[0].numel(), 0


SPECIAL_RULES = {
    "_trilinear": _trilinear,
    "_cdist_forward": _distances,
    "_euclidean_dist": _distances,
    "_cdist_backward": _distances_backward,
    "_pdist_forward": _own_distances,
    "_pdist_backward": _own_distances_backward,
    "dist": _distance,
    "_fft_c2c": _complex_fourier,
    "_fft_r2c": _fourier_of_reals,
    "_fft_c2r": _fourier_to_reals,
    "_sparse_addmm": _sparse_addmm,
    "addr": _outer_product_added,
    "conv_tbc": _conv_tbc,
    "affine_grid_generator": _affine_grid,
    "linalg_cross": _cross,
    "_weight_norm_interface": _weight_norm,
    "_weight_norm_interface_backward": _weight_norm_backward,
}
