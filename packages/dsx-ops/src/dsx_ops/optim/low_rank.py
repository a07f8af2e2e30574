"""The common part of optimizers with states of low rank: the rank of a matrix, and random numbers by their place.

A random matrix must not depend on who makes it: ranks make their parts of one, and a resumed run makes it again. So a
number is a hash of a seed and its index, and there is no generator with a state. The seed is a tensor, because it may
follow from the number of a step that only the device knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import HyperparameterError
from ..reference import noise
from .matrices import check_split

__all__ = ["check_rank", "gaussian", "rank_of"]


def check_rank(group: Mapping[str, Any]) -> None:
    """Raise HyperparameterError if a rank or the seed of a group is out of its range, or columns are split."""
    check_split(group, *(("rank",) if group["rank"] is not None else ()))
    if not 0 < group["rank_fraction"] <= 1:
        raise HyperparameterError(f"rank_fraction: got {group['rank_fraction']}, expected more than 0 and at most 1")
    seed = group["seed"]
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 31:
        raise HyperparameterError(f"seed: got {seed!r}, expected a whole number from 0 to 2^31 - 1")
    if group.get("split_columns", 1) != 1:
        raise HyperparameterError(
            f"split_columns: got {group['split_columns']}, expected 1: states of low rank are of matrices with all"
            " their columns; Muon splits them"
        )


def rank_of(matrix: tuple[int, int], group: Mapping[str, Any]) -> int:
    """r of a matrix of this shape: the group's `rank`, or its `rank_fraction` of the smaller side; at least 1, at most
    that side.
    """
    least = min(matrix)
    wanted = round(group["rank_fraction"] * least) if group["rank"] is None else group["rank"]
    return max(1, min(least, wanted))


def gaussian(seed: Tensor, start: int, stop: int) -> Tensor:
    """Numbers of a standard normal distribution with the indices [start, stop), 1-D in fp32 on the seed's device.

    Args:
        seed: int64, 0-dim, from 0 to 2^31 - 1.
    """
    # Spread, because `noise` would give neighbouring seeds the same numbers in another order.
    first, second = noise((seed * 0x9E3779B9) & 0xFFFFFFFF, start, stop - start, seed.device)
    # Box and Muller, in fp64: functions of one number may have other last bits at other places of a tensor.
    wide = torch.float32 if seed.device.type == "mps" else torch.float64
    radius = ((first >> 8).to(wide) + 1).mul_(2.0**-24).log_().mul_(-2.0).sqrt_()  # of a number that is not 0
    return radius.mul_((second >> 8).to(wide).mul_(2.0**-24 * 2 * math.pi).cos_()).to(torch.float32)
