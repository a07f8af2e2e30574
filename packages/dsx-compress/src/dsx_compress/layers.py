"""The layers that can be compressed, and which dimensions of the weight are their inputs and outputs.

A layer is recognised by its class: torch's `Linear`, `Conv2d`, `Embedding`; `Conv1D` of transformers, which is a linear
layer with the weight transposed; and the tensor-sliced layers of Megatron-like libraries, which hold one rank's part of
a linear layer or an embedding. The last two are recognised by the name of their class, so that neither library is
imported.

torch's `MultiheadAttention` holds its input projections itself, as one tensor or three; they can be quantised and made
sparse. Its `out_proj` is a `Linear`, but only its weight is used: the layer is never called, so its input cannot be
quantised.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .config import CompressionTraining
from .errors import CompressionError, near

__all__ = [
    "LayerKind", "Match", "check_consumer", "class_name", "kind_of", "match_modules", "matched_by", "recursive_getattr",
    "recursive_setattr", "takes_activations",
]  # fmt: skip


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer.

    Attributes:
        name: name of the kind in messages.
        outputs, inputs: the dimension of the weight that counts them; None if the weight has no such dimension.
        sliced: "outputs" or "inputs" if a tensor-parallel rank holds only a part of that dimension; else "".
        tensors: names of the layer's weights.
    """

    name: str
    outputs: int | None = 0
    inputs: int | None = 1
    sliced: str = ""
    tensors: tuple[str, ...] = ("weight",)


_LINEAR, _CONV1D = LayerKind("Linear"), LayerKind("Conv1D", outputs=1, inputs=0)
_CONV2D, _EMBEDDING = LayerKind("Conv2d"), LayerKind("Embedding", outputs=1, inputs=None)
_BY_NAME = {
    "Conv1D": _CONV1D,
    "ColumnParallelLinear": LayerKind("ColumnParallelLinear", sliced="outputs"),
    "RowParallelLinear": LayerKind("RowParallelLinear", sliced="inputs"),
    "VocabParallelEmbedding": LayerKind("VocabParallelEmbedding", outputs=1, inputs=None),
}
_EMBEDDINGS = ("Embedding", "VocabParallelEmbedding")
_LINEARS = ("Linear", "Conv1D", "ColumnParallelLinear", "RowParallelLinear")
_PACKED_QKV = LayerKind("MultiheadAttention", tensors=("in_proj_weight",))
_SEPARATE_QKV = LayerKind("MultiheadAttention", tensors=("q_proj_weight", "k_proj_weight", "v_proj_weight"))
_KINDS = {
    "weight_quantization": (*_LINEARS, "Conv2d", *_EMBEDDINGS, "MultiheadAttention"),
    "activation_quantization": (*_LINEARS, "Conv2d"),
    "sparse_pruning": (*_LINEARS, "Conv2d", "MultiheadAttention"),
    "row_pruning": _LINEARS,
    "head_pruning": _LINEARS,
    "channel_pruning": ("Conv2d",),
}
"""The kinds of layers that each method applies to."""


def kind_of(module: nn.Module) -> LayerKind | None:
    """The kind of a layer; None if it cannot be compressed."""
    for base, kind in ((nn.Linear, _LINEAR), (nn.Conv2d, _CONV2D), (nn.Embedding, _EMBEDDING)):
        if isinstance(module, base):
            return kind
    if isinstance(module, nn.MultiheadAttention):
        return _PACKED_QKV if module._qkv_same_embed_dim else _SEPARATE_QKV
    for cls in type(module).__mro__:  # parametrisation replaces the class of a module by a subclass
        if cls.__name__ in _BY_NAME and getattr(module, "weight", None) is not None:
            return _as_stored(_BY_NAME[cls.__name__], module)
    return None


def holds_embedding(model: nn.Module, weight: Any) -> bool:
    """Whether `weight` is the table of an embedding of the model, also where it is tied to another layer."""
    tables = (m for m in model.modules() if getattr(m, "weight", None) is weight)
    return any(kind is not None and kind.name in _EMBEDDINGS for kind in map(kind_of, tables))


