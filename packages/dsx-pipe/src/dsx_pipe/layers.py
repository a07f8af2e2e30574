"""Layers that are built only on the ranks that run them.

A pipeline of `LayerSpec`s builds on each rank only the layers of its own stages, so no rank ever holds the whole
model. `TiedLayerSpec`s with the same key share their weights, also on different stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .errors import PartitionError, PipelineError


class LayerSpec:
    """A layer that is not built yet: a class (or function) with its arguments.

    Args:
        typename: an `nn.Module` class, or a function that returns a module.
    """

    def __init__(self, typename: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if not callable(typename) or isinstance(typename, nn.Module):
            raise PartitionError(
                f"LayerSpec: got {_short_text(typename)}, expected a class (or function) that builds the layer; "
                "a module that is built already goes into the list of layers as it is"
            )
        self.typename, self.module_args, self.module_kwargs = typename, args, kwargs

    @property
    def name(self) -> str:
        """Name of the class or function."""
        return getattr(self.typename, "__name__", type(self.typename).__name__)

    def __repr__(self) -> str:
        given = [repr(a) for a in self.module_args] + [f"{k}={v!r}" for k, v in self.module_kwargs.items()]
        return f"{self.name}({', '.join(given)})"

    def build(self, log: bool = False) -> Any:
        """Build the layer.

        Args:
            log: accepted for DeepSpeed's scripts; nothing is logged.
        """
        del log
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares weights with all other `TiedLayerSpec`s of the same key.

    Args:
        key: name of what is shared.
        typename: class of the layer.
        forward_fn: (module, input) -> output, called instead of the module. It is for a place that uses the weights in
            another way, such as an embedding that is also the output projection.
        tied_weight_attr: names of the shared parameters, "weight" or a list; dots reach into submodules. All parameters
            of layers that are built alike are shared, as if one process held the layer once; the names matter where
            class or arguments differ between the places.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., Any],
        *args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **kwargs: Any,
    ) -> None:
        super().__init__(typename, *args, **kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class Unit(nn.Module):
    """Modules of a larger model that stay together on one stage. They count as one layer; a unit is never called."""

    def __init__(self, label: str, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.label, self.parts = label, nn.ModuleList(modules)


def flatten_layers(layers: Any) -> list[Any]:
    """Flatten an iterable of layers, specs, functions and nested sequences of them into one list.

    Raises:
        PartitionError: an entry is none of these, or there are no layers.
    """
    found: list[Any] = []
    for entry in layers:
        if isinstance(entry, (list, tuple)):
            found += flatten_layers(entry)
        elif isinstance(entry, (nn.Module, LayerSpec)) or callable(entry):
            found.append(entry)
        else:
            raise PartitionError(
                f"layer {len(found)}: got {_short_text(entry)}, expected an nn.Module, a LayerSpec or a function"
            )
    if not found:
        raise PartitionError("layers: got none, expected at least one")
    return found


def class_name(layer: Any) -> str:
    """Name of a layer's class, or of a function."""
    if isinstance(layer, LayerSpec):
        return layer.name
    if isinstance(layer, Unit):
        return layer.label
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return getattr(layer, "__name__", type(layer).__name__)


def count_parameters(layer: Any) -> int:
    """Number of trainable elements. A spec is built on the meta device to count them, which takes no memory."""
    if isinstance(layer, LayerSpec):
        with torch.device("meta"):
            layer = layer.build()
    if not isinstance(layer, nn.Module):
        return 0
    return sum(p.numel() for p in layer.parameters() if p.requires_grad)


def parameter_at(module: nn.Module, path: str) -> nn.Parameter:
    """The parameter at a dotted path.

    Raises:
        PipelineError: the module has no such parameter.
    """
    owner: Any = module
    for part in path.split("."):
        owner = getattr(owner, part, None)
    if not isinstance(owner, nn.Parameter):
        raise PipelineError(f"tied_weight_attr: {type(module).__name__} has no parameter {path!r}")
    return owner


def _short_text(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:80]
