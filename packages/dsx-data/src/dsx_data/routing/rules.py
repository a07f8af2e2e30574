"""Finds the modules of a model that are its layers.

Either the caller names the class of a layer, or a rule finds it: Hugging Face models list the classes of their blocks
in `_no_split_modules`, and the layers are the modules of these classes in an `nn.ModuleList`. A layer's number is its
place in the order of `model.modules()`.
"""

from __future__ import annotations

from torch import nn

from ..errors import DataArgumentError

__all__ = ["find_layers"]


def find_layers(model: nn.Module, layer_class: type[nn.Module] | None = None) -> list[nn.Module]:
    """The layers of a model, in order.

    Args:
        layer_class: class of the layers; None: use the rule for Hugging Face models.

    Raises:
        DataArgumentError: there are no layers, or the rule finds layers of several classes.
    """
    if layer_class is not None:
        found = [module for module in model.modules() if isinstance(module, layer_class)]
        if not found:
            raise DataArgumentError(
                f"got the layer class {layer_class.__name__}, but {type(model).__name__} has no module of it"
            )
        return found
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [
        child
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        for child in module
        if type(child).__name__ in names
    ]
    kinds = {type(layer) for layer in layers}
    if len(kinds) != 1:
        seen = f"layers of {len(kinds)} classes" if kinds else "none"
        raise DataArgumentError(
            f"{type(model).__name__}: the rule for Hugging Face models finds {seen}; pass the class of the layers, for"
            " example convert_to_random_ltd(model, Block)"
        )
    return layers