def _as_stored(kind: LayerKind, module: nn.Module) -> LayerKind:
    """The kind with the dimensions of this module's weight.

    dsx_pipe sets `transposed` on a sliced layer made from a `Conv1D`, whose weight has the shape (inputs, outputs).
    """
    if not kind.sliced or not getattr(module, "transposed", False):
        return kind
    return replace(kind, outputs=kind.inputs, inputs=kind.outputs)


def takes_activations(kind: LayerKind, module: nn.Module) -> bool:
    """Whether a layer's input can be quantised.

    Its kind must take floating-point inputs, and its owner must call it. `MultiheadAttention` does not call its output
    layer, it only reads the weight.
    """
    called = not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return called and kind.name in _KINDS["activation_quantization"]


@dataclass(frozen=True)
class Match:
    """A module of a group.

    Attributes:
        group: name of the group.
        name: name of the module.
        related: names of the modules that are related to it.
    """

    group: str
    name: str
    related: tuple[str, ...] = ()


def match_modules(model: nn.Module, method: str, config: CompressionTraining) -> list[Match]:
    """The modules of every group of a method, in the order of the model.

    Raises:
        CompressionError: a pattern matches no layer of the method's kinds, a module is in two groups, or the related
            modules are not as many as the group's.
    """
    section = getattr(config, method)
    groups = section.different_groups
    if not groups:  # snip_momentum, which has no settings per group
        groups = {"all": None}
    excluded = getattr(section.shared_parameters, "excluded_modules", [])
    layers = {
        name: module
        for name, module in model.named_modules()
        if (kind := kind_of(module)) is not None and kind.name in _KINDS[method] and name
        and (method != "activation_quantization" or takes_activations(kind, module))
    }  # fmt: skip
    for pattern in excluded:
        where = f"compression_training.{method}.shared_parameters.excluded_modules"
        matched_by(pattern, layers, model, where, method)
    found: dict[str, Match] = {}
    for group, settings in groups.items():
        where = f"compression_training.{method}.different_groups.{group}"
        for match in _group_matches(model, method, group, settings, layers, where):
            if any(re.search(pattern, match.name) for pattern in excluded):
                continue
            if match.name in found:
                raise CompressionError(
                    f"{where}: {match.name} is already in the group {found[match.name].group!r}; a module can be in one"
                    f" group of {method} only, so make the patterns of {found[match.name].group!r} or {group!r}"
                    " narrower"
                )
            found[match.name] = match
    order = {name: place for place, name in enumerate(layers)}
    return sorted(found.values(), key=lambda match: order[match.name])


def _group_matches(
    model: nn.Module, method: str, group: str, settings: Any, layers: dict[str, nn.Module], where: str
) -> list[Match]:
    patterns = None if settings is None else settings.modules
    related = (None if settings is None else settings.related_modules) or []
    if patterns is None:
        names = list(layers)
        if not names:
            raise CompressionError(
                f"{where}: the model has no layer that {method} applies to ({', '.join(_KINDS[method])})"
            )
        return [Match(group, name, rel) for name, rel in zip(names, _related_of_each(model, names, related[:1], where))]
    matches: dict[str, Match] = {}
    for place, pattern in enumerate(patterns):
        names = matched_by(pattern, layers, model, f"{where}.modules", method)
        for name, rel in zip(names, _related_of_each(model, names, related[place : place + 1], where)):
            if name in matches and matches[name].related != rel:
                raise CompressionError(
                    f"{where}: two patterns match {name} with different related_modules; make them narrower"
                )
            matches[name] = Match(group, name, rel)
    return list(matches.values())


def matched_by(pattern: str, layers: Iterable[str], model: nn.Module, where: str, method: str) -> list[str]:
    """The layers in whose name a pattern is found.

    Raises:
        CompressionError: there is no such layer. The message has other modules that the pattern matches, or near names.
    """
    layers = list(layers)
    names = [name for name in layers if re.search(pattern, name)]
    if names:
        return names
    others = [f"{n} ({class_name(m)})" for n, m in model.named_modules() if n and re.search(pattern, n)]
    if others:
        raise CompressionError(
            f"{where}: {pattern!r} matches only {', '.join(others[:3])}, to which {method} does not apply; expected one"
            f" of {', '.join(_KINDS[method])}"
        )
    raise CompressionError(f"{where}: {pattern!r} matches no module of the model{near(pattern, layers)}")


