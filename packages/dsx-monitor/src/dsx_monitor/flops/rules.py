"""The number of operations of a dispatched operator, from the shapes of its arguments and results. Pure arithmetic.

A rule returns `(flops, macs)`. A multiply-accumulate is two flops.

* Attention: both matrix products in full, causal or not.
* Elementwise operators: one flop per element of the result.
* Reductions and softmax: one flop per element read.
* Norms: five flops per element with an affine part, four without.
* Moving data: nothing.
* Complex numbers: the real operations. A multiply-accumulate is four real ones, an elementwise product six flops, and a
  sum or any other elementwise operator two.

Rarer operators are in `special_rules`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from .special_rules import SPECIAL_RULES

__all__ = ["COMPOUND", "FREE", "RULES", "VIEW", "rule_for"]

Cost = tuple[int, int]
Rule = Callable[[tuple[Any, ...], Any], Cost]
FullRule = Callable[[tuple[Any, ...], dict[str, Any], Any], Cost]


def _macs(count: int, extra: int = 0) -> Cost:
    return 2 * count + extra, count


def _mm(args: tuple[Any, ...], out: Any) -> Cost:
    return _macs(args[0].numel() * args[1].shape[-1])


def _addmm(args: tuple[Any, ...], out: Any) -> Cost:
    return _macs(args[1].numel() * args[2].shape[-1], out.numel())


def _linear(args: tuple[Any, ...], out: Any) -> Cost:
    """`linear` where PyTorch does not decompose it: in inference mode, and for sequences of different lengths."""
    return _macs(args[0].numel() * args[1].shape[0], out.numel() if len(args) > 2 and args[2] is not None else 0)


def _grouped_mm(args: tuple[Any, ...], out: Any) -> Cost:
    """Rows in groups, with one matrix per group (mixture of experts).

    (rows, in) by (groups, in, out); (groups, out, in) by (in, columns) with groups of columns; (m, rows) by (rows, n)
    with groups of rows.
    """
    left, right = args[0], args[1]
    if left.dim() == 3 and right.dim() == 2:
        return _macs(left.shape[-2] * right.numel())
    return _macs(left.numel() * right.shape[-1])


def _mat_vec(args: tuple[Any, ...], out: Any) -> Cost:
    return _macs(args[1].numel(), out.numel())


def _vector(args: tuple[Any, ...], out: Any) -> Cost:
    return _macs(args[0].numel())


def _conv_products(x: Any, weight: Any, result: Any, transposed: bool) -> int:
    """Multiply-accumulates of a convolution.

    The weight is (out, in / groups, *kernel), that of a transposed one (in, out / groups, *kernel).
    """
    places = prod((x if transposed else result).shape[2:])
    return x.shape[0] * places * weight.numel()


def _conv(args: tuple[Any, ...], out: Any) -> Cost:
    x, weight, bias, transposed = args[0], args[1], args[2], bool(args[6])
    return _macs(_conv_products(x, weight, out, transposed), out.numel() if bias is not None else 0)


def _conv_backward(args: tuple[Any, ...], out: Any) -> Cost:
    gradient, x, weight, transposed, wanted = args[0], args[1], args[2], bool(args[7]), args[10]
    products = _conv_products(x, weight, gradient, transposed)
    return _macs(products * (int(wanted[0]) + int(wanted[1])), gradient.numel() if wanted[2] else 0)


def _attention_products(query: Any, key: Any, value: Any) -> tuple[int, int]:
    """Multiply-accumulates of q k^T and of p v; tensors are (..., length, size of a head)."""
    scores = prod(query.shape[:-1]) * key.shape[-2]
    return scores * query.shape[-1], scores * value.shape[-1]


def _attention(args: tuple[Any, ...], out: Any) -> Cost:
    return _macs(sum(_attention_products(*args[:3])))


def _attention_backward(args: tuple[Any, ...], out: Any) -> Cost:
    """Fused kernels compute q k^T again, then the gradients of p, v, q and k."""
    scores, values = _attention_products(*args[1:4])
    return _macs(3 * scores + 2 * values)


def _fused_self_attention(args: tuple[Any, ...], out: Any) -> Cost:
    """Self-attention with its projections in one operator, as evaluation without gradients runs it.

    Input (batch, length, width).
    """
    query, width, into, out_of = args[0], args[3], args[5], args[7]
    if query.is_nested:  # sequences of different lengths are padded for the two products of attention, and only there
        lengths = query._nested_tensor_size()[:, 0]
        batch, length = len(lengths), int(lengths.max())
    else:
        batch, length = query.shape[:2]
    rows = query.numel() // width
    projections = rows * (into.numel() + out_of.numel())
    return _macs(projections + 2 * batch * length * length * width, rows * (into.shape[0] + out_of.shape[0]))


def _rnn_layer(args: tuple[Any, ...], out: Any) -> Cost:
    """One layer of a fused LSTM or GRU: both products and about ten operations per gate value. Input (T, B, in)."""
    x, input_weight, hidden_weight = args[:3]
    return _macs(x.shape[0] * x.shape[1] * (input_weight.numel() + hidden_weight.numel()), 10 * _numel(out))


def _rnn_layer_backward(args: tuple[Any, ...], out: Any) -> Cost:
    """The gradients of both products of `_rnn_layer`: by the input and by the weights."""
    flops, macs = _rnn_layer(args, args[0])
    return 2 * flops, 2 * macs


def _rnn_cudnn(args: tuple[Any, ...], out: Any) -> Cost:
    """All layers of a fused recurrent network; every weight matrix multiplies every time step of every sequence."""
    x, weights = args[0], args[1]
    return _macs(prod(x.shape[:-1]) * sum(w.numel() for w in weights if w.dim() == 2), 10 * _numel(out))


def _rnn_cudnn_backward(args: tuple[Any, ...], out: Any) -> Cost:
    flops, macs = _rnn_cudnn(args, args[6])
    return 2 * flops, 2 * macs


def _elementwise(args: tuple[Any, ...], out: Any) -> Cost:
    return _numel(out) * _operations(out), 0


def _product(args: tuple[Any, ...], out: Any) -> Cost:
    """An elementwise product or quotient: of two complex numbers six flops, of a complex and a real one two."""
    complex_ones = sum(_operations(argument) == 2 for argument in args[:2])
    return _numel(out) * (6 if complex_ones == 2 else _operations(out)), 0


def _reads(args: tuple[Any, ...], out: Any) -> Cost:
    return _numel(args[0]) * _operations(args[0]), 0


def _operations(value: Any) -> int:
    """Flops per element: one for real numbers, two for complex numbers, none for integers."""
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    if getattr(first, "is_complex", bool)():
        return 2
    return int(getattr(first, "is_floating_point", bool)())


def _norm(affine_at: int) -> Rule:
    def rule(args: tuple[Any, ...], out: Any) -> Cost:
        affine = len(args) > affine_at and args[affine_at] is not None
        return args[0].numel() * (5 if affine else 4), 0

    return rule


def _batch_norm_inference(args: tuple[Any, ...], out: Any) -> Cost:
    return args[0].numel() * (2 if args[1] is not None else 1), 0


def _batch_norm(args: tuple[Any, ...], out: Any) -> Cost:
    training = next((a for a in args if isinstance(a, bool)), True)
    return _norm(1)(args, out) if training else _batch_norm_inference(args, out)


def _numel(value: Any) -> int:
    """Elements of the first tensor found."""
    if isinstance(value, (tuple, list)):
        return next((n for v in value if (n := _numel(v))), 0)
    return value.numel() if hasattr(value, "numel") else 0


RULES: dict[str, Rule] = {
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "addbmm": _addmm,
    "_int_mm": _mm,
    "_scaled_mm": _mm,
    "linear": _linear,
    "_native_multi_head_attention": _fused_self_attention,
    "_grouped_mm": _grouped_mm,
    "_scaled_grouped_mm": _grouped_mm,
    "addmv": _mat_vec,
    "dot": _vector,
    "vdot": _vector,
    "mv": _vector,
    "convolution": _conv,
    "_convolution": _conv,
    "convolution_backward": _conv_backward,
    "mkldnn_rnn_layer": _rnn_layer,
    "mkldnn_rnn_layer_backward": _rnn_layer_backward,
    "_cudnn_rnn": _rnn_cudnn,
    "_cudnn_rnn_backward": _rnn_cudnn_backward,
    "native_layer_norm": _norm(2),
    "layer_norm": _norm(2),  # not decomposed for nested tensors
    "native_group_norm": _norm(1),
    "_fused_rms_norm": _norm(2),
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm_inference,
    "_native_batch_norm_legit_functional": _batch_norm,
    "_batch_norm_with_update": _norm(1),
    "_batch_norm_no_update": _batch_norm_inference,
    "cudnn_batch_norm": _batch_norm,
    "miopen_batch_norm": _batch_norm,
    "mul": _product,
    "div": _product,
    **SPECIAL_RULES,
}
_FUSED = (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
)
for _kind in _FUSED:
    RULES[f"_scaled_dot_product_{_kind}"] = _attention
    RULES[f"_scaled_dot_product_{_kind}_backward"] = _attention_backward

_ELEMENTWISE = """
    add sub rsub true_divide remainder fmod floor_divide pow neg abs sign reciprocal square sqrt rsqrt exp exp2
    expm1 log log2 log10 log1p sin cos tan asin acos atan atan2 sinh cosh tanh sigmoid erf erfc relu gelu silu mish
    elu selu celu softplus leaky_relu hardtanh hardswish hardsigmoid prelu _prelu_kernel relu6 glu
    log_sigmoid_forward clamp clamp_min clamp_max maximum minimum where lerp addcmul addcdiv floor ceil round trunc
    frac threshold threshold_backward gelu_backward silu_backward sigmoid_backward tanh_backward hardswish_backward
    hardsigmoid_backward elu_backward softplus_backward leaky_relu_backward hardtanh_backward mish_backward
    glu_backward log_sigmoid_backward _prelu_kernel_backward _softmax_backward_data _log_softmax_backward_data
    native_layer_norm_backward native_group_norm_backward native_batch_norm_backward _fused_rms_norm_backward
    masked_fill cumsum cumprod logit xlogy hypot upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d upsample_linear1d upsample_nearest2d_backward
    upsample_bilinear2d_backward avg_pool2d_backward max_pool2d_with_indices_backward _adaptive_avg_pool2d_backward
    native_dropout_backward mse_loss_backward nll_loss_backward nll_loss2d_backward smooth_l1_loss_backward
    binary_cross_entropy_with_logits_backward _thnn_fused_lstm_cell _thnn_fused_gru_cell
    _thnn_fused_lstm_cell_backward _thnn_fused_gru_cell_backward cudnn_batch_norm_backward
    max_pool3d_with_indices_backward avg_pool3d_backward _adaptive_avg_pool3d_backward upsample_nearest1d_backward
    upsample_nearest3d_backward upsample_bicubic2d_backward sinc erfinv deg2rad heaviside copysign nan_to_num
    signbit polygamma lgamma digamma binary_cross_entropy_backward huber_loss_backward soft_margin_loss
    rrelu_with_noise softshrink hardshrink renorm angle acosh asinh atanh fmax fmin logaddexp logaddexp2
    logcumsumexp ldexp frexp nextafter sgn i0 polar rrelu_with_noise_backward softshrink_backward
    hardshrink_backward upsample_linear1d_backward upsample_trilinear3d_backward _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d _upsample_nearest_exact1d_backward
    _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward _upsample_bilinear2d_aa
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward
    adaptive_max_pool2d_backward adaptive_max_pool3d_backward fractional_max_pool2d_backward grid_sampler_2d
    grid_sampler_3d grid_sampler_2d_backward grid_sampler_3d_backward multi_margin_loss_backward
    multilabel_margin_loss_backward _segment_reduce_backward
