"""Optimizers that take sparse gradients (rows) as they are; all others get dense ones.

Some optimizers do not change a row without a gradient (plain SGD, Adagrad). They give the same values for sparse and
dense gradients, and sparse ones cost less. With momentum or weight decay every row changes, so that the gradient is
made dense.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ..errors import ZeroOptimizerError

__all__ = ["check_dense_gradients", "needs_rows", "takes_rows"]


def needs_rows(optimizer: Any) -> bool:
    """Does the optimizer refuse dense gradients?"""
    return isinstance(optimizer, torch.optim.SparseAdam)


def takes_rows(optimizer: Any, group: dict[str, Any]) -> bool:
    """Does the optimizer take sparse gradients of the parameters in this group? A user's optimizer says so with the
    attribute `takes_sparse_gradients`.
    """
    said = getattr(optimizer, "takes_sparse_gradients", None)
    if said is not None:
        return bool(said)
    if needs_rows(optimizer):
        return True
    if group.get("weight_decay") or group.get("fused") or group.get("differentiable"):
        return False
    if type(optimizer) is torch.optim.SGD:
        return not group.get("momentum")
    return type(optimizer) is torch.optim.Adagrad


def check_dense_gradients(optimizer: Any, names: dict[int, str], sparse: Collection[str]) -> None:
    """Refuse an optimizer that takes only sparse gradients if some of its parameters have dense ones.

    Args:
        names: the names of the model's parameters, by `id`.
        sparse: the names of the parameters whose gradients are rows.

    Raises:
        ZeroOptimizerError: names the first parameter with dense gradients.
    """
    if not needs_rows(optimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter), "?")
            if name not in sparse:
                raise ZeroOptimizerError(
                    f"{name}: its gradients are dense, and {type(optimizer).__name__} takes sparse ones only; give it"
                    " the weights of nn.Embedding(sparse=True) and nn.EmbeddingBag(sparse=True) alone, and set"
                    " sparse_gradients to true"
                )
