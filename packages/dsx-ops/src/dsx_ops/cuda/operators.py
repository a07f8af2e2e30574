"""Gives the operators `torch.ops.dsx_ops.*` their kernels for CUDA tensors.

Without the compiled module, and for what a kernel does not take, the operator's PyTorch reference runs on the device
instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import library, onebit, sign_runs
from .. import tokens as token_functions
from ..codes import exchange, quantize
from ..functional import dropout as drop
from ..functional import gelu, layer_norm, softmax
from . import codes, loader, rows, tokens


@dataclass(frozen=True)
class Kernel:
    """A kernel and what runs where it cannot: `run` returns None for arguments it does not take.

    Operators without a result (`void`) report True. Kernels compute in fp32 and leave float64 to the fallback, unless
    they only move bytes (`any_dtype`).
    """

    run: Callable[..., Any]
    fallback: Callable[..., Any]
    void: bool = False
    any_dtype: bool = False

    def __call__(self, *arguments: Any) -> Any:
        in_fp32 = self.any_dtype or arguments[0].dtype is not torch.float64
        module = loader.module() if in_fp32 else None
        found = None if module is None else self.run(module, *arguments)
        if found is None:
            return self.fallback(*arguments)
        return None if self.void else found


KERNELS = {
    "layer_norm": Kernel(rows.run_layer_norm, layer_norm._run_layer_norm),
    "add_layer_norm": Kernel(rows.run_add_layer_norm, layer_norm._run_add_layer_norm),
    "layer_norm_backward": Kernel(rows.run_layer_norm_backward, layer_norm._run_backward),
    "bias_gelu": Kernel(rows.run_bias_gelu, gelu._run),
    "bias_gelu_backward": Kernel(rows.run_bias_gelu_backward, gelu._run_backward),
    "dropout": Kernel(rows.run_dropout, drop._run_dropout),
    "bias_dropout_residual": Kernel(rows.run_bias_dropout_residual, drop._run_residual),
    "bias_grad": Kernel(rows.run_bias_grad, drop._run_bias_grad),
    "masked_softmax": Kernel(rows.run_masked_softmax, softmax._run),
    "softmax_backward": Kernel(rows.run_softmax_backward, softmax._run_backward),
    "quantize": Kernel(codes.run_quantize, quantize._run_quantize),
    "quantize_out": Kernel(codes.run_quantize_out, quantize._run_quantize_out, void=True),
    "dequantize": Kernel(codes.run_dequantize, quantize._run_dequantize),
    "dequantize_out": Kernel(codes.run_dequantize_out, quantize._run_dequantize_out, void=True),
    "reduce_codes": Kernel(codes.run_reduce, exchange._run_reduce, void=True),
    "requantize": Kernel(codes.run_requantize, exchange._run_requantize),
    "pack_signs": Kernel(codes.run_pack_signs, onebit._run_pack),
    "unpack_signs": Kernel(codes.run_unpack_signs, onebit._run_unpack),
    "unpack_signs_out": Kernel(codes.run_unpack_signs_out, onebit._run_unpack_out, void=True),
    "compress_signs": Kernel(codes.run_compress_signs, onebit._run_compress),
    "mean_of_signs": Kernel(codes.run_mean_of_signs, onebit._run_mean, void=True),
    "compress_sign_runs": Kernel(codes.run_compress_sign_runs, sign_runs._run_compress, void=True),
    "unpack_sign_runs": Kernel(codes.run_unpack_sign_runs, sign_runs._run_unpack, void=True),
    "mean_of_sign_runs": Kernel(codes.run_mean_of_sign_runs, sign_runs._run_mean, void=True),
    "token_gather": Kernel(tokens.run_token_gather, token_functions._run_gather, any_dtype=True),
    "token_scatter": Kernel(tokens.run_token_scatter, token_functions._run_scatter, any_dtype=True),
    "token_scatter_": Kernel(tokens.run_token_scatter_, token_functions._run_scatter_, void=True, any_dtype=True),
}

for _name, _kernel in KERNELS.items():
    library.implement(_name, "CUDA", _kernel)
