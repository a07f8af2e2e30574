"""Post-training quantisation with calibration, after ZeroQuant (Yao et al. 2022).

    report = quantize_post_training(model, batches, PostTrainingConfig(bits=4, group_size=64, blocks="blocks"))
    export_model(model, "model.safetensors")

Weights are quantised in groups of a row's inputs, and inputs token by token. Then each block is trained for a few
steps to reproduce the outputs that it had before quantisation, on the inputs that the quantised blocks before it
produce (layer-by-layer distillation). This needs neither labels nor a backward pass through the complete model. It
needs the memory for training one block.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .apply import ACTIVATION, is_compressed, quantize_input
from .bits import BitSchedule
from .errors import CompressionError, near
from .layers import LayerKind, kind_of, takes_activations
from .quantizers import Kind, require_finite
from .techniques import ActivationQuantizer, WeightQuantizer

logger = logging.getLogger("dsx_compress")

__all__ = ["BlockResult", "PostTrainingConfig", "PostTrainingReport", "quantize_post_training"]


@dataclass(frozen=True)
class PostTrainingConfig:
    """Settings of post-training quantisation.

    Attributes:
        bits: bits of weights, 1 to 16.
        group_size: inputs of a row that share a scale; 0: all inputs of the row.
        kind: quantiser, "symmetric" or "asymmetric".
        activation_bits: bits of inputs, 4 to 16, with one scale per token; None: inputs are not quantised.
        blocks: path of the list of blocks for layer-by-layer distillation; "": weights are rounded without training.
        steps: training steps of each block; 0: weights are rounded without training.
        learning_rate: learning rate of these steps (Adam).
        excluded_modules: patterns of layers that are not quantised, such as the output layer.
    """

    bits: int = 8
    group_size: int = 0
    kind: Kind = "symmetric"
    activation_bits: int | None = None
    blocks: str = ""
    steps: int = 0
    learning_rate: float = 1e-4
    excluded_modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlockResult:
    """Mean squared error of a block's output, relative to the output's mean square, before and after its training."""

    name: str
    before: float
    after: float


@dataclass(frozen=True)
class PostTrainingReport:
    """The result of post-training quantisation.

    Attributes:
        quantized: names of the quantised layers.
        left: for each layer that was not quantised, the reason.
        blocks: the error of each block.
    """

    quantized: list[str]
    left: dict[str, str]
    blocks: list[BlockResult] = field(default_factory=list)


def quantize_post_training(
    model: nn.Module, batches: Iterable[Any], config: PostTrainingConfig | None = None
) -> PostTrainingReport:
    """Quantise a trained model in place. `export_model` writes it; the model can be used without `redundancy_clean`.

    Args:
        model: an ordinary trained model.
        batches: arguments of the model, each a tensor, a tuple or a dictionary, with about 8 to 128 samples of real
            data in all. They are read only if blocks are trained.
        config: the settings; None: 8 bits, one scale per row.

    Raises:
        CompressionError: the model is compressed already, a name is wrong, or the group size does not divide the inputs
            of a layer.
        CompressionDataError: a weight has NaN or infinity.
    """
    config = config or PostTrainingConfig()
    if is_compressed(model):
        raise CompressionError("quantize_post_training: this model is compressed already; pass the plain trained model")
    layers, left = _layers_to_quantize(model, config)
    blocks = _named_blocks(model, config)
    was_training = model.training
    model.eval()
    try:
        calls = _first_calls(model, blocks[0][1], batches) if blocks and config.steps else []
        originals = [copy.deepcopy(block) for _, block in blocks] if calls else []
        for name, layer in layers.items():
            _quantize_layer(name, layer, config)
        results = []
        for place, ((name, block), original) in enumerate(zip(blocks, originals), 1):
            found = _train_block(name, block, original, calls, config)
            logger.info("%s (%d of %d): error %.3g, was %.3g", name, place, len(blocks), found.after, found.before)
            results.append(found)
            calls = [_next_call(block, call) for call in calls]
    finally:
        model.train(was_training)
    return PostTrainingReport(list(layers), left, results)


def _layers_to_quantize(model: nn.Module, config: PostTrainingConfig) -> tuple[dict[str, Any], dict[str, str]]:
    layers: dict[str, Any] = {}
    left: dict[str, str] = {}
    named = {name: module for name, module in model.named_modules() if name and kind_of(module) is not None}
    for pattern in config.excluded_modules:
        if not any(re.search(pattern, name) for name in named):
            raise CompressionError(f"excluded_modules: {pattern!r} matches no layer{near(pattern, named)}")
    for name, module in named.items():
        if any(re.search(pattern, name) for pattern in config.excluded_modules):
            left[name] = "excluded"
            continue
        for tensor in _tensors(module):
            weight: Any = getattr(module, tensor)
            require_finite(weight, f"{name}.{tensor}")
            inputs = weight.numel() // weight.shape[0]
            if inputs % (config.group_size or inputs):
                raise CompressionError(
                    f"group_size: {config.group_size} does not divide the {inputs} inputs of {name}; choose a divisor"
                    " or put the layer into excluded_modules"
                )
        layers[name] = module
    return layers, left


def _tensors(layer: nn.Module) -> tuple[str, ...]:
    kind = kind_of(layer)
    return () if kind is None else kind.tensors


def _named_blocks(model: nn.Module, config: PostTrainingConfig) -> list[tuple[str, nn.Module]]:
    if not config.blocks:
        if config.steps:
            raise CompressionError(
                "PostTrainingConfig: steps without blocks; name the list of blocks, such as 'model.layers'"
            )
        return []
    try:
        container = model.get_submodule(config.blocks)
    except AttributeError:
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        raise CompressionError(f"blocks: the model has no module {config.blocks!r}; its lists are {lists}") from None
    return [(f"{config.blocks}.{name}", block) for name, block in container.named_children()]


def _quantize_layer(name: str, layer: Any, config: PostTrainingConfig) -> None:
    from torch.nn.utils import parametrize

    for tensor in _tensors(layer):
        weight = getattr(layer, tensor)
        size = config.group_size or weight.numel() // weight.shape[0]
        quantizer = WeightQuantizer(
            "post_training", name, 0, weight.numel() // size, config.kind, "nearest",
            BitSchedule(config.bits, config.bits, 0),
        )  # fmt: skip
        quantizer.enabled = True
        parametrize.register_parametrization(layer, tensor, quantizer, unsafe=True)
    kind: LayerKind | None = kind_of(layer)
    if config.activation_bits is not None and kind is not None and takes_activations(kind, layer):
        inputs = ActivationQuantizer(
            "post_training",
            name,
            0,
            config.activation_bits,
            config.kind,
            getattr(layer, kind.tensors[0]),
            static=False,
            images=kind.name == "Conv2d",
        )
        inputs.enabled = True
        layer.add_module(ACTIVATION, inputs)
        layer.register_forward_pre_hook(quantize_input)


# - Layer-by-layer distillation

_Call = tuple[tuple[Any, ...], dict[str, Any]]


class _Stop(Exception):
    """Ends a forward pass of the model when it reaches the first block."""


def _first_calls(model: nn.Module, block: nn.Module, batches: Iterable[Any]) -> list[_Call]:
    """The arguments of the first block for every batch. Call it before the weights are quantised."""
    calls: list[_Call] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((tuple(_detached(arg) for arg in args), {key: _detached(arg) for key, arg in kwargs.items()}))
        raise _Stop

    handle = block.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        for batch in batches:
            with torch.no_grad():
                try:
                    (
                        model(**batch)
                        if isinstance(batch, Mapping)
                        else model(*(batch if isinstance(batch, (tuple, list)) else (batch,)))
                    )
                except _Stop:
                    continue
            raise CompressionError(
                "quantize_post_training: the model ran without its first block; is blocks the right list?"
            )
    finally:
        handle.remove()
    if not calls:
        raise CompressionError("quantize_post_training: got no batches, expected some to calibrate with")
    return calls


def _detached(value: Any) -> Any:
    """An argument that can be passed to several calls.

    It has no autograd graph. A key-value cache, which each call would extend, is replaced by None.
    """
    if isinstance(value, torch.Tensor):
        return value.detach()
    if type(value) in (tuple, list):
        return type(value)(_detached(item) for item in value)
    return None if hasattr(value, "get_seq_length") else value  # only a `Cache` of transformers has it


def _hidden_states(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, (tuple, list)) else output


@torch.no_grad()
def _next_call(block: nn.Module, call: _Call) -> _Call:
    """The call of the next block: `call` with this block's output as first argument."""
    args, kwargs = call
    hidden = _hidden_states(block(*args, **kwargs))
    if args:
        return (hidden, *args[1:]), kwargs
    first = next(iter(kwargs))
    return (), {**kwargs, first: hidden}


