"""The parameters that Muon steps as matrices, and as how many matrices each.

Muon is a rule for matrices of hidden layers. A parameter's attribute, its name and the module that has it say whether
it is one; weights that are several matrices (fused projections, packed experts) are named by the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .errors import DsxConfigError, Problem

__all__ = ["check_qk_clip", "check_split", "groups_for_muon", "optimizer_problem"]


def check_split(split: Any) -> None:
    """Raise DsxConfigError if `optimizer.params.split` is not {part of a name: {"rows": ..., "columns": ...}}."""
    wanted = '{"qkv_proj": {"rows": [4096, 1024, 1024]}, "gate_up_proj": {"columns": 2}}'
    form = isinstance(split, dict) and all(isinstance(v, dict) and v.keys() <= {"rows", "columns"} and v
                                           for v in split.values())  # fmt: skip
    if not form:
        raise optimizer_problem(
            "params.split", "it says which weights are several matrices", got=repr(split), expected=wanted
        )


def check_qk_clip(section: Any) -> None:
    """Raise DsxConfigError if `optimizer.params.qk_clip` has other keys than those of `dsx_zero.qk_clip.QKClip`, which
    judges their values when the model is sharded.
    """
    known = ("threshold", "alpha", "heads", "layers")
    if not isinstance(section, dict) or not section.keys() <= set(known):
        raise optimizer_problem(
            "params.qk_clip", "it clips the logits of attention", got=repr(section),
            expected=f'an object with {", ".join(known)} (all optional), such as {{"threshold": 100}}',
        )  # fmt: skip


_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)
_NOT_FOR_MUON = ("embed", "lm_head")
"""Parts of the names of embeddings and output layers. Muon is only for matrices of hidden layers."""


def groups_for_muon(
    parameters: Any, model: nn.Module, split: Mapping[str, Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Parameters, or groups of them, as groups with the entry `use_muon`.

    A parameter's attribute `use_muon` decides. Without it, tensors of two or more dimensions are for Muon, except
    weights of embeddings and parameters whose names contain "embed" or "lm_head". Tensors of three dimensions are
    stacks of matrices (packed experts), except weights of convolutions.

    Args:
        split: which weights are several matrices: for a part of the dotted name, "rows" (equal parts below each other,
            or their sizes) and "columns" (equal parts beside each other).

    Raises:
        DsxConfigError: a key of `split` is no part of the name of a parameter for Muon.
    """
    one_matrix = {id(p) for m in model.modules() if isinstance(m, _CONVOLUTIONS) for p in m.parameters(recurse=False)}
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    parts: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts.setdefault(id(parameter), set()).update(name.split("."))
        if any(word in name.lower() for word in _NOT_FOR_MUON):
            embedded.add(id(parameter))
    split, used = split or {}, set[str]()

    def settings(parameter: torch.Tensor) -> dict[str, Any]:
        said = getattr(parameter, "use_muon", None)
        if not (parameter.dim() >= 2 and id(parameter) not in embedded if said is None else bool(said)):
            return {"use_muon": False}
        found: dict[str, Any] = {"use_muon": True}
        if parameter.dim() == 3:
            found["stacked"] = id(parameter) not in one_matrix
        for key in split.keys() & parts.get(id(parameter), ()):
            used.add(key)
            found |= {f"split_{side}": value for side, value in split[key].items()}
        return found

    groups: list[dict[str, Any]] = []
    listed = list(parameters)
    for group in listed if listed and isinstance(listed[0], dict) else [{"params": listed}]:
        if "use_muon" in group:
            groups.append(group)
            continue
        params = group["params"]
        by_settings: dict[str, tuple[dict[str, Any], list[torch.Tensor]]] = {}
        for parameter in [params] if isinstance(params, torch.Tensor) else params:
            own = settings(parameter)
            by_settings.setdefault(repr(own), (own, []))[1].append(parameter)
        for own, members in sorted(by_settings.values(), key=lambda pair: not pair[0]["use_muon"]):
            groups.append({**group, **own, "params": members})
    if unused := split.keys() - used:
        raise optimizer_problem(
            "params.split", "no parameter for Muon has this part in its name", got=", ".join(sorted(unused)),
            expected='a part between the dots, such as "qkv_proj" of "layers.0.attention.qkv_proj.weight"',
        )  # fmt: skip
    return groups


def optimizer_problem(
    path: str, message: str, *, kind: str = "value", got: str = "", expected: str = "", fix: str = ""
) -> DsxConfigError:
    """The error of an entry of the section `optimizer`."""
    return DsxConfigError([Problem(kind, f"optimizer.{path}", message, got=got, expected=expected, fix=fix)])
