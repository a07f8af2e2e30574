"""`init_compression` puts the techniques of a configuration on the layers of a model.

All patterns are matched and checked before the first layer is changed, so that after an error the model is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from .bits import BitSchedule
from .config import CompressionTraining, load_config
from .errors import CompressionError
from .layers import LayerKind, Match, check_consumer, class_name, holds_embedding, kind_of, match_modules
from .snip import SnipMask
from .students import student_initialization
from .techniques import (
    ActivationQuantizer,
    HeadMask,
    OutputMask,
    SharedMask,
    SparseMask,
    Technique,
    WeightQuantizer,
)

__all__ = ["ACTIVATION", "Placed", "init_compression", "is_compressed", "techniques_of"]

ACTIVATION = "activation_quantizer"
"""Name of the child that quantises a layer's input."""


@dataclass(frozen=True)
class Placed:
    """A technique that was put on a layer.

    Attributes:
        name: the layer's name.
        layer: the layer.
        tensor: name of the layer's tensor that the technique changes; "" if it changes the layer's input.
        technique: the technique.
    """

    name: str
    layer: Any
    tensor: str
    technique: Technique

    @property
    def chain(self) -> Any:
        """The `ParametrizationList` of the tensor."""
        return self.layer.parametrizations[self.tensor]


def techniques_of(model: nn.Module) -> Iterator[Placed]:
    """Every technique of a model, layer by layer; those of one tensor in the order in which they are applied."""
    for name, module in list(model.named_modules()):
        for tensor, chain in dict(getattr(module, "parametrizations", {})).items():
            for technique in chain:
                if isinstance(technique, Technique):
                    yield Placed(name, module, tensor, technique)
        quantizer = module._modules.get(ACTIVATION)
        if isinstance(quantizer, Technique):
            yield Placed(name, module, "", quantizer)


def is_compressed(model: nn.Module) -> bool:
    """Whether `init_compression` has put techniques on a model."""
    return next(techniques_of(model), None) is not None


def init_compression(
    model: nn.Module, deepspeed_config: Any, teacher_model: nn.Module | None = None, mpu: Any = None
) -> nn.Module:
    """Put the configured techniques on a model, in place. Call it before optimizer and sharding are built.

    Parameters stay the same objects, but the parameter `weight` of a changed layer is named
    `parametrizations.weight.original`. State dicts with the plain names can still be loaded. Learnable scores are new
    parameters.

    Args:
        model: an ordinary model.
        deepspeed_config: the configuration, in any form that `load_config` takes.
        teacher_model: the model whose layers initialise the student; needed with `layer_reduction`.
        mpu: for a tensor-parallel model: an object with `get_model_parallel_world_size()` or
            `get_tensor_model_parallel_world_size()`.

    Returns:
        The model.

    Raises:
        CompressionConfigError: the configuration is wrong.
        CompressionError: nothing is switched on, a pattern matches nothing, a module is in two groups of one method,
            shapes do not fit, or the model is compressed already.
    """
    config = load_config(deepspeed_config)
    if not config.enabled:
        raise CompressionError(
            "init_compression: the configuration switches no method on; set shared_parameters.enabled of one to true"
        )
    if is_compressed(model):
        raise CompressionError(
            "init_compression: this model is compressed already; build it again to change the methods"
        )
    planned = _plan(model, config, _tensor_parallel_size(mpu))
    if config.layer_reduction.enabled:
        if teacher_model is None:
            raise CompressionError(
                "init_compression: layer_reduction is on, but there is no teacher_model to copy the layers from;"
                " pass it"
            )
        student_initialization(model, teacher_model, config)
    for apply in planned:
        apply()
    return model


def _tensor_parallel_size(mpu: Any) -> int:
    if hasattr(mpu, "get_slice_parallel_group"):  # a grid of dsx-pipe, whose model-parallel group has the stages, too
        group = mpu.get_slice_parallel_group()
        return 1 if group is None else int(group.size())
    for name in ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size"):
        if hasattr(mpu, name):
            return int(getattr(mpu, name)())
    if mpu is not None:
        raise CompressionError(
            f"init_compression(mpu=...): got {type(mpu).__name__} without get_model_parallel_world_size(); expected the"
            " object that knows the tensor-parallel group"
        )
    return 1


def _plan(model: nn.Module, config: CompressionTraining, tp_size: int) -> list[Callable[[], None]]:
    """Check everything. Returns functions that put the techniques on, in the order in which these run on a tensor."""
    planned: list[Callable[[], None]] = []
    for method in config.methods():
        section = getattr(config, method)
        for match in match_modules(model, method, config):
            layer = model.get_submodule(match.name)
            kind = kind_of(layer)
            if kind is None:  # match_modules returns layers only
                raise CompressionError(f"{match.name} is no layer that can be compressed")
            for tensor in kind.tensors:
                _check_weight(layer, match.name, tensor)
            settings = section.different_groups.get(match.group)
            planned += _BUILDERS[method](model, match, layer, kind, section.shared_parameters, settings, tp_size)
    return planned


