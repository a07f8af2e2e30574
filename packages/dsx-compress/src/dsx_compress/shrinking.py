"""The plan of what is removed from a compressed model at clean-up, and its execution.

The plan is data. For every tensor it has the dimensions and the indices that stay, and for modules the new values of
attributes that count outputs, channels or heads. The same plan cuts a model's weights, and codes and scales at export.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .apply import techniques_of
from .config import CompressionTraining
from .errors import CompressionError
from .layers import Match, check_consumer, kind_of, match_modules
from .techniques import HeadMask, OutputMask

__all__ = ["ShrinkPlan", "cut", "set_attributes", "shrink", "shrink_plan"]

_HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "heads")
_HEAD_WIDTHS = ("all_head_size", "inner_dim", "split_size", "hidden_size_per_partition")


@dataclass
class ShrinkPlan:
    """The parts of a model that stay.

    Attributes:
        keep: for each tensor, by name: maps a dimension to the indices that stay, ascending.
        attributes: for each module, by name: maps an attribute to its new value.
    """

    keep: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)

    def cut(self, tensor: str, dim: int, kept: torch.Tensor) -> None:
        """Note that only the indices `kept` of a tensor's dimension stay.

        Raises:
            CompressionError: another pruning keeps other indices of the same dimension.
        """
        dims = self.keep.setdefault(tensor, {})
        if dim in dims and not torch.equal(dims[dim], kept):
            raise CompressionError(
                f"{tensor}: two prunings remove different parts of dimension {dim}; relate the module to one of them"
                " only"
            )
        dims[dim] = kept

    def attribute(self, module: str, name: str, value: int) -> None:
        """Note the new value of a module's attribute."""
        self.attributes.setdefault(module, {})[name] = value


def shrink_plan(model: nn.Module, config: CompressionTraining) -> ShrinkPlan:
    """The plan of a compressed model, from its row, head and channel prunings with related modules.

    Raises:
        CompressionError: related modules do not fit together.
    """
    plan = ShrinkPlan()
    masks = {
        (placed.name, placed.technique.method): placed.technique
        for placed in techniques_of(model)
        if isinstance(placed.technique, (OutputMask, HeadMask))
    }
    for method in ("row_pruning", "head_pruning", "channel_pruning"):
        if not getattr(config, method).shared_parameters.enabled:
            continue
        for match in match_modules(model, method, config):
            technique = masks.get((match.name, method))
            if technique is None or not match.related:
                continue
            if isinstance(technique, HeadMask):
                _plan_heads(plan, model, match, technique)
            elif isinstance(technique, OutputMask):
                _plan_outputs(plan, model, match, technique)
    return plan


def _join(module: str, tensor: str) -> str:
    return f"{module}.{tensor}"


def _plan_outputs(plan: ShrinkPlan, model: nn.Module, match: Match, technique: OutputMask) -> None:
    mask = technique.kept().view(-1)
    kept, before = mask.nonzero().view(-1), mask.numel()
    _keep_outputs(plan, model, match.name, kept)
    for name in match.related:
        what, related = check_consumer(model, match.name, name, before), model.get_submodule(name)
        if what == "features":
            for tensor in ("weight", "bias", "running_mean", "running_var"):
                if getattr(related, tensor) is not None:
                    plan.cut(_join(name, tensor), 0, kept)
            plan.attribute(name, "num_features", len(kept))
        elif what == "outputs":
            _keep_outputs(plan, model, name, kept)
        elif what == "depthwise":
            _keep_outputs(plan, model, name, kept)
            plan.attribute(name, "in_channels", len(kept))
            plan.attribute(name, "groups", len(kept))
        else:
            _keep_inputs(plan, model, name, kept, before)


def _keep_outputs(plan: ShrinkPlan, model: nn.Module, name: str, kept: torch.Tensor) -> None:
    layer: Any = model.get_submodule(name)
    kind = kind_of(layer)
    plan.cut(_join(name, "weight"), (kind.outputs if kind else 0) or 0, kept)
    if getattr(layer, "bias", None) is not None:
        plan.cut(_join(name, "bias"), 0, kept)
    for attribute in ("out_features", "out_channels", "nf"):
        if hasattr(layer, attribute):
            plan.attribute(name, attribute, len(kept))


def _keep_inputs(plan: ShrinkPlan, model: nn.Module, name: str, kept: torch.Tensor, before: int) -> None:
    layer: Any = model.get_submodule(name)
    kind = kind_of(layer)
    dim = (kind.inputs if kind else 1) or 0
    each = layer.weight.shape[dim] // before  # a channel of a flattened image is several inputs
    inputs = (kept[:, None] * each + torch.arange(each, device=kept.device)).view(-1)
    plan.cut(_join(name, "weight"), dim, inputs)
    for attribute in ("in_features", "in_channels", "nx"):
        if hasattr(layer, attribute):
            plan.attribute(name, attribute, len(inputs))


def _plan_heads(plan: ShrinkPlan, model: nn.Module, match: Match, technique: HeadMask) -> None:
    layer: Any = model.get_submodule(match.name)
    mask = technique.kept().view(-1)
    heads = mask.nonzero().view(-1)
    width = layer.weight.shape[technique.dim]
    size = width // mask.numel()
    inputs = (heads[:, None] * size + torch.arange(size, device=heads.device)).view(-1)
    _keep_inputs(plan, model, match.name, inputs, width)
    for name in match.related:
        related: Any = model.get_submodule(name)
        kind = kind_of(related)
        outputs = related.weight.shape[(kind.outputs if kind else 0) or 0]
        offsets = torch.arange(outputs // width, device=inputs.device) * width  # queries, keys, values side by side
        _keep_outputs(plan, model, name, (offsets[:, None] + inputs).view(-1))
    _plan_head_attributes(plan, model, (match.name, *match.related), mask.numel(), len(heads), width, len(inputs))


def _plan_head_attributes(
    plan: ShrinkPlan, model: nn.Module, names: tuple[str, ...], heads: int, left: int, width: int, new_width: int
) -> None:
    """Note new head counts and widths for the modules that contain the attention's layers."""
    for parent in {name.rpartition(".")[0] for name in names}:
        module = model.get_submodule(parent)
        for known, before, now in ((_HEAD_COUNTS, heads, left), (_HEAD_WIDTHS, width, new_width)):
            for attribute in known:
                if type(getattr(module, attribute, None)) is int and getattr(module, attribute) == before:
                    plan.attribute(parent, attribute, now)


def cut(tensor: torch.Tensor, dims: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The part of a tensor that stays, by the indices of each dimension."""
    for dim, kept in dims.items():
        tensor = tensor.index_select(dim, kept.to(tensor.device))
    return tensor


def shrink(model: nn.Module, plan: ShrinkPlan) -> None:
    """Cut the tensors of an ordinary model as the plan says, and set the attributes."""
    for name, dims in plan.keep.items():
        owner, _, tensor = name.rpartition(".")
        module = model.get_submodule(owner)
        before = getattr(module, tensor)
        with torch.no_grad():
            after = cut(before, dims).clone()
        if isinstance(before, nn.Parameter):
            setattr(module, tensor, nn.Parameter(after, requires_grad=before.requires_grad))
        else:
            setattr(module, tensor, after)
    set_attributes(model, plan.attributes)


def set_attributes(model: nn.Module, attributes: Mapping[str, Mapping[str, int]]) -> None:
    """Set the integer attributes of modules that count their outputs, channels or heads."""
    for name, values in attributes.items():
        module = model.get_submodule(name)
        for attribute, value in values.items():
            setattr(module, attribute, value)
