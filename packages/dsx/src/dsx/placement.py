"""Moves and casts a model before its parameters are divided among the ranks.

Parameters stay where they are: `dsx_zero.shard` moves them to the device unit by unit, so that the device never has to
hold all of a large model. Buffers, and parameters that `zero.Init` has partitioned, are moved here.

Parameters get the dtype of the precision mode. Buffers keep their dtype (`data_types.buffer_dtype` changes that),
because some must not be rounded: in 16 bits the frequencies of rotary embeddings are wrong by full turns at long
positions.

All objects stay the same. Parameters that `zero.Init` has partitioned are converted as shards, and only if their dtype
differs.
"""

from __future__ import annotations

import dsx_zero
import torch
from torch import nn

from .precision import Precision
from .utils.logging import logger

__all__ = ["place", "place_for"]


def place_for(precision: Precision, model: nn.Module, device: torch.device | None) -> None:
    """Give a model the dtypes of the configuration, and move its buffers to the device; see `place`."""
    dsx_zero.release_model(model)  # an earlier engine's model cannot be converted while it is divided
    place(
        model,
        device=device,
        parameters=None if precision.params == "fp32" else precision.dtype("params"),
        buffers=precision.buffer_dtype,
        partitioned=dsx_zero.PartitionedParameter,
    )


def place(
    model: nn.Module,
    *,
    device: torch.device | None,
    parameters: torch.dtype | None,
    buffers: torch.dtype | None,
    partitioned: type[torch.Tensor],
) -> None:
    """Move a model and convert its parameters and buffers.

    Args:
        model: the model, changed in place.
        device: the device for buffers and partitioned parameters; None: they are not moved.
        parameters: dtype of the floating-point parameters and their gradients; None: unchanged.
        buffers: dtype of the floating-point buffers; None: unchanged, unless torch cannot compute with them.
        partitioned: the class of parameters that hold this rank's shard only.
    """
    # Use the model's own `_apply`, because some modules override it (recurrent layers keep flat weights).
    if device is not None:
        whole = [parameter for parameter in model.parameters() if not isinstance(parameter, partitioned)]
        kept = {id(tensor) for parameter in whole for tensor in (parameter, parameter.grad)}
        model._apply(lambda t: t if id(t) in kept else t.to(device))
    if parameters is not None:
        kept = {id(buffer) for buffer in model.buffers()}
        model._apply(lambda t: t if id(t) in kept or not t.is_floating_point() else t.to(parameters))
    if buffers is not None:
        for module in model.modules():
            _cast_buffers(module, buffers)
    elif parameters is not None:
        _fit_batch_norms(model)


def _cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)


def _fit_batch_norms(model: nn.Module) -> None:
    """Cast the statistics of batch norms to the weights' dtype: on a CPU torch accepts no other ("expected scalar type
    BFloat16 but found Float").
    """
    changed = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm) or module.weight is None:
            continue
        mean = module.running_mean
        if mean is not None and mean.device.type == "cpu" and mean.dtype != module.weight.dtype:
            _cast_buffers(module, module.weight.dtype)
            changed.append(name)
    if changed:
        logger.warning(
            "the running statistics of %d batch norms (%s ...) are kept in the parameters' dtype: torch needs that on"
            " a CPU",
            len(changed),
            changed[0],
        )
