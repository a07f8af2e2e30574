"""Classifies functions on tensors, for wrapper tensors that have metadata but no values.

`PartitionedParameter` and `ShardedGradient` look up each operation here. Questions for facts are answered from the
wrapper itself, factories get a stand-in, and writes are applied where the values are. Left out: how that is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..torch_names import has_compatible_shallow_copy_type

__all__ = ["FACTORIES", "FACTS", "NOT_WRITES", "is_write", "stand_in"]


def _getters(*names: str) -> set[Callable[..., Any]]:
    return {getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)}


def _methods(*names: str) -> set[Callable[..., Any]]:
    return {getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name)}


FACTS: frozenset[Callable[..., Any]] = frozenset(
    _getters(
        *("shape", "dtype", "device", "layout", "ndim", "is_leaf", "requires_grad", "grad_fn", "names", "itemsize"),
        *("nbytes", "is_cpu", "is_cuda", "is_xpu", "is_mps", "is_meta", "is_mkldnn", "is_sparse", "is_sparse_csr"),
        *("is_quantized", "is_nested", "output_nr", "_version", "_backward_hooks", "grad", "is_ipu", "is_maia"),
        *(
            "is_mtia",
            "is_vulkan",
            "is_hpu",
            "_is_param",
            "_post_accumulate_grad_hooks",
            "retains_grad",
            "_base",
            "grad_dtype",
        ),
    )
    | _methods(
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "element_size", "get_device"),
        *("is_floating_point", "is_complex", "is_signed", "is_inference", "is_conj", "is_neg", "is_same_size"),
        *("__hash__", "__len__", "_is_view", "dim_order", "is_distributed", "storage_offset"),
    )
    | {torch.numel, torch.is_floating_point, torch.is_complex, torch.is_same_size, torch.is_signed, torch.is_inference}
    | {has_compatible_shallow_copy_type}  # asked by `nn.Module.to`
)
"""Functions that only read metadata, which the wrapper itself has."""

FACTORIES: frozenset[Callable[..., Any]] = frozenset(
    _methods("new", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided")
    | {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like}
    | {torch.randint_like, torch.result_type, torch.promote_types, torch.can_cast}
)
"""Functions that make another tensor from the metadata alone."""

NOT_WRITES = frozenset(
    {"detach_", "requires_grad_", "resize_", "resize_as_", "rename_", "set_", "share_memory_", "squeeze_", "unsqueeze_"}
    | {"t_", "transpose_", "swapaxes_", "swapdims_", "as_strided_", "retain_grad", "sparse_resize_", "apply_", "map_"}
)
"""Functions with the name of an in-place function that change no values, or change metadata or storage, which a shard
cannot follow.
"""

_OPERATOR_WRITES = frozenset(
    {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"}
    | {"__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}
)


def is_write(func: Callable[..., Any]) -> bool:
    """Whether a function changes the values of its first argument in place."""
    name = getattr(func, "__name__", "")
    if name in _OPERATOR_WRITES:
        return True
    return name.endswith("_") and not name.endswith("__") and name not in NOT_WRITES


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor with the metadata of a wrapper. It needs the memory of one element."""
    return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
