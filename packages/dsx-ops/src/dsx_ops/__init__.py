"""Fused optimizers and kernels for PyTorch, on CPU and CUDA.

    import dsx_ops
    optimizer = dsx_ops.FusedAdam(model.parameters(), lr=3e-4, weight_decay=0.1)
    loss.backward()
    optimizer.step(grad_scale=1024.0)

The optimizers are ordinary `torch.optim.Optimizer`s. `python -m dsx_ops` reports what is built and what runs.
"""

from . import onebit, sign_runs
from ._version import __version__
from .codes.exchange import (
    LocoQuantizer,
    reduce_dequantize,
    reduce_quantize,
    swizzle_quantize,
    unswizzle_dequantize,
)
from .codes.quantize import Quantized, dequantize, dequantize_fp8, ds_quantizer, quantize, quantize_fp8
from .cuda import operators as _cuda_operators  # noqa: F401  registers the kernels for CUDA tensors
from .errors import HyperparameterError, OpsError, TensorError
from .flat import cast_to_byte_tensor, flatten, unflatten
from .functional.dropout import bias_dropout_residual, dropout, dropout_mask
from .functional.gelu import bias_gelu
from .functional.layer_norm import add_layer_norm, layer_norm
from .functional.softmax import masked_softmax
from .gradients import CheckOverflow, clip_grad_norm_, get_global_norm, get_grad_zeros, get_weight_norm
from .native import reference_only
from .optim.adam import CPUAdam, FusedAdam
from .optim.coded import Adam4bit, Adam8bit
from .optim.lamb import FusedLamb
from .optim.muon import Muon, orthogonalize
from .optim.simple import SGD, CPUAdagrad, CPULion, FusedLion
from .status import missing_kernels, native_status
from .tokens import (
    mask_gather_bert,
    mask_gather_gpt,
    token_gather,
    token_scatter,
    token_scatter_,
    token_sort_,
)
from .transformer.bert import config_from_bert, copy_from_bert, copy_to_bert
from .transformer.config import TransformerConfig
from .transformer.layer import TransformerLayer
from .update import Norm, norm, scale_, squared_norms

# The names under which existing scripts know them.
DeepSpeedCPUAdam = CPUAdam
DeepSpeedCPUAdagrad = CPUAdagrad
DeepSpeedCPULion = CPULion
DeepSpeedTransformerConfig = TransformerConfig
DeepSpeedTransformerLayer = TransformerLayer

__all__ = [
    "Adam4bit",
    "Adam8bit",
    "CPUAdagrad",
    "CPUAdam",
    "CPULion",
    "CheckOverflow",
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPULion",
    "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "HyperparameterError",
    "LocoQuantizer",
    "Muon",
    "Norm",
    "OpsError",
    "Quantized",
    "SGD",
    "TensorError",
    "TransformerConfig",
    "TransformerLayer",
    "__version__",
    "add_layer_norm",
    "bias_dropout_residual",
    "bias_gelu",
    "cast_to_byte_tensor",
    "clip_grad_norm_",
    "config_from_bert",
    "copy_from_bert",
    "copy_to_bert",
    "dequantize",
    "dequantize_fp8",
    "dropout",
    "dropout_mask",
    "ds_quantizer",
    "flatten",
    "get_global_norm",
    "get_grad_zeros",
    "get_weight_norm",
    "layer_norm",
    "mask_gather_bert",
    "mask_gather_gpt",
    "masked_softmax",
    "missing_kernels",
    "native_status",
    "norm",
    "onebit",
    "orthogonalize",
    "quantize",
    "quantize_fp8",
    "reduce_dequantize",
    "reduce_quantize",
    "reference_only",
    "scale_",
    "sign_runs",
    "squared_norms",
    "swizzle_quantize",
    "token_gather",
    "token_scatter",
    "token_scatter_",
    "token_sort_",
    "unflatten",
    "unswizzle_dequantize",
]
