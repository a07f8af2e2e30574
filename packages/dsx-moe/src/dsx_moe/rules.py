"""Finds the experts of a model by the form of its modules.

* packed: a module with a number `num_experts`, parameters with that many rows, and a forward that takes tokens, chosen
  experts and weights;
* listed: a module with a `ModuleList` of experts and a router.

The rules name no class, so experts of unknown models are found too. `huggingface` checks on a few tokens whether a
module computes what its form suggests.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Literal

from torch import nn

from .errors import ConversionError
from .experts import ExpertShard

_ROUTERS = ("gate", "router")


@dataclass(frozen=True)
class RouterRule:
    """A rule by which the logits of a linear router become experts and weights (for listed experts only).

    Attributes:
        top_k: experts per token; None: the block's `top_k` or `num_experts_per_tok`.
        score_func: "softmax" or "sigmoid".
        route_norm: divide the weights by their sum; None: the block's `norm_topk_prob`, else True.
        route_scale: factor of the weights.
        router, experts, shared_experts, shared_experts_gate: names of the block's children; None: the usual names are
            tried.
    """

    top_k: int | None = None
    score_func: Literal["softmax", "sigmoid"] = "softmax"
    route_norm: bool | None = None
    route_scale: float = 1.0
    router: str | None = None
    experts: str | None = None
    shared_experts: str | None = None
    shared_experts_gate: str | None = None


def find_experts(model: nn.Module, pattern: str | None, rule: RouterRule) -> dict[str, nn.Module]:
    """The modules to replace, by name. Of nested ones only the outermost is taken.

    If `pattern` is given, only modules are taken whose whole name it matches.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        if not name or (pattern is not None and not re.fullmatch(pattern, name)):
            continue
        if is_packed(module) or (pattern is not None and _looks_listed(module, rule)) or _is_listed(module):
            found[name] = module
    return found


def is_packed(module: nn.Module) -> bool:
    """Whether a module has the packed form."""
    total, parameters = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    if not isinstance(total, int) or not parameters or isinstance(module, ExpertShard):
        return False
    if any(p.dim() < 2 or p.shape[0] != total for p in parameters) or all(p.dim() < 3 for p in parameters):
        return False
    takes = [
        p
        for p in inspect.signature(type(module).forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "self"
    ]
    return len(takes) == 3


def _is_listed(module: nn.Module) -> bool:
    experts = getattr(module, "experts", None)
    routers = [getattr(module, name, None) for name in _ROUTERS]
    return isinstance(experts, nn.ModuleList) and any(
        isinstance(router, nn.Linear) and router.out_features == len(experts) for router in routers
    )


def _looks_listed(module: nn.Module, rule: RouterRule) -> bool:
    return isinstance(getattr(module, rule.experts or "experts", None), nn.ModuleList)


def children_of(block: nn.Module, rule: RouterRule, name: str) -> dict[str, str]:
    """Name in `RouterRule` -> name of the listed block's child; "" if there is none.

    Raises:
        ConversionError: the block has no router, or no list of experts.
    """
    experts = rule.experts or "experts"
    router = rule.router or next((r for r in _ROUTERS if isinstance(getattr(block, r, None), nn.Module)), None)
    if router is None or not isinstance(getattr(block, experts, None), nn.ModuleList):
        raise ConversionError(
            f"{name}: it has the children {', '.join(n for n, _ in block.named_children())}; say which are the router "
            "and the list of experts (RouterRule(router=..., experts=...))"
        )
    shared = rule.shared_experts or next(
        (s for s in ("shared_experts", "shared_expert") if isinstance(getattr(block, s, None), nn.Module)), ""
    )
    gate = rule.shared_experts_gate or ("shared_expert_gate" if getattr(block, "shared_expert_gate", None) else "")
    return {"router": router, "experts": experts, "shared_experts": shared, "shared_experts_gate": gate}


def completed_rule(block: nn.Module, rule: RouterRule, name: str) -> RouterRule:
    """The rule, completed with the block's attributes.

    Raises:
        ConversionError: neither of them has the number of experts per token.
    """
    top_k = rule.top_k or getattr(block, "top_k", None) or getattr(block, "num_experts_per_tok", None)
    if not isinstance(top_k, int):
        raise ConversionError(f"{name}: got no number of experts per token; give RouterRule(top_k=...)")
    norm = getattr(block, "norm_topk_prob", True) if rule.route_norm is None else rule.route_norm
    return RouterRule(top_k, rule.score_func, bool(norm), rule.route_scale)


def number_of_experts(module: nn.Module, rule: RouterRule, name: str) -> int:
    """The number of experts of a packed module or a listed block."""
    if is_packed(module):
        return int(module.num_experts)  # type: ignore[arg-type]
    return len(list(module.get_submodule(children_of(module, rule, name)["experts"]).children()))