def _check_weight(layer: Any, name: str, tensor: str) -> None:
    weight = getattr(layer, tensor)
    if not isinstance(weight, nn.Parameter) and not parametrize.is_parametrized(layer, tensor):
        raise CompressionError(f"{name}: its {tensor} is {type(weight).__name__}, expected a parameter")
    if hasattr(weight, "full_tensor") and not _is_from_init(weight):
        raise CompressionError(
            f"{name}: its {tensor} is partitioned over ranks ({type(weight).__name__}), expected a whole one, or one"
            " that dsx_zero.Init has partitioned; call init_compression before the model is sharded"
        )


def _is_from_init(weight: Any) -> bool:
    """Whether `dsx_zero.Init` has partitioned a parameter and no optimizer has taken it over yet.

    It is recognised by its attributes, because this package does not depend on dsx_zero. Only its shape is needed here;
    the scheduler gathers its values when it makes a mask.
    """
    source = getattr(weight, "source", None)
    return source is not None and not hasattr(source, "unit")


def _registration(layer: nn.Module, tensor: str, technique: Technique) -> Callable[[], None]:
    """A function that registers `technique` on a tensor of `layer`."""

    def register() -> None:
        first = not parametrize.is_parametrized(layer, tensor)
        weight: Any = getattr(layer, tensor) if first else None
        if first and _is_from_init(weight):
            # torch's registration copies the tensor onto itself, which a partitioned parameter does not allow. So a
            # stand-in without memory is registered, and then replaced by the parameter.
            stand_in = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            layer._parameters[tensor] = nn.Parameter(stand_in, requires_grad=weight.requires_grad)
            parametrize.register_parametrization(layer, tensor, technique, unsafe=True)
            chains: Any = layer.parametrizations
            chains[tensor]._parameters["original"] = weight
        else:
            parametrize.register_parametrization(layer, tensor, technique, unsafe=True)
        if first:
            layer.register_load_state_dict_pre_hook(_PlainName(tensor))

    return register


class _PlainName:
    """A pre-hook of `load_state_dict` that accepts the plain name `weight` for the parametrised layer's original."""

    def __init__(self, tensor: str) -> None:
        self._tensor = tensor

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *details: Any) -> None:
        plain, stored = prefix + self._tensor, f"{prefix}parametrizations.{self._tensor}.original"
        if plain in state and stored not in state and parametrize.is_parametrized(module, self._tensor):
            state[stored] = state.pop(plain)


def _mark_slice(technique: Any, weight: Any, dims: dict[int, int]) -> Any:
    """Mark the learnable scores of a tensor-parallel slice as a slice too.

    They get the attributes of the weight by which optimizers and checkpoints recognise a slice. (Masks in buffers need
    no mark: buffers are not shared between tensor-parallel ranks.)

    Args:
        dims: maps a dimension of the weight to the dimension of the scores that belongs to it.
    """
    scores, cut = getattr(technique, "scores", None), getattr(weight, "partition_dim", None)
    sliced = any(getattr(weight, mark, False) for mark in ("tensor_model_parallel", "model_parallel"))
    if scores is not None and sliced:
        scores.tensor_model_parallel = True
        if cut in dims:
            scores.partition_dim, scores.partition_stride = dims[cut], getattr(weight, "partition_stride", 1)
    return technique


# - One builder for each method


def _quantized_weight(
    model: nn.Module, match: Match, layer: Any, kind: LayerKind, shared: Any, settings: Any, tp_size: int
) -> list[Callable[[], None]]:
    params, mixed = settings.params, shared.fp16_mixed_quantize
    planned = []
    for tensor in kind.tensors:
        count = getattr(layer, tensor).numel()
        # As in DeepSpeed an embedding has one scale per row. So has a head that is tied to it: the two stay tied.
        rows = holds_embedding(model, getattr(layer, tensor))
        groups = len(getattr(layer, tensor)) if rows else shared.quantize_groups
        if count % groups:
            raise CompressionError(
                "compression_training.weight_quantization.shared_parameters.quantize_groups:"
                f" {shared.quantize_groups} does not divide the {count} weights of {match.name}.{tensor}; choose a"
                " divisor, or narrower patterns"
            )
        technique = WeightQuantizer(
            match.group, match.name, shared.schedule_offset, groups, shared.quantization_type,
            shared.rounding, BitSchedule(params.start_bits, params.target_bits, params.quantization_period),
            mixed.quantize_change_ratio if mixed.enabled else 0.0,
        )  # fmt: skip
        planned.append(_registration(layer, tensor, technique))
    return planned


