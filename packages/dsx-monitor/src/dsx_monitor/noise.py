"""The gradient noise scale: the batch size above which averaging more samples helps little.

Let G be the true gradient and S the covariance of the gradient of one sample. A gradient over B samples has on average
|G_B|^2 = |G|^2 + tr(S)/B. Two batch sizes measured in the same step give both unknowns (McCandlish et al. 2018, "An
Empirical Model of Large-Batch Training", appendix A.1); the ratio tr(S)/|G|^2 is the noise scale. The small batch is
that of one backward on one rank, the big batch that of the whole step. Each estimate is noisy, so numerator and
denominator are smoothed separately.

`GradientNoise` is arithmetic; `GradientSquares` measures the small batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["GradientNoise", "GradientSquares"]


class GradientNoise:
    """Smooths the two estimates.

    Args:
        small_batch, big_batch: samples of the two gradients; `big_batch` is the larger.
        memory: roughly the number of past steps in the means.

    Raises:
        ValueError: the batches do not differ in size.
    """

    def __init__(self, small_batch: int, big_batch: int, memory: int = 100) -> None:
        if not 0 < small_batch < big_batch or memory < 1:
            raise ValueError(
                f"GradientNoise: got small_batch={small_batch}, big_batch={big_batch}, memory={memory}, "
                "expected a step of more samples than one backward has: use several ranks or gradient accumulation"
            )
        self._small, self._big, self._keep = small_batch, big_batch, 1.0 - 1.0 / memory
        self._noise = self._signal = self._weight = 0.0

    def update(self, small_square: float, big_square: float) -> None:
        """Add a step: squared norms of the small batches' gradients (their mean) and of the whole step's."""
        small, big = self._small, self._big
        signal = (big * big_square - small * small_square) / (big - small)
        noise = (small_square - big_square) / (1.0 / small - 1.0 / big)
        self._signal = self._keep * self._signal + (1.0 - self._keep) * signal
        self._noise = self._keep * self._noise + (1.0 - self._keep) * noise
        self._weight = self._keep * self._weight + (1.0 - self._keep)

    @property
    def scale(self) -> float | None:
        """tr(S) / |G|^2 in samples; None while the estimate of |G|^2 is not positive."""
        return self._noise / self._signal if self._weight and self._signal > 0.0 else None


class GradientSquares:
    """Sums the squared norm of each gradient from a backward, before it is added to earlier ones or reduced.

    Args:
        parameters: the trainable parameters, not partitioned.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        self._sum: Any = None
        self._paused = False
        self._handles = [p.register_hook(self._add) for p in parameters if p.requires_grad]

    def _add(self, gradient: Any) -> None:
        if self._paused:
            return
        import torch  # lazy import: the arithmetic above works without it

        square = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32) ** 2
        self._sum = square if self._sum is None else self._sum + square

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backwards inside the context do not count."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def take(self) -> float:
        """The sum over all backwards since the last call; waits for the device."""
        value, self._sum = self._sum, None
        return 0.0 if value is None else float(value)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
