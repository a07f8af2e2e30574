"""Learning rates for batches whose size is not the one for which the rate was chosen."""

from __future__ import annotations

import math

from ..errors import DataArgumentError

__all__ = ["lr_factor"]


def lr_factor(batch_size: int, base_batch_size: int, method: str | None) -> float:
    """The factor by which to multiply the learning rate for an update of `batch_size` samples.

    "linear" is the linear scaling rule (Goyal et al. 2017), "sqrt" the square root rule (Krizhevsky 2014).

    Args:
        batch_size: samples of this update, over all ranks.
        base_batch_size: samples of an update for which the rate was chosen.
        method: "linear": batch_size / base_batch_size; "sqrt": its square root; "none", in any case, or None: 1.

    Raises:
        DataArgumentError: a size is below 1, or the method is unknown.
    """
    if batch_size < 1 or base_batch_size < 1:
        raise DataArgumentError(
            f"lr_factor: got batches of {batch_size} and {base_batch_size} samples, expected at least 1"
        )
    if method is None or method.lower() == "none":
        return 1.0
    share = batch_size / base_batch_size
    if method == "linear":
        return share
    if method == "sqrt":
        return math.sqrt(share)
    raise DataArgumentError(f"lr_scaling_method: got {method!r}, expected 'linear', 'sqrt', 'none' or None")
