"""Fused optimizers and kernels for PyTorch, on CPU and CUDA.

    import dsx_ops
    optimizer = dsx_ops.FusedAdam(model.parameters(), lr=3e-4, weight_decay=0.1)
    loss.backward()
    optimizer.step(grad_scale=1024.0)

The optimizers are ordinary `torch.optim.Optimizer`s. `python -m dsx_ops` reports what is built and what runs.
"""

from ._version import __version__
from .codes.quantize import dequantize, dequantize_fp8, ds_quantizer, quantize, quantize_fp8
from .cuda import operators as _cuda_operators  # noqa: F401  registers the kernels for CUDA tensors
from .errors import OpsError
from .flat import cast_to_byte_tensor, flatten, unflatten
from .functional.dropout import bias_dropout_residual, dropout
from .functional.gelu import bias_gelu
from .functional.layer_norm import add_layer_norm, layer_norm
from .functional.softmax import masked_softmax
from .gradients import CheckOverflow, clip_grad_norm_, get_global_norm, get_grad_zeros, get_weight_norm
from .native import reference_only
from .optim.adam import CPUAdam, FusedAdam
from .optim.coded import Adam4bit, Adam8bit
from .optim.lamb import FusedLamb
from .optim.muon import Muon
from .optim.simple import SGD, CPUAdagrad, CPULion, FusedLion
from .status import native_status
from .tokens import mask_gather_bert, mask_gather_gpt, token_gather, token_scatter_, token_sort_
from .transformer.config import TransformerConfig
from .transformer.layer import TransformerLayer
from .update import norm, scale_

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
    "Muon",
    "OpsError",
    "SGD",
    "TransformerConfig",
    "TransformerLayer",
    "__version__",
    "add_layer_norm",
    "bias_dropout_residual",
    "bias_gelu",
    "cast_to_byte_tensor",
    "clip_grad_norm_",
    "dequantize",
    "dequantize_fp8",
    "dropout",
    "ds_quantizer",
    "flatten",
    "get_global_norm",
    "get_grad_zeros",
    "get_weight_norm",
    "layer_norm",
    "mask_gather_bert",
    "mask_gather_gpt",
    "masked_softmax",
    "native_status",
    "norm",
    "quantize",
    "quantize_fp8",
    "reference_only",
    "scale_",
    "token_gather",
    "token_scatter_",
    "token_sort_",
    "unflatten",
]