def _quantized_input(
    model: nn.Module, match: Match, layer: Any, kind: LayerKind, shared: Any, settings: Any, tp_size: int
) -> list[Callable[[], None]]:
    technique = ActivationQuantizer(
        match.group, match.name, shared.schedule_offset, settings.params.bits, shared.quantization_type, layer.weight,
        static=shared.range_calibration == "static", images=kind.name == "Conv2d",
    )  # fmt: skip

    def add() -> None:
        layer.add_module(ACTIVATION, technique)
        layer.register_forward_pre_hook(quantize_input)

    return [add]


def quantize_input(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The forward pre-hook that quantises the first input, if the layer still has an activation quantiser."""
    quantizer = layer._modules.get(ACTIVATION)
    return None if quantizer is None or not inputs else (quantizer(inputs[0]), *inputs[1:])


def _sparse(
    model: nn.Module, match: Match, layer: Any, kind: LayerKind, shared: Any, settings: Any, tp_size: int
) -> list[Callable[[], None]]:
    return [_registration(layer, tensor, _sparse_mask(match, getattr(layer, tensor), shared, settings))
            for tensor in kind.tensors]  # fmt: skip


def _sparse_mask(match: Match, weight: Any, shared: Any, settings: Any) -> Technique:
    if shared.method != "snip_momentum":
        mask = SparseMask(
            "sparse_pruning", match.group, match.name, shared.schedule_offset, settings.params.dense_ratio,
            tuple(weight.shape), weight, learnable=shared.method == "topk",
        )  # fmt: skip
        return _mark_slice(mask, weight, {dim: dim for dim in range(weight.dim())})
    ratio = shared.dense_ratio
    if settings is not None and "dense_ratio" in settings.params.model_fields_set:
        ratio = settings.params.dense_ratio
    return SnipMask(
        match.group, match.name, shared.schedule_offset, shared.end, shared.schedule_offset_stride,
        shared.block_pattern, ratio, weight,
    )  # fmt: skip


def _outputs(method: str) -> Callable[..., list[Callable[[], None]]]:
    def build(
        model: nn.Module, match: Match, layer: Any, kind: LayerKind, shared: Any, settings: Any, tp_size: int
    ) -> list[Callable[[], None]]:
        if tp_size > 1 and kind.sliced == "inputs":
            raise CompressionError(
                f"{match.name}: row pruning of a {kind.name} is not supported with {tp_size} tensor-parallel ranks:"
                " each would choose other rows; prune the layer before it (a ColumnParallelLinear)"
            )
        dim = kind.outputs or 0
        count = layer.weight.shape[dim]
        learnable = shared.method == "topk"
        technique = OutputMask(
            method, match.group, match.name, shared.schedule_offset, settings.params.dense_ratio,
            (count, 1) if learnable else (count,), layer.weight, learnable=learnable, dim=dim,
        )  # fmt: skip
        planned = [_registration(layer, "weight", _mark_slice(technique, layer.weight, {dim: 0}))]
        if getattr(layer, "bias", None) is not None:
            planned.append(_registration(layer, "bias", SharedMask(technique)))
        for name in match.related:
            check_consumer(model, match.name, name, count)
            related = model.get_submodule(name)
            if isinstance(related, nn.modules.batchnorm._BatchNorm):
                planned += [_registration(related, tensor, SharedMask(technique)) for tensor in ("weight", "bias")]
        return planned

    return build


def _heads(
    model: nn.Module, match: Match, layer: Any, kind: LayerKind, shared: Any, settings: Any, tp_size: int
) -> list[Callable[[], None]]:
    heads, dim = shared.num_heads, kind.inputs or 0
    if kind.sliced == "inputs":
        if heads % tp_size:
            raise CompressionError(
                f"head_pruning.num_heads: {heads} does not divide among {tp_size} tensor-parallel ranks"
            )
        heads //= tp_size
    inputs = layer.weight.shape[dim]
    if inputs % heads:
        raise CompressionError(
            f"compression_training.head_pruning: the {inputs} inputs of {match.name} do not divide into {heads} heads; "
            "name the attention's output layers in modules"
        )
    for name in match.related:
        related: Any = model.get_submodule(name)
        given = kind_of(related)
        outputs = 0 if given is None or given.outputs is None else related.weight.shape[given.outputs]
        if not outputs or outputs % inputs:
            raise CompressionError(
                f"related_modules of {match.name}: {name} ({class_name(related)}) does not give queries, keys or values"
                f" of width {inputs} (or several of them side by side)"
            )
    technique = HeadMask(
        "head_pruning", match.group, match.name, shared.schedule_offset, settings.params.dense_ratio, (1, heads),
        layer.weight, learnable=True, dim=dim,
    )  # fmt: skip
    return [_registration(layer, "weight", _mark_slice(technique, layer.weight, {dim: 1}))]


_BUILDERS: dict[str, Callable[..., list[Callable[[], None]]]] = {
    "weight_quantization": _quantized_weight,
    "activation_quantization": _quantized_input,
    "sparse_pruning": _sparse,
    "row_pruning": _outputs("row_pruning"),
    "head_pruning": _heads,
    "channel_pruning": _outputs("channel_pruning"),
}
