"""Small helpers that find and replace layers of a model. Scripts for DeepSpeed's compression library use them."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from .errors import CompressionError
from .layers import kind_of, recursive_setattr

__all__ = ["convert_conv1d_to_linear", "get_module_name"]


def convert_conv1d_to_linear(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Replace every layer of a `Conv1D` class (transformers: y = x W + b, W of shape (in, out)) by a `Linear`, in
    place.

    Args:
        convert_type: the class, such as `transformers.pytorch_utils.Conv1D`.
    """
    for name, module in list(model.named_modules()):
        if name and isinstance(module, convert_type):
            old: Any = module
            inputs, outputs = old.weight.shape
            linear = nn.Linear(
                inputs, outputs, bias=old.bias is not None, device=old.weight.device, dtype=old.weight.dtype
            )
            with torch.no_grad():
                linear.weight.copy_(old.weight.t())
                if old.bias is not None:
                    linear.bias.copy_(old.bias)
            recursive_setattr(model, name, linear.train(old.training))
    return model


def get_module_name(
    group_name: str, model: nn.Module, key_word: str, exist_module_name: set[str], mpu: Any = None, verbose: bool = True
) -> tuple[list[str], set[str]]:
    """The layers in whose name the pattern `key_word` is found, and all names found so far.

    Args:
        group_name: name of the group in the error message.
        model: the model, whose layers that can be compressed are searched.
        key_word: a regular expression.
        exist_module_name: names found before; the new names are added to this set.
        mpu, verbose: have no effect; accepted because scripts pass them.

    Raises:
        CompressionError: another group has one of the layers already.
    """
    found = []
    for name, module in model.named_modules():
        if name and kind_of(module) is not None and re.search(key_word, name):
            if name in exist_module_name:
                raise CompressionError(f"{group_name}: {name} is already in another group of this method")
            exist_module_name.add(name)
            found.append(name)
    return found, exist_module_name