"""
_READS = """
    _softmax _log_softmax _safe_softmax softmax log_softmax sum mean var std var_mean std_mean amax amin max min
    prod norm linalg_vector_norm logsumexp argmax argmin any all nll_loss_forward nll_loss2d_forward mse_loss
    l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits avg_pool1d avg_pool2d
    avg_pool3d max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d _adaptive_avg_pool2d
    _adaptive_avg_pool3d adaptive_avg_pool1d topk sort cummax cummin adaptive_max_pool3d fractional_max_pool2d
    fractional_max_pool3d multi_margin_loss multilabel_margin_loss_forward trace median nanmedian mode kthvalue
    histc segment_reduce index_reduce
"""
RULES.update(dict.fromkeys(_ELEMENTWISE.split(), _elementwise))
RULES.update(dict.fromkeys(_READS.split(), _reads))

_FREE = """
    view _unsafe_view reshape _reshape_alias t transpose permute expand detach clone copy_ copy _to_copy to slice
    select narrow unsqueeze squeeze cat stack split split_with_sizes unbind chunk unfold index index_put
    _index_put_impl_ index_select gather scatter scatter_ scatter_add scatter_add_ scatter_reduce index_add
    index_copy embedding embedding_dense_backward embedding_renorm_ _embedding_bag _embedding_bag_forward_only empty
    empty_like empty_strided new_empty new_empty_strided new_zeros new_ones new_full zeros zeros_like ones ones_like
    full full_like arange linspace scalar_tensor fill fill_ zero_ zero eye tril triu tril_ triu_ diagonal diag_embed
    alias as_strided as_strided_ contiguous lift_fresh lift_fresh_copy roll flip constant_pad_nd pad repeat
    repeat_interleave native_dropout dropout bernoulli bernoulli_ rand randn rand_like randn_like uniform_ normal_
    random_ randint randperm multinomial eq ne lt le gt ge logical_and logical_or logical_not logical_xor
    bitwise_and bitwise_or bitwise_not isnan isinf isfinite is_same_size _local_scalar_dense item set_ resize_
    resize record_stream movedim swapaxes one_hot nonzero masked_select slice_backward select_backward
    unfold_backward slice_scatter select_scatter as_strided_scatter expand_copy view_copy sym_size sym_stride
    sym_numel stride size numel _pin_memory pin_memory is_pinned view_as_real view_as_complex real imag conj _conj
    searchsorted bucketize _nested_tensor_from_mask_left_aligned storage_offset broadcast_tensors _shape_as_tensor
    sym_is_contiguous is_contiguous is_nonzero _assert_async _assert_tensor_metadata _functional_sym_constrain_range
    _has_compatible_shallow_copy_type isin allclose equal is_floating_point cudnn_is_acceptable
    _cudnn_init_dropout_state mkldnn_reorder_conv2d_weight block_diag diag index_fill masked_scatter channel_shuffle
    pixel_shuffle pixel_unshuffle native_channel_shuffle im2col col2im reflection_pad1d reflection_pad2d
    replication_pad1d replication_pad2d _pad_enum argsort _resize_output_ resize_as_ exponential_ geometric_
    to_padded_tensor _nested_tensor_from_mask _nested_from_padded _nested_tensor_size unsafe_split
    unsafe_split_with_sizes unsafe_chunk log_normal_ poisson tril_indices triu_indices meshgrid hann_window
    hamming_window complex _unsafe_index diagonal_backward _efficientzerotensor max_unpool2d max_unpool3d
    _embedding_bag_backward reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d
    reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward replication_pad3d
    replication_pad3d_backward _unique2 unique_dim bincount _to_sparse _to_dense sparse_mask is_coalesced _coalesced
    coalesce _indices _values indices values _nnz _linalg_check_errors
