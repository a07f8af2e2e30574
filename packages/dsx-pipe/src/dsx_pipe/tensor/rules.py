"""Slicing a whole model by rules: which of its layers are cut, and how.

    slice_model(model, group=group)                           # GPT-2, Llama and BERT layouts of Hugging Face
    slice_model(model, group=group, config=partition_config)  # your own rules

Rules are patterns of module names. A layer keeps its name and its parameters' names; the parameters are pieces of the
old ones and have Megatron's attributes. The number of heads of attention modules is set to that of the slice. Dropout
inside a sliced region draws from each rank's own generator.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dsx_comm
import torch
from torch import nn

from ..errors import TensorSliceError
from .linear import ColumnParallelLinear, RowParallelLinear
from .regions import sum_gradients_over_slices
from .sequence import add_sequence_regions
from .slices import check_divides
from .vocabulary import VocabParallelEmbedding


@dataclass(frozen=True)
class LayerRule:
    """A rule that says how the layers whose names match are split.

    Attributes:
        patterns: regular expressions, matched at the end of a module's (or its weight's) name.
        kind: "column", "row", "vocabulary" (an embedding), "head" (a projection to the vocabulary, with the whole
            output), "per_head" (a module of any kind that stays whole and that each rank uses on its own heads, so its
            gradients are summed) or "skip".
        parts: number of equal layers fused into one weight.
        gather_output: return the whole output (column). Then the pieces may differ in size, as those of a "head" do.
    """

    patterns: tuple[str, ...]
    kind: str
    parts: int = 1
    gather_output: bool = False

    @property
    def uneven(self) -> bool:
        """Whether the ranks may hold pieces of different sizes: nothing behind the layer sees the pieces."""
        return self.kind == "head" or (self.kind == "column" and self.gather_output and self.parts == 1)

    def matches(self, name: str) -> bool:
        """True if a pattern matches the end of a module's name, or of its weight's name."""
        return any(re.search(rf"(?:{p})$", name) or re.search(rf"(?:{p})$", f"{name}.weight") for p in self.patterns)


_EMBEDDING_AND_HEAD = (
    LayerRule((r"(^|\.)(wte|embed_tokens|word_embeddings)",), "vocabulary"),
    LayerRule((r"(^|\.)lm_head",), "head"),
)
PRESETS: dict[str, tuple[LayerRule, ...]] = {
    "gpt2": (
        LayerRule((r"attn\.c_attn",), "column", parts=3),
        LayerRule((r"attn\.c_proj", r"mlp\.c_proj"), "row"),
        LayerRule((r"mlp\.c_fc",), "column"),
        *_EMBEDDING_AND_HEAD,
    ),
    "llama": (
        LayerRule((r"self_attn\.[qkv]_proj", r"mlp\.(gate|up)_proj"), "column"),
        LayerRule((r"self_attn\.o_proj", r"mlp\.down_proj"), "row"),
        *_EMBEDDING_AND_HEAD,
    ),
    "bert": (
        LayerRule((r"attention\.self\.(query|key|value)", r"intermediate\.dense"), "column"),
        LayerRule((r"(attention\.)?output\.dense",), "row"),
    ),
}
for _name in ("mistral", "qwen2", "gemma"):
    PRESETS[_name] = PRESETS["llama"]
PRESETS["qwen3"] = (*PRESETS["llama"], LayerRule((r"self_attn\.[qk]_norm",), "per_head"))
PRESETS["roberta"] = PRESETS["bert"]

# attributes in which an attention module keeps numbers of heads and sizes of the whole layer
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "split_size", "all_head_size")


def rules_of(config: dict[str, Any]) -> tuple[LayerRule, ...]:
    """Make rules from a `partition_config`: {use_default_specs, layer_specs: [{patterns, partition_type, shape, ...}]}.

    Raises:
        TensorSliceError: a key or a value is unknown.
    """
    unknown = set(config) - {"use_default_specs", "layer_specs"}
    if unknown:
        raise TensorSliceError(
            f"partition_config: unknown key {sorted(unknown)[0]!r}; known are use_default_specs, layer_specs"
        )
    found = []
    for i, spec in enumerate(config.get("layer_specs", [])):
        where = f"partition_config.layer_specs[{i}]"
        unknown = set(spec) - {"patterns", "partition_type", "shape", "partition_dim", "gather_output"}
        if unknown:
            raise TensorSliceError(f"{where}: unknown key {sorted(unknown)[0]!r}")
        kind = spec.get("partition_type", "column")
        if kind not in ("column", "row", "skip"):
            raise TensorSliceError(f"{where}.partition_type: got {kind!r}, expected 'column', 'row' or 'skip'")
        patterns = spec.get("patterns") or ()
        if isinstance(patterns, str) or not patterns:
            raise TensorSliceError(f"{where}.patterns: expected a list of regular expressions")
        if spec.get("partition_dim") not in (None, 0):
            raise TensorSliceError(
                f"{where}.partition_dim: got {spec['partition_dim']}, expected 0 (each part is cut along it)"
            )
        found.append(
            LayerRule(
                tuple(patterns), kind, _number_of_parts(spec.get("shape"), where), bool(spec.get("gather_output"))
            )
        )
    return tuple(found)


def _number_of_parts(shape: Any, where: str) -> int:
    """Number of fused parts from a shape like [3, -1]."""
    if shape is None:
        return 1
    if not isinstance(shape, (list, tuple)) or len(shape) != 2 or shape[1] != -1 or not isinstance(shape[0], int):
        raise TensorSliceError(f"{where}.shape: got {shape!r}, expected [number of equal parts, -1]")
    return shape[0]


def slice_model(
    model: nn.Module,
    group: Any = None,
    *,
    preset: str | None = None,
    config: dict[str, Any] | None = None,
    overlap: bool = False,
    sequence_parallel: bool = False,
) -> nn.Module:
    """Cut a model's layers over the ranks of a group, in place. Before the call every rank has the whole model.

    Args:
        model: any module; without `preset` and `config` its `config.model_type` must have a preset.
        group: process group that shares the model; None: the default group.
        preset: gpt2, llama, mistral, qwen2, qwen3, gemma, bert or roberta.
        config: `partition_config`. Its rules replace the preset's; with `use_default_specs` they come before them.
        overlap: column layers sum their input's gradient over the ranks while they compute the weight's gradient.
        sequence_parallel: between the sliced layers of a block each rank works on its part of the sequence
            (`sequence.py`); the length of sequences must be a multiple of the ranks.

    Returns:
        The model.

    Raises:
        TensorSliceError: no rules are known, no rule matches a layer, sizes or heads do not divide, or options exclude
            each other. The model is not changed then.
    """
    rules = _rules_for(model, preset, config)
    size = dsx_comm.get_world_size(group)
    if overlap and sequence_parallel:
        raise TensorSliceError(
            "overlap (tp_overlap_comm): not together with sequence_parallel by rule, where the input is gathered once "
            "for several layers and its gradient is reduced once; leave one out"
        )
    plan: list[tuple[str, nn.Module, LayerRule]] = []
    for name, module in model.named_modules():
        rule = next((r for r in rules if _sliceable(module) and r.matches(name)), None)
        if rule is not None and rule.kind not in ("skip", "per_head"):
            _check_layer(name, module, rule, size)
            plan.append((name, module, rule))
    if not plan:
        raise TensorSliceError(
            f"{type(model).__name__}: no layer matches the rules {[p for r in rules for p in r.patterns]}"
        )
    _check_heads(model, size)
    attentions = _modules_with_counts(model, plan)
    for attention in attentions:
        _check_counts(attention, size)
    blocks = _name_of_blocks(model, plan) if sequence_parallel else ""
    if size == 1:
        return model
    made: dict[int, nn.Parameter] = {}
    in_blocks: list[nn.Module] = []
    for name, module, rule in plan:
        owner, _, attribute = name.rpartition(".")
        parent = model.get_submodule(owner)
        is_inside = bool(blocks) and name.startswith(f"{blocks}.")
        sliced = _slice_layer(module, rule, group, overlap, is_inside)
        in_blocks += [sliced] if is_inside else []
        for key, old in module.named_parameters():  # weights that are tied stay tied
            if id(old) in made:
                setattr(sliced, key, made[id(old)])
            else:
                made[id(old)] = getattr(sliced, key)
        setattr(parent, attribute, sliced)
    for attention in attentions:
        _divide_counts(attention, size)
    for name, module in list(model.named_modules()):
        if any(rule.kind == "per_head" and rule.matches(name) for rule in rules):
            sum_gradients_over_slices(module, group)
    if blocks:
        add_sequence_regions(model.get_submodule(blocks), in_blocks, group)  # type: ignore[arg-type]
    return model


def _name_of_blocks(model: nn.Module, plan: list[tuple[str, nn.Module, LayerRule]]) -> str:
    """Name of the list of blocks that has the column- and row-parallel layers."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    found = set()
    for name, _, rule in plan:
        if rule.kind in ("column", "row"):
            found.add(next((one for one in lists if name.startswith(f"{one}.")), None))  # the outermost comes first
    if len(found) != 1 or None in found:
        inside = ", ".join(sorted(str(one) for one in found))
        raise TensorSliceError(
            f"sequence_parallel: the sliced layers of {type(model).__name__} lie in {inside}, expected one "
            "nn.ModuleList of blocks; build the regions by hand (scatter_sequence, gather_from_sequence)"
        )
    return str(found.pop())


