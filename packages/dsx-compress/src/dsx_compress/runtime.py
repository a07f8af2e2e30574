"""Inference with packed weights: `QuantizedLinear` keeps only codes and scales in memory.

If dsx_ops is installed, products with few rows on the CPU use its int8 and int4 kernels, which read a quarter or an
eighth of the bytes of fp32. In all other cases the dense weight is restored for the duration of the call. Both compute
x (codes * scale + zero)^T + b.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from .errors import CompressionError
from .export import PackedTensor, fit, read_exported
from .layers import class_name, kind_of, recursive_setattr

__all__ = ["QuantizedLinear", "load_quantized"]

_FEW_ROWS = 4
"""Products with at most this many rows use the matrix-vector kernels."""


def _kernels() -> Any:
    """`dsx_ops.quantized_matvec`, or None if dsx_ops is not installed or has no kernel for this machine."""
    try:
        from dsx_ops import quantized_matvec  # optional: this package does not need dsx-ops
    except ImportError:
        return None
    return quantized_matvec if quantized_matvec.available() else None


class QuantizedLinear(nn.Module):
    """A linear layer with a packed weight, for inference.

    Args:
        packed: the weight, (out_features, in_features).
        bias: (out_features,) or None.

    Raises:
        CompressionError: the weight does not have two dimensions.
    """

    codes: torch.Tensor
    scale: torch.Tensor

    def __init__(self, packed: PackedTensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        if len(packed.shape) != 2:
            raise CompressionError(f"QuantizedLinear: got a weight of shape {packed.shape}, expected two dimensions")
        self.out_features, self.in_features = packed.shape
        self.code, self.dtype = packed.code, packed.dtype
        self.register_buffer("codes", packed.codes)
        self.register_buffer("scale", packed.scale)
        self.register_buffer("zero", packed.zero)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self._kernels = _kernels()

    def packed(self) -> PackedTensor:
        """The weight as it is stored: codes, scales and zero points."""
        zero: Any = self.zero
        return PackedTensor(self.code, self.codes, self.scale, zero, (self.out_features, self.in_features), self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `x`, (..., in_features), to (..., out_features)."""
        bias: Any = self.bias
        if self._can_use_kernel(x):
            out = self._kernels.matvec(x.reshape(-1, self.in_features), self.codes, self.scale, self.code)
            out = out.view(*x.shape[:-1], self.out_features)
            return out if bias is None else out + bias
        return nn.functional.linear(x, self.packed().dense().to(x.dtype), bias)

    def _can_use_kernel(self, x: torch.Tensor) -> bool:
        return (
            self._kernels is not None
            and self.zero is None
            and self.code in ("int8", "int4")
            and x.device.type == "cpu"
            and x.dtype == torch.float32
            and self.scale.dtype == torch.float32
            and x.numel() <= _FEW_ROWS * self.in_features
            and self.scale.numel() % self.out_features == 0
            and not (torch.is_grad_enabled() and x.requires_grad)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kernels": None}  # a module object cannot be copied or pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._kernels = _kernels()

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, {self.code}, {self.scale.numel()}"
            " scales"
        )


def load_quantized(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Load a file of `export_model` into an ordinary model, in place; returns the model.

    Quantised linear layers become `QuantizedLinear`. Other quantised weights (embeddings, convolutions) become dense.

    Raises:
        CompressionDataError: the file is damaged, or is another kind of file.
        CompressionError: its names differ from the model's. The model is unchanged then.
    """
    found = read_exported(path)
    state = found.state_dict()
    if set(state) != set(model.state_dict()):
        odd = sorted(set(state) ^ set(model.state_dict()))
        raise CompressionError(
            f"load_quantized: {path} and the model differ in {odd[:5]}; build the model that was exported"
        )
    fit(model, state, found.attributes)
    model.load_state_dict(state)
    for name, packed in found.packed.items():
        owner, _, tensor = name.rpartition(".")
        layer: Any = model.get_submodule(owner)
        kind = kind_of(layer)
        # Only torch's own class is replaced: a subclass may compute something else.
        if tensor == "weight" and kind is not None and kind.name == "Linear" and class_name(layer) == "Linear":
            recursive_setattr(model, owner, QuantizedLinear(packed, layer.bias))
    return model
