"""The module that `QuantizerBuilder().load()` returns: the quantisers under the names and arguments that scripts call.

A tensor is cut into `groups` equal parts; each has its parameters: a scale, and for asymmetric codes the smallest value
beside it. So `params` is fp32 [groups, 1] or [groups, 2]. Codes are int8, of the input's shape; two codes of 4 bits
share a byte, which halves the last dimension. The numbers in `params` are those of `dsx_ops.quantize`: they fit the
functions here, not tables of other libraries.

`quantize_intX` is DeepSpeed's name for a file of two functions: `dequantize_int4_to_half_experimental` and
`dequantize_int8_to_half_experimental`. They are for weights that were quantised before, and compute x = code / scale +
min.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence

import torch
from dsx_ops.checks import check
from dsx_ops.codes.exchange import reduce_dequantize, reduce_quantize, swizzle_quantize
from dsx_ops.codes.quantize import Quantized, ds_quantizer
from dsx_ops.codes.quantize import dequantize as _dequantize
from dsx_ops.codes.quantize import quantize as _quantize
from dsx_ops.errors import TensorError
from dsx_ops.spec import FLOATS
from torch import Tensor


class QuantizationType(enum.Enum):
    """Whether a group has a zero point."""

    Symmetric = 0
    Asymmetric = 1


Symmetric, Asymmetric = QuantizationType.Symmetric, QuantizationType.Asymmetric


# ---- codes and parameters -------------------------------------------------------------------------------------------


def quantize(input: Tensor, groups: int, num_bits: int, quant_type: QuantizationType) -> list[Tensor]:
    """[codes, params] of a contiguous float tensor. Raises `TensorError`."""
    size = _group_size(input.numel(), groups)
    q = _quantize(input, bits=num_bits, group_size=size, symmetric=quant_type is Symmetric)
    return [_as_codes(q.codes, input.shape, num_bits), _as_params(q)]


def dequantize(
    quantized_data: Tensor, params: Tensor, groups: int, num_bits: int, quant_type: QuantizationType
) -> Tensor:
    """The tensor that `quantize` was given, in float16."""
    return _restored(quantized_data, params, groups, num_bits, quant_type, torch.float16)


def dequantize_fp32(
    quantized_data: Tensor, params: Tensor, groups: int, num_bits: int, quant_type: QuantizationType
) -> Tensor:
    """The tensor that `quantize` was given, in float32."""
    return _restored(quantized_data, params, groups, num_bits, quant_type, torch.float32)


def swizzle_quant(
    input_vals: Tensor,
    groups: int,
    num_bits: int,
    quant_type: QuantizationType,
    pipeline_size: int,
    nodes: int,
    devices_per_node: int,
) -> list[Tensor]:
    """[codes, params], laid out as [pipeline, device, node, chunk] (see `dsx_ops.codes.exchange.swizzle_quantize`)."""
    q = swizzle_quantize(
        input_vals,
        nodes=nodes,
        devices=devices_per_node,
        pipeline=pipeline_size,
        bits=num_bits,
        group_size=_group_size(input_vals.numel(), groups),
        symmetric=quant_type is Symmetric,
    )
    return [_as_codes(q.codes, input_vals.shape, num_bits), _as_params(q)]


def quantized_reduction(
    input_vals: Tensor,
    input_scales: Tensor,
    in_groups: int,
    out_groups: int,
    num_bits: int,
    quant_type: QuantizationType,
    devices_per_node: int,
) -> list[Tensor]:
    """[codes, params] of the sum of `devices_per_node` messages: in `in_groups` groups altogether, `out_groups` in the
    result.
    """
    total = _elements(input_vals, num_bits)
    numel, size = _group_size(total, devices_per_node), _group_size(total, in_groups)
    q = reduce_quantize(
        _quantized(input_vals, input_scales),
        ranks=devices_per_node,
        numel=numel,
        bits=num_bits,
        group_size=size,
        symmetric=quant_type is Symmetric,
        out_group_size=_group_size(numel, out_groups),
    )
    return [_as_codes(q.codes, _share(input_vals.shape, devices_per_node), 8), _as_params(q)]


# ---- with error feedback --------------------------------------------------------------------------------------------


def loco_swizzle_quant(
    input_vals: Tensor,
    error_feedback: Tensor,
    err_beta: float,
    groups: int,
    num_bits: int,
    quant_type: QuantizationType,
    pipeline_size: int,
    nodes: int,
    devices_per_node: int,
) -> list[Tensor]:
    """`swizzle_quant` of input plus error; `error_feedback` (in the order of the result, any float dtype) is updated in
    place.

    e <- beta e + (1 - beta) (x + e - what the codes say).
    """
    chunk = _group_size(input_vals.numel(), nodes * devices_per_node * pipeline_size)
    parts = input_vals.reshape(nodes, devices_per_node, pipeline_size, chunk)
    swizzled = parts.permute(2, 1, 0, 3).reshape(input_vals.shape)
    return _with_feedback(swizzled, error_feedback, err_beta, groups, num_bits, quant_type, input_vals.shape)


def loco_quantized_reduction(
    input_vals: Tensor,
    input_scales: Tensor,
    error_feedback: Tensor,
    err_beta: float,
    in_groups: int,
    out_groups: int,
    num_bits: int,
    quant_type: QuantizationType,
    devices_per_node: int,
) -> list[Tensor]:
    """`quantized_reduction` of the sum plus error; `error_feedback` is updated in place as by `loco_swizzle_quant`."""
    total = _elements(input_vals, num_bits)
    numel, size = _group_size(total, devices_per_node), _group_size(total, in_groups)
    reduced = reduce_dequantize(
        _quantized(input_vals, input_scales),
        ranks=devices_per_node,
        numel=numel,
        bits=num_bits,
        group_size=size,
        symmetric=quant_type is Symmetric,
    )
    shape = (*input_vals.shape[:-1], input_vals.shape[-1] * (8 // num_bits))
    return _with_feedback(
        reduced, error_feedback, err_beta, out_groups, num_bits, quant_type, _share(shape, devices_per_node)
    )


def _with_feedback(
    x: Tensor,
    error: Tensor,
    beta: float,
    groups: int,
    num_bits: int,
    quant_type: QuantizationType,
    shape: Sequence[int],
) -> list[Tensor]:
    if error.numel() != x.numel() or error.dtype not in FLOATS:
        raise TensorError(
            f"error_feedback: got {error.dtype} of {error.numel()} elements, expected a float tensor of {x.numel()}"
        )
    with torch.no_grad():
        old = error.reshape(-1).float()
        wanted = x.reshape(-1).float() + old
        codes, params = quantize(wanted.view(shape), groups, num_bits, quant_type)
        lost = wanted - dequantize_fp32(codes, params, groups, num_bits, quant_type).reshape(-1)
        error.copy_((beta * old + (1.0 - beta) * lost).view(error.shape))
    return [codes, params]


# ---- rounding in place ----------------------------------------------------------------------------------------------


def _rounding(dtype: torch.dtype, sr: bool, asym: bool) -> Callable[[Tensor, int, int], Tensor]:
    def round_(vals: Tensor, groups: int, bits: int) -> Tensor:
        """Round `vals` in place to values of `bits` bits, in `groups` groups; returns it. Raises `TensorError`."""
        check(vals, "vals", dtypes=(dtype,))
        return ds_quantizer(vals, groups, bits, sr, asym)

    return round_


ds_quantize_fp32, ds_quantize_fp16 = (_rounding(d, False, False) for d in (torch.float32, torch.float16))
ds_sr_quantize_fp32, ds_sr_quantize_fp16 = (_rounding(d, True, False) for d in (torch.float32, torch.float16))
ds_quantize_asym_fp32, ds_quantize_asym_fp16 = (_rounding(d, False, True) for d in (torch.float32, torch.float16))
ds_sr_quantize_asym_fp32, ds_sr_quantize_asym_fp16 = (_rounding(d, True, True) for d in (torch.float32, torch.float16))


# ---- weights that were quantised beforehand (quantize_intX) ----------------------------------------------------------


def dequantize_int4_to_half_experimental(
    data_in: Tensor, scale_buffer: Tensor, min_val_buffer: Tensor, num_group: int, group_size: int
) -> Tensor:
    """code / scale + min in float16 [num_group, group_size]. `data_in`: uint8, the first of two codes in the upper half
    of a byte.
    """
    check(data_in, "data_in", dtypes=(torch.uint8, torch.int8))
    packed = data_in.reshape(-1).view(torch.uint8)
    codes = torch.stack([packed >> 4, packed & 15], -1)
    return _affine(codes, scale_buffer, min_val_buffer, num_group, group_size)


def dequantize_int8_to_half_experimental(
    data_in: Tensor, scale_buffer: Tensor, min_val_buffer: Tensor, num_group: int, group_size: int
) -> Tensor:
    """code / scale + min in float16 [num_group, group_size]. `data_in`: uint8."""
    check(data_in, "data_in", dtypes=(torch.uint8, torch.int8))
    return _affine(data_in.view(torch.uint8), scale_buffer, min_val_buffer, num_group, group_size)


def _affine(codes: Tensor, scale: Tensor, smallest: Tensor, groups: int, size: int) -> Tensor:
    if codes.numel() != groups * size or scale.numel() != groups or smallest.numel() != groups:
        raise TensorError(
            f"got {codes.numel()} codes, {scale.numel()} scales and {smallest.numel()} minima, expected {groups} groups"
            f" of {size}"
        )
    rows = codes.reshape(groups, size).float()
    return (rows / scale.reshape(-1, 1).float() + smallest.reshape(-1, 1).float()).half()


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _group_size(numel: int, groups: int) -> int:
    if groups < 1 or numel % groups:
        raise TensorError(f"groups: got {groups}, expected a divisor of the {numel} elements")
    return numel // groups


def _elements(codes: Tensor, num_bits: int) -> int:
    return codes.numel() * (8 // num_bits)


def _share(shape: Sequence[int], parts: int) -> tuple[int, ...]:
    """The shape of one of equal parts: its last dimension is cut where that goes, else it is flat."""
    if shape[-1] % parts == 0:
        return (*shape[:-1], shape[-1] // parts)
    return (math.prod(shape) // parts,)


def _as_codes(codes: Tensor, shape: Sequence[int], num_bits: int) -> Tensor:
    last = shape[-1] if len(shape) else 1
    whole = num_bits == 8 or last % 2 == 0
    wanted = (*shape[:-1], last // (8 // num_bits)) if whole and len(shape) else (codes.numel(),)
    return codes.view(torch.int8).view(wanted)


def _as_params(q: Quantized) -> Tensor:
    return torch.stack([q.scale, q.zero], 1) if q.zero.numel() else q.scale.unsqueeze(1)


def _quantized(codes: Tensor, params: Tensor) -> Quantized:
    check(codes, "codes", dtypes=(torch.int8, torch.uint8))
    check(params, "params", dtypes=(torch.float32,), like=codes)
    columns = params.reshape(params.shape[0], -1)
    zero = columns[:, 1].contiguous() if columns.shape[1] > 1 else params.new_empty(0)
    return Quantized(codes.reshape(-1).view(torch.uint8), columns[:, 0].contiguous(), zero)


def _restored(
    codes: Tensor, params: Tensor, groups: int, num_bits: int, quant_type: QuantizationType, dtype: torch.dtype
) -> Tensor:
    shape = (*codes.shape[:-1], codes.shape[-1] * (8 // num_bits))
    size = _group_size(_elements(codes, num_bits), groups)
    symmetric = quant_type is Symmetric
    q = _quantized(codes, params)
    return _dequantize(q, shape, bits=num_bits, group_size=size, symmetric=symmetric, dtype=dtype)
