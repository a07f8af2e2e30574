"""LoRA as peft builds it: which parameters are adapters, and how they are merged into the weights that they change.

peft is not imported. A layer is known by what it has: `base_layer`, `lora_A`, `lora_B` and `scaling`. The sum is peft's
own (`merge_and_unload`), with the same roundings, so that a generator gets what peft would have written.

Left out: variants with another formula (DoRA, adapters of embeddings and convolutions, a bias in `lora_B`); they are
refused by name where a merge is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ZeroConfigError

__all__ = ["Adapter", "adapters_of", "merged_weight", "plain_name"]

_PREFIX = "base_model.model."
_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


@dataclass(frozen=True)
class Adapter:
    """One adapter of one weight: scaling * B A, transposed for layers that keep their weight so.

    `down` and `up` are the names of A and B.
    """

    down: str
    up: str
    scaling: float
    transposed: bool


def adapters_of(model: nn.Module, *, needed: bool) -> tuple[dict[str, tuple[Adapter, ...]], dict[str, str | None]]:
    """The active adapters by the name of the weight that they change, and the plain name of every parameter of a layer
    that has adapters (None: of an adapter).

    Args:
        needed: refuse layers that cannot be merged.

    Raises:
        ZeroConfigError: such a layer; names it.
    """
    found: dict[str, tuple[Adapter, ...]] = {}
    plain: dict[str, str | None] = {}
    for path, layer in model.named_modules(remove_duplicate=False):
        if hasattr(layer, "modules_to_save") and hasattr(layer, "original_module"):
            plain.update(_replaced(path, layer))
        if not all(hasattr(layer, name) for name in ("base_layer", "lora_A", "lora_B", "scaling")):
            continue
        for name, _ in layer.named_parameters():
            part = name.partition(".")[0]
            if part in _PARTS:
                plain[f"{path}.{name}"] = None
        if not layer.merged_adapters:  # otherwise the sum is in the weight already
            active = tuple(name for name in layer.active_adapters if name in layer.scaling)
            if needed and active and not layer.disable_adapters:
                _check(path, layer, active)
                found[f"{path}.base_layer.weight"] = tuple(_adapters(path, layer, active))
    return found, plain


def _replaced(path: str, layer: Any) -> Iterator[tuple[str, str | None]]:
    """`modules_to_save`: the active copy has the module's name, the original and other copies are left out."""
    for name, _ in layer.named_parameters():
        kind, _, rest = name.partition(".")
        copy, _, inside = rest.partition(".")
        active = kind == "modules_to_save" and copy in layer.active_adapters
        yield f"{path}.{name}", f"{path}.{inside}" if active else None


def _adapters(path: str, layer: Any, active: tuple[str, ...]) -> Iterator[Adapter]:
    for name in active:
        yield Adapter(
            f"{path}.lora_A.{name}.weight",
            f"{path}.lora_B.{name}.weight",
            float(layer.scaling[name]),
            bool(getattr(layer, "fan_in_fan_out", False)),
        )


def _check(path: str, layer: Any, active: tuple[str, ...]) -> None:
    weight = getattr(layer.base_layer, "weight", None)
    for name in active:
        why = None
        if name not in layer.lora_A:
            why = "its adapter is of an embedding"
        elif getattr(layer, "lora_variant", {}).get(name) is not None:
            why = f"it is a variant ({type(layer.lora_variant[name]).__name__})"
        elif getattr(layer, "lora_bias", {}).get(name):
            why = "its lora_B has a bias"
        elif weight is None or weight.dim() != 2:
            why = "its weight is not a matrix"
        if why is not None:
            raise ZeroConfigError(
                "lora",
                f"{path}: the adapter {name!r} cannot be merged here: {why}; send base and adapters apart"
                " (lora='apart'), or call merge_adapter() inside GatheredParameters before",
            )


def plain_name(name: str, plain: Mapping[str, str | None], *, merged: bool) -> str | None:
    """The name in the model without adapters; None for a parameter that it does not have.

    Not `merged`: parameters of adapters keep their names.
    """
    if name in plain:
        known = plain[name]
        if known is None:
            return name if not merged and any(f".{part}." in name for part in _PARTS) else None
        name = known
    return name.removeprefix(_PREFIX).replace(".base_layer.", ".")


def merged_weight(weight: torch.Tensor, pairs: list[tuple[Adapter, torch.Tensor, torch.Tensor]]) -> None:
    """Add the adapters (A, B) to a weight in place, as peft does."""
    for adapter, down, up in pairs:
        dtype = up.dtype
        slow = up.device.type == "cpu" and dtype in (torch.float16, torch.bfloat16)
        first, second = (down.float(), up.float()) if slow else (down, up)
        change = second @ first
        change = (change.T if adapter.transposed else change).mul_(adapter.scaling)
        weight.add_(change.to(dtype) if slow else change)
