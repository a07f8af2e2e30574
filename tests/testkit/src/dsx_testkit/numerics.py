"""Seeds and the comparison of two sets of named tensors."""

import random
from collections.abc import Mapping

import torch


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's (if it is there) and torch's generators, CUDA included."""
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed % 2**32)


def assert_close_named(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Compare two mappings of tensors and name the first one (in the order of `expected`) that differs.

    Differing key sets, shapes and dtypes fail too; NaN equals NaN. The message gives the index of the largest error.
    """
    missing, extra = [k for k in expected if k not in actual], [k for k in actual if k not in expected]
    if missing or extra:
        raise AssertionError(f"names differ: missing {missing}, unexpected {extra}")
    for name, want in expected.items():
        got = actual[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            raise AssertionError(
                f"{name!r}: got {tuple(got.shape)} {got.dtype}, expected {tuple(want.shape)} {want.dtype}"
            )
        got64, want64 = (t.detach().cpu().to(torch.float64) for t in (got, want))
        bad = ~torch.isclose(got64, want64, rtol=rtol, atol=atol, equal_nan=True)
        if bad.any():
            raise AssertionError(_difference(name, got64, want64, bad, rtol, atol))


def _difference(name: str, got: torch.Tensor, want: torch.Tensor, bad: torch.Tensor, rtol: float, atol: float) -> str:
    error = torch.where(bad, (got - want).abs(), 0.0).nan_to_num(nan=float("inf"), posinf=float("inf"))
    flat = int(error.flatten().argmax())
    index, rest = [], flat
    for size in reversed(got.shape):
        index.append(rest % size)
        rest //= size
    return (
        f"{name!r} is the first tensor that differs: {int(bad.sum())} of {bad.numel()} elements beyond rtol={rtol:g}, "
        f"atol={atol:g}; worst at {tuple(reversed(index))}: got {got.flatten()[flat].item():.9g}, "
        f"expected {want.flatten()[flat].item():.9g}"
    )
