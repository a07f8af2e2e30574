"""Training in 8-bit floating point: the function `dsx.fp8`, and the section `fp8` of an engine.

    model = dsx.fp8(model)
    model, optimizer = dsx_zero.shard(model, make_optimizer, stage=3)

torchao's `Float8Linear` takes the place of linear layers before the model is sharded. It casts inputs, weights and
gradients to 8 bits for each product, and computes a scale for each cast. Parameters keep their dtype and stay the same
objects, so that masters, optimizers and checkpoints are those of the model without it. At stage 3 weights with one
scale are gathered in 8 bits, and one message for each step finds the scales of all weights (`dsx_zero.gather_as`).

Left out: torchao's formats with blocks (MX, NVFP4), whose weights have no form for gathers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import dsx_zero
import torch
from dsx_comm import RankSets
from torch import nn

from .config import Config
from .engine.errors import EngineArgumentError
from .engine.request import Request
from .extension import Extension
from .siblings import MissingPartError
from .utils.logging import logger

__all__ = ["Float8", "fp8"]

_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_MULTIPLE = 16
"""Both dimensions of a product in 8 bits are multiples of it."""


def fp8(
    model: nn.Module,
    recipe: str = "tensorwise",
    *,
    exclude: Sequence[str] = ("lm_head",),
    gather: bool = True,
    emulate: bool | None = None,
) -> nn.Module:
    """Let a model's linear layers multiply in 8-bit floating point. Call it before `dsx_zero.shard`.

    Layers with a dimension that is no multiple of 16 stay as they are, as do those in `exclude`. Hooks on converted
    layers are lost, so register them afterwards.

    Args:
        model: is changed in place, unless it is a linear layer itself.
        recipe: of torchao: "tensorwise" (one scale for each tensor), "rowwise", or "rowwise_with_gw_hp" (gradients of
            weights in the model's dtype).
        exclude: parts of module names (between dots) whose layers stay as they are.
        gather: at stage 3 weights with one scale are gathered in 8 bits; False: in their dtype.
        emulate: compute with numbers rounded to 8 bits, for devices that have no such units; None: where there is no
            accelerator.

    Returns:
        The model.

    Raises:
        MissingPartError: torchao is not installed.
        EngineArgumentError: an unknown recipe, or a model without a layer that can be converted.
    """
    if recipe not in _RECIPES:
        raise EngineArgumentError(f"fp8(recipe={recipe!r}): expected one of {', '.join(_RECIPES)}")
    if isinstance(exclude, str):
        raise EngineArgumentError(f"fp8(exclude={exclude!r}): got text, expected a list: [{exclude!r}]")
    conversion = _torchao()
    if emulate is None:
        emulate = not torch.accelerator.is_available()
    settings = dataclasses.replace(conversion.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    found = {name: m for name, m in model.named_modules() if _is_converted(name, m, frozenset(exclude))}
    if not found:
        raise EngineArgumentError(
            f"fp8: got a {type(model).__name__} without an nn.Linear whose sizes are multiples of {_MULTIPLE}"
            f" and whose name has none of {', '.join(exclude) or 'nothing'}; leave fp8 out"
        )
    chosen = frozenset(id(module) for module in found.values())
    model = conversion.convert_to_float8_training(
        model, config=settings, module_filter_fn=lambda module, name: id(module) in chosen
    )
    if gather and recipe == "tensorwise":
        for name in found:
            _gather_in_8_bits(model.get_submodule(name))
    how = f"{recipe}{', emulated' if emulate else ''}"
    logger.info("fp8: %d linear layers multiply in 8 bits (%s), the first is %r", len(found), how, next(iter(found)))
    return model


def _torchao() -> Any:
    try:
        import torchao.float8 as conversion  # lazy import: an extra
    except ImportError as error:
        raise MissingPartError(
            "fp8: training in 8-bit floating point needs torchao, which is not installed; pip install torchao"
        ) from error
    return conversion


def _is_converted(name: str, module: nn.Module, exclude: frozenset[str]) -> bool:
    if type(module) is not nn.Linear or not exclude.isdisjoint(name.split(".")):
        return False
    return module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0


def _gather_in_8_bits(layer: Any) -> None:
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor  # lazy import: as above

    weight = layer.weight
    if not (type(weight) is nn.Parameter or isinstance(weight, dsx_zero.PartitionedParameter)):
        return  # a tensor of another kind: it is gathered in its own form
    values = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    dtype = layer.config.cast_config_weight.target_dtype
    dsx_zero.gather_as(weight, WeightWithDynamicFloat8CastTensor(values, layer.linear_mm_config, dtype))


class Float8(Extension):
    """The section `fp8`."""

    name = "fp8"

    def before_shard(self, request: Request, config: Config, topology: RankSets) -> Request:
        """See `fp8`."""
        section = config.use("fp8")
        if section is None or not section.enabled:
            return request
        emulate = None if section.emulate == "auto" else section.emulate
        dsx_zero.release_model(request.model)  # an earlier engine may have partitioned it
        model = fp8(request.model, section.recipe, exclude=section.exclude, gather=section.gather, emulate=emulate)
        return dataclasses.replace(request, model=model)