def _rules_for(model: nn.Module, preset: str | None, config: dict[str, Any] | None) -> tuple[LayerRule, ...]:
    if preset is not None and preset not in PRESETS:
        raise TensorSliceError(f"preset_model: got {preset!r}, expected one of {', '.join(sorted(PRESETS))}")
    kind = preset or getattr(getattr(model, "config", None), "model_type", None)
    known = PRESETS.get(str(kind), ())
    own = rules_of(config) if config is not None else ()
    if config is not None and not config.get("use_default_specs", False):
        known = ()
    if not own and not known:
        raise TensorSliceError(
            f"{type(model).__name__}: there are no rules for it; pass preset= ({', '.join(sorted(PRESETS))}) or "
            "config= with layer_specs"
        )
    return (*own, *known)


def _sliceable(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Embedding)) or _transposed(module)


def _transposed(module: nn.Module) -> bool:
    """True for Hugging Face's Conv1D: a linear layer whose weight has the shape [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _in_out_features(module: Any) -> tuple[int, int]:
    """(in, out) of a linear layer."""
    out, into = module.weight.shape
    return (out, into) if _transposed(module) else (into, out)


def _check_layer(name: str, module: nn.Module, rule: LayerRule, size: int) -> None:
    if rule.kind == "vocabulary":
        if not isinstance(module, nn.Embedding):
            raise TensorSliceError(f"{name}: got {type(module).__name__}, expected an nn.Embedding")
        return
    if isinstance(module, nn.Embedding):
        raise TensorSliceError(f"{name}: an nn.Embedding cannot be cut as {rule.kind!r}")
    into, out = _in_out_features(module)
    if rule.kind == "column" and not rule.uneven:
        try:
            check_divides(out, size, f"{name}: output features", rule.parts)
        except TensorSliceError as error:
            if rule.parts > 1:
                raise
            hint = "with gather_output the pieces may differ in size, for a projection to a vocabulary"
            raise TensorSliceError(f"{error}; {hint}") from None
    elif rule.kind == "row":
        check_divides(into, size, f"{name}: input features")


def _check_heads(model: nn.Module, size: int) -> None:
    config = getattr(model, "config", None)
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % size:
            raise TensorSliceError(
                f"config.{key}: got {heads} heads, expected a multiple of the {size} ranks of the group"
            )


def _slice_layer(module: Any, rule: LayerRule, group: Any, overlap: bool, sequence: bool) -> nn.Module:
    trains = {n: p.requires_grad for n, p in module.named_parameters()}
    if rule.kind == "vocabulary":
        rows, columns = module.weight.shape
        found: nn.Module = VocabParallelEmbedding(
            rows, columns, module.padding_idx, group, whole=module.weight.detach()
        )
    else:
        into, out = _in_out_features(module)
        whole = (module.weight.detach(), None if module.bias is None else module.bias.detach())
        transposed = _transposed(module)
        if rule.kind == "row":
            found = RowParallelLinear(
                into, out, group=group, transposed=transposed, whole=whole, sequence_parallel=sequence
            )
        else:
            head = rule.kind == "head"
            found = ColumnParallelLinear(
                into, out, group=group, gather_output=head or rule.gather_output, parts=rule.parts,
                transposed=transposed, overlap=overlap, whole=whole, uneven=rule.uneven, input_is_gathered=sequence,
            )  # fmt: skip
    for name, parameter in found.named_parameters():
        parameter.requires_grad_(trains[name])
    return found.train(module.training)


def _modules_with_counts(model: nn.Module, plan: list[tuple[str, nn.Module, LayerRule]]) -> set[nn.Module]:
    """The modules that own column-parallel layers: their head counts become those of the slice."""
    return {
        model.get_submodule(name.rpartition(".")[0])
        for name, _, rule in plan if rule.kind == "column" and not rule.gather_output
    }  # fmt: skip


def _counts_of(attention: nn.Module) -> dict[str, int]:
    held = {key: attention.__dict__.get(key) for key in _HEAD_COUNTS}
    return {key: value for key, value in held.items() if isinstance(value, int) and not isinstance(value, bool)}


def _check_counts(attention: nn.Module, size: int) -> None:
    for key, value in _counts_of(attention).items():
        check_divides(value, size, f"{type(attention).__name__}.{key}")


def _divide_counts(attention: nn.Module, size: int) -> None:
    for key, value in _counts_of(attention).items():
        setattr(attention, key, value // size)


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype | None = None,
    config: dict[str, Any] | None = None,
    *,
    preset: str | None = None,
    overlap: bool = False,
    sequence_parallel: bool = False,
) -> nn.Module:
    """DeepSpeed's name: cut a model over groups of `tp_size` neighbouring ranks. All ranks of the world call it.

    Args:
        model: a model with the same values on all ranks of a group.
        tp_size: number of ranks per copy of the model.
        dtype: dtype to which the model is cast first; None: no cast.
        config: `partition_config`.
        preset, overlap, sequence_parallel: as in `slice_model`.

    Raises:
        TensorSliceError: the world size is not a multiple of `tp_size`, or as for `slice_model`.
    """
    world = dsx_comm.get_world_size()
    if tp_size < 1 or world % tp_size:
        raise TensorSliceError(f"tp_size: got {tp_size}, expected a divisor of the world size {world}")
    group = dsx_comm.GroupRegistry().blocks(tp_size).group
    return slice_model(
        model if dtype is None else model.to(dtype), group,
        preset=preset, config=config, overlap=overlap, sequence_parallel=sequence_parallel,
    )  # fmt: skip


__all__: Sequence[str] = ["PRESETS", "LayerRule", "rules_of", "slice_model", "tp_model_init"]
