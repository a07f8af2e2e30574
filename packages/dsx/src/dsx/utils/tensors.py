"""Small tools for tensors in training scripts: copies that are safe to save, moves of nested structures, seeds."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["clone_tensors_for_torch_save", "move_to_device", "set_random_seed"]


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """`item` with a copy of each tensor that has its own memory.

    `torch.save` writes the whole storage of a tensor, and parameters of a sharded model are views of large storages.

    Args:
        item: a tensor, or lists, tuples and dictionaries of them; other objects are kept.
        device: the device of the copies.
    """
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to(device, copy=True).contiguous(), item)


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """`item` with its tensors on `device`; tensors that are there already are not copied.

    Args:
        item: a tensor, or lists, tuples and dictionaries of them.
        device: the target device.
        criterion_func: only tensors for which it is true are moved.
    """
    return tree_map_only(
        torch.Tensor, lambda t: t.to(device) if criterion_func is None or criterion_func(t) else t, item
    )


def set_random_seed(seed: int) -> None:
    """Seed Python's, torch's and (where it is loaded) numpy's global random numbers."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)