def class_name(module: nn.Module) -> str:
    """Name of a module's class, without the prefix that parametrisation adds."""
    return type(module).__name__.removeprefix("Parametrized")


def _related_of_each(model: nn.Module, names: list[str], related: list[list[str]], where: str) -> list[tuple[str, ...]]:
    """The related modules of each module: the i-th match of every related pattern belongs to the i-th module."""
    if not related:
        return [()] * len(names)
    columns = []
    for pattern in related[0]:
        known = [n for n, m in model.named_modules() if _may_be_related(m)]  # in the order of the model
        found = [name for name in known if re.search(pattern, name)]
        if not found:
            raise CompressionError(f"{where}.related_modules: {pattern!r} matches no layer{near(pattern, known)}")
        if len(found) != len(names):
            raise CompressionError(
                f"{where}.related_modules: {pattern!r} matches {len(found)} layers ({', '.join(found[:4])} ...) for "
                f"{len(names)} modules ({', '.join(names[:4])} ...), expected one for each; make the pattern narrower"
            )
        columns.append(found)
    return list(zip(*columns))


def _may_be_related(module: nn.Module) -> bool:
    kind = kind_of(module)
    return isinstance(module, nn.modules.batchnorm._BatchNorm) or (kind is not None and kind.tensors == ("weight",))


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The module or tensor at a dotted name; `""` is the model itself. Numbers index lists of modules.

    Raises:
        AttributeError: a part of the name does not exist.
        IndexError: a list of modules is shorter.
    """
    found = model
    for part in filter(None, module_name.split(".")):
        found = found[int(part)] if part.isdigit() and not hasattr(found, part) else getattr(found, part)
    return found


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Put `module`, a module or tensor, at the dotted name `module_name` of `model`.

    Raises:
        AttributeError: a part of the name before the last does not exist.
    """
    parent, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent), last, module)


def check_consumer(model: nn.Module, producer: str, name: str, outputs: int) -> str:
    """The part of a related module that is removed together with outputs of the producer.

    Args:
        outputs: number of outputs of the producer.

    Returns:
        "inputs" for a linear layer or convolution whose inputs fit; "outputs" if only its outputs fit (the other factor
        of a gated product); "depthwise" for a depthwise convolution; "features" for a batch norm.

    Raises:
        CompressionError: the shapes do not fit.
    """
    related = model.get_submodule(name)
    if isinstance(related, nn.modules.batchnorm._BatchNorm):
        if related.num_features == outputs and related.affine:
            return "features"
        raise CompressionError(
            f"related_modules of {producer}: {name} has {related.num_features} features, affine={related.affine}; "
            f"expected {outputs} features with affine=True (without weight and bias a pruned channel is not zero)"
        )
    kind, weight = kind_of(related), related.weight
    shape = tuple(weight.shape)  # pyright: ignore[reportArgumentType]
    if kind is not None and kind.inputs is not None and kind.outputs is not None:
        inputs = shape[kind.inputs]
        flattened = kind.name in ("Linear", "Conv1D") and isinstance(model.get_submodule(producer), nn.Conv2d)
        if inputs == outputs or (flattened and inputs % outputs == 0):
            return "inputs"
        grouped = getattr(related, "groups", 1)
        if isinstance(related, nn.Conv2d) and grouped == related.in_channels == outputs == related.out_channels:
            return "depthwise"
        if shape[kind.outputs] == outputs and grouped == 1:
            return "outputs"
    raise CompressionError(
        f"related_modules of {producer}: {name} ({class_name(related)}, weight {shape}) neither takes nor gives the "
        f"{outputs} outputs of {producer}; name the layer that follows it"
    )
