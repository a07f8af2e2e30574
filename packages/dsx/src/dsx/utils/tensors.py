"""Small things that training scripts do to tensors: copies that are safe to save, moves of nested structures, seeds."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["clone_tensors_for_torch_save", "move_to_device", "set_random_seed"]


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """`item` with each tensor copied to memory of its own.

    `torch.save` writes the whole storage that a tensor lies in; parameters of a sharded model are views of large ones.

    Args:
        item: a tensor, or lists, tuples and dictionaries of them; everything else is taken over as it is.
        device: where the copies are.
    """
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to(device, copy=True).contiguous(), item)


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """`item` with its tensors on `device`; those that are there already are not copied.

    Args:
        item: a tensor, or lists, tuples and dictionaries of them.
        device: where to.
        criterion_func: moves only the tensors for which it is true.
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