"""
FREE = frozenset(_FREE.split())
"""Operators that move, make or compare data, or only read shapes."""


_NO_ARITHMETIC = frozenset({"c10d", "_c10d_functional", "c10d_functional", "profiler", "debugprims"})
"""Namespaces of communication and book-keeping."""
_VIEWS = frozenset(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "t",
        "transpose",
        "permute",
        "expand",
        "detach",
        "alias",
        "unsqueeze",
        "squeeze",
        "slice",
        "select",
        "as_strided",
        "split",
        "split_with_sizes",
        "unbind",
        "diagonal",
    ]
)
"""Operators whose time is not counted either."""

VIEW, FREE_OF_ARITHMETIC, COMPOUND = "view", "free", "compound"
"""Results of `rule_for` for operators that only make views, for operators without arithmetic, and for operators that
are to be decomposed.
"""


def rule_for(func: Any) -> FullRule | str | None:
    """The rule that counts an operator; in-place forms cost the same.

    Args:
        func: a `torch._ops.OpOverload`.

    Returns:
        A rule to call with args, kwargs and result; `VIEW`; `FREE_OF_ARITHMETIC`; `COMPOUND` for an unknown operator of
        PyTorch, which may consist of known ones; None for an unknown custom operator. An operator with a formula
        registered with `torch.utils.flop_counter.register_flop_formula` is known.
    """
    packet = func._overloadpacket
    namespace, name = packet._qualified_op_name.split("::")
    if namespace in _NO_ARITHMETIC:
        return FREE_OF_ARITHMETIC
    if namespace == "aten":
        bare = name.removesuffix("_")
        if name in _VIEWS:
            return VIEW
        rule = RULES.get(name) or RULES.get(bare)
        if rule is not None:
            return _without_keywords(rule)
        if name in FREE or bare in FREE or name.endswith("_copy"):
            return FREE_OF_ARITHMETIC
        if name.startswith("special_"):  # functions of a number: Bessel's, gamma, error functions
            return _without_keywords(_elementwise)
        if name.startswith("_foreach_"):
            return lambda args, kwargs, out: (sum(map(_numel, args[0])), 0)
    return _registered(packet) or (COMPOUND if namespace == "aten" else None)


def _without_keywords(rule: Rule) -> FullRule:
    def counted(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Cost:
        flops, macs = rule(args, out)
        # A product of complex numbers takes four real ones. Rules without products handle complex numbers themselves.
        return (4 * flops, 4 * macs) if macs and _operations(out) == 2 else (flops, macs)

    return counted


def _registered(packet: Any) -> FullRule | None:
    from torch.utils.flop_counter import flop_registry  # lazy import: this module needs no torch for the rest

    formula = flop_registry.get(packet)
    if formula is None:
        return None

    def rule(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Cost:
        flops = int(formula(*args, **kwargs, out_val=out))
        return flops, flops // 2

    return rule