def _train_block(
    name: str, block: nn.Module, original: nn.Module, calls: list[_Call], config: PostTrainingConfig
) -> BlockResult:
    with torch.no_grad():
        wanted = [_hidden_states(original(*args, **kwargs)) for args, kwargs in calls]
    before = _error(block, calls, wanted)
    trained = [p for p in block.parameters() if p.requires_grad]
    saved = [p.detach().clone() for p in trained]
    optimizer = torch.optim.Adam(trained, lr=config.learning_rate)
    for step in range(config.steps):
        place = step % len(calls)
        args, kwargs = calls[place]
        with torch.enable_grad():
            loss = nn.functional.mse_loss(_hidden_states(block(*args, **kwargs)).float(), wanted[place].float())
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients):
            parameter.grad = gradient
        optimizer.step()
    after = _error(block, calls, wanted)
    for parameter, value in zip(trained, saved):
        parameter.grad = None
        if not after <= before:  # training increased the error or diverged, so the rounded weights stay
            with torch.no_grad():
                parameter.copy_(value)
    return BlockResult(name, before, min(before, after) if after == after else before)


@torch.no_grad()
def _error(block: nn.Module, calls: list[_Call], wanted: list[torch.Tensor]) -> float:
    difference = sum(
        float((_hidden_states(block(*a, **k)) - w).double().square().sum()) for (a, k), w in zip(calls, wanted)
    )
    return difference / max(1e-300, sum(float(w.double().square().sum()) for w in wanted))
