"""Checkpoints of DeepSpeed: ZeRO stages 0 to 3, pipelines, slices of tensors, and universal ones.

The layout, as its files and its documentation show it (`test_checkpoint_deepspeed.py` writes such files):

    <dir>/latest                                              text: the tag
    <tag>/mp_rank_00_model_states.pt                          stages 0 to 2: weights, counters, the caller's state
    <tag>/zero_pp_rank_<d>_mp_rank_00_model_states.pt         stage 3: the same without weights, one per rank
    <tag>/[bf16_]zero_pp_rank_<d>_mp_rank_00_optim_states.pt  a rank's flat pieces of masters and optimizer states
    <tag>/layer_<n>-model_<m>-model_states.pt                 pipelines: weights of a layer
    <tag>/layer_<l>_expert_<e>_mp_rank_00_model_states.pt     weights of an expert
    <tag>/zero/<parameter>/{fp32,exp_avg,...}.pt              universal: whole tensors

At stages 1 and 2 the parameters of a group are flattened into one row, which is cut into equal pieces, one per rank;
`param_slice_mappings` says which part of which parameter a piece has. At stage 3 every parameter is cut into equal
pieces, the last one padded. Masters are the parameters in fp32.

Optimizer states of stage 0, which have no names, are in `deepspeed_stage0.py`. Left out: error states of 1-bit
optimizers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...utils.logging import logger
from ..encode import encode
from ..errors import CheckpointArgumentError, CheckpointCorruptError, CheckpointError, shown
from ..files import read_text
from .deepspeed_experts import ExpertNames, add_expert_states
from .deepspeed_pieces import (
    cast,
    concatenated,
    fragments_by_mapping,
    fragments_by_order,
    joined,
    plain_item,
    states_by_name,
    states_of,
    tensors_under,
)
from .deepspeed_stage0 import read_unnamed
from .slices import SliceRules
from .source import Source, Tensor, numbers_of_group
from .unpickling import Opaque, read_file

__all__ = ["deepspeed_folder", "read_deepspeed"]

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)(?:_\d+)?_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)(?:_\d+)?_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_EXPERT = re.compile(r"layer_(-?\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERT_OPTIM = re.compile(r"expp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_RESERVED = frozenset(
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "ds_config",
        "ds_version",
        "num_experts",
        "mp_rank",
        "expert_parallel",
        "universal_checkpoint_info",
    ]
)


def deepspeed_folder(folder: Path, tag: str | None = None) -> Path | None:
    """The folder of a tag, if `folder` is one or has the tag that is asked for, or that `latest` names."""
    if tag is None and _looks_so(folder):
        return folder
    for name in ("latest_universal", "latest"):
        if tag is None and (folder / name).is_file():
            tag = read_text(folder / name).strip()
    found = folder / tag if tag and tag == Path(tag).name else None
    return found if found is not None and _looks_so(found) else None


def _looks_so(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    return (folder / "zero").is_dir() or any(
        _MODEL.fullmatch(p.name) or _LAYER.fullmatch(p.name) for p in folder.iterdir()
    )


@dataclass(frozen=True)
class _Files:
    """The files of a tag: those of each model-parallel rank, in the order of the data-parallel ranks."""

    model: dict[int, list[Path]]
    optim: dict[int, list[Path]]
    layers: list[tuple[int, int, Path]]
    experts: list[Path]
    expert_optim: list[Path]

    @staticmethod
    def find(folder: Path) -> _Files:
        model: dict[int, dict[int, Path]] = {}
        optim: dict[int, dict[int, Path]] = {}
        layers, experts = [], []
        expert_optim: dict[int, Path] = {}
        for path in sorted(folder.iterdir()):
            if found := _OPTIM.fullmatch(path.name):
                optim.setdefault(int(found[2]), {})[int(found[1])] = path
            elif _EXPERT.fullmatch(path.name):
                experts.append(path)
            elif found := _EXPERT_OPTIM.fullmatch(path.name):
                expert_optim[int(found[1])] = path
            elif found := _LAYER.fullmatch(path.name):
                layers.append((int(found[1]), int(found[2]), path))
            elif found := _MODEL.fullmatch(path.name):
                model.setdefault(int(found[2]), {})[int(found[1] or 0)] = path
        for ranks in (*optim.values(), *model.values(), expert_optim):
            if sorted(ranks) != list(range(len(ranks))):
                raise CheckpointCorruptError(
                    f"{folder}: files of ranks are missing; there are those of {sorted(ranks)}"
                )
        ordered = [{mp: [r[k] for k in sorted(r)] for mp, r in by.items()} for by in (model, optim)]
        return _Files(ordered[0], ordered[1], layers, experts, [expert_optim[k] for k in sorted(expert_optim)])


def read_deepspeed(folder: Path) -> Source:
    """A tag's folder as a source.

    Raises:
        CheckpointError: files are missing or do not fit together, or this kind is not read.
    """
    files = _Files.find(folder)
    if not files.model:
        raise CheckpointError(f"{folder}: has no file mp_rank_00_model_states.pt; expected a tag's folder of DeepSpeed")
    parts = [_Part.read(mp, files) for mp in sorted(files.model)]
    first = parts[0]
    rules = SliceRules.of(first.head.get("universal_checkpoint_info"))
    source = Source(kind=f"DeepSpeed {first.head.get('ds_version', '')}".strip())
    for part in parts:
        part.open()
    for kind in ("parameters", "masters", "buffers"):
        setattr(source, kind, rules.merge([getattr(part, kind) for part in parts], buffers=kind == "buffers"))
    keys = {key for part in parts for states in part.states.values() for key in states}
    for key in sorted(keys):
        slices = [{n: s[key] for n, s in part.states.items() if key in s} for part in parts]
        numbers = {n: v for values in slices for n, v in values.items() if not isinstance(v, Tensor)}
        whole = rules.merge([{n: v for n, v in values.items() if isinstance(v, Tensor)} for values in slices])
        for name, value in {**numbers, **whole}.items():
            source.states.setdefault(name, {})[key] = value
    if (folder / "zero").is_dir():
        _add_universal(source, folder / "zero")
    _add_layers(source, files.layers, rules)
    for path in files.experts:
        source.parameters.update({name: Tensor.of(value) for name, value in _tensors(read_file(path)).items()})
    add_expert_states(source, parts, files.expert_optim)
    _tie(source, [pair for part in parts for pair in part.shared])
    source.frozen = frozenset(n for part in parts for n in (part.head.get("frozen_param_shapes") or {}))
    source.frozen &= source.parameters.keys()
    common = folder / "zero" / "optimizer_state.pt"
    source.engine = _training_state(first, read_file(common) if common.is_file() else {})
    source.client = _client_state(first.head)
    if not source.parameters:
        raise CheckpointError(f"{folder}: no weights were found")
    return source


class _Part:
    """The tensors that the data-parallel ranks of one model-parallel rank hold together."""

    def __init__(self, heads: list[Any], optim: list[Any]) -> None:
        self.heads, self.optim = heads, optim
        self.head: dict[str, Any] = heads[0]
        self.parameters: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.masters: dict[str, Tensor] = {}
        self.states: dict[str, dict[str, Any]] = {}
        self.shared = [*_pairs(self.head.get("shared_params")), *_sharing_memory(self.head["module"] or {})]

    @staticmethod
    def read(mp: int, files: _Files) -> _Part:
        heads = [read_file(path) for path in files.model[mp]]
        for head, path in zip(heads, files.model[mp]):
            if not isinstance(head, dict) or "module" not in head:
                raise CheckpointCorruptError(f"{path}: has no key 'module'; expected the model states of DeepSpeed")
        optim = [read_file(path) for path in files.optim.get(mp, [])]
        return _Part(heads, [data["optimizer_state_dict"] for data in optim])

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        saved = plain_item(self.optim[0].get("zero_stage", 0)) if self.optim else 0
        if isinstance(saved, Opaque):  # an enumeration's member, made from its value
            saved = next(iter(saved.made_from[0]), None)
        if type(saved) is not int or not 0 <= saved <= 3:
            raise CheckpointCorruptError(f"zero_stage: got {shown(saved)}, expected 0 to 3")
        return saved

    def open(self) -> None:
        """Find the tensors, without reading their values."""
        module = self.head["module"] or {}
        names = set(self.head.get("buffer_names") or ())
        self.buffers = {n: Tensor.of(v) for n, v in _tensors(module).items() if n in names}
        self.parameters = {n: Tensor.of(v) for n, v in _tensors(module).items() if n not in names and v.numel()}
        if self.stage == 3:
            self._open_stage3()
        elif self.optim:
            self._open_stage12()
        else:
            self._open_plain()

    def _open_stage12(self) -> None:
        """Flat groups, cut into a piece per rank."""
        shapes = _shapes(self.head)
        flats = [tensors_under(sd, "single_partition_of_fp32_groups") for sd in self.optim]
        states = [states_of(sd.get("base_optimizer_state")) for sd in self.optim]
        mappings = [sd.get("param_slice_mappings") for sd in self.optim]
        groups = min(len(flat) for flat in flats)
        for group in range(groups):
            if all(mappings):
                fragments = fragments_by_mapping([m[group] for m in mappings])
            else:
                fragments = fragments_by_order(_group_shapes(self.head, group), [flat[group].numel() for flat in flats])
            for name, where in fragments.items():
                if ExpertNames.is_one(name):
                    continue  # another rank's expert of this name is another one: `_add_expert_states`
                shape = shapes.get(name) or (self.parameters[name].shape if name in self.parameters else None)
                if shape is None:
                    raise CheckpointCorruptError(f"{shown(name)}: nothing says of which shape it is")
                self.masters[name] = joined(name, shape, [flat[group] for flat in flats], where)
                found = states_by_name([s.get(group, {}) for s in states], [flat[group].numel() for flat in flats])
                for key, values in found.items():
                    self.states.setdefault(name, {})[key] = (
                        joined(name, shape, values, where) if isinstance(values, list) else values
                    )

    def _open_stage3(self) -> None:
        """Every parameter cut into a piece per rank."""
        ranks, shapes = len(self.optim), _shapes(self.head)
        rows = [tensors_under(sd, "fp32_flat_groups") for sd in self.optim]
        flats = [row[0].reshape(-1) if len(row) == 1 else torch.cat([f.reshape(-1) for f in row]) for row in rows]
        states = [states_of(sd.get("optimizer_state_dict")) for sd in self.optim]
        rowed = [concatenated(state, [f.numel() for f in row]) for state, row in zip(states, rows)]
        keyed = states_by_name(rowed, [flat.numel() for flat in flats])
        dtype, start = _dtype_of(self.head), 0
        for name, shape in shapes.items():
            each = -(-math.prod(shape) // ranks)
            where = [(rank, start, each) for rank in range(ranks)]
            start += each
            self.masters[name] = master = joined(name, shape, flats, where)
            self.parameters[name] = cast(master, dtype)
            for key, values in keyed.items():
                self.states.setdefault(name, {})[key] = (
                    joined(name, shape, values, where) if isinstance(values, list) else values
                )
        fragments = [head.get("frozen_param_fragments") or {} for head in self.heads]
        for name, shape in (self.head.get("frozen_param_shapes") or {}).items():
            pieces = [part[name].reshape(-1) for part in fragments if name in part]
            where = [(rank, 0, piece.numel()) for rank, piece in enumerate(pieces)]
            self.parameters[name] = joined(name, tuple(shape), pieces, where)

    def _open_plain(self) -> None:
        """Stage 0: states without names."""
        saved = self.head.get("optimizer")
        if not saved:
            return
        shared = {name for name, _ in self.shared}
        frozen = self.head.get("frozen_param_shapes") or {}
        names = [n for n in self.parameters if n not in shared]
        trained = [n for n in names if n not in frozen]
        found = read_unnamed(saved, trained, self.parameters) or read_unnamed(saved, names, self.parameters)
        if found is None:
            logger.warning(
                "import: the optimizer's states do not say to which of the %d parameters each belongs, so the optimizer"
                " starts from its initial state", len(trained),
            )  # fmt: skip
            return
        self.masters.update(found.masters)
        self.states.update(found.states)


# - The rest


def _tensors(mapping: Any) -> dict[str, torch.Tensor]:
    return {n: v for n, v in mapping.items() if isinstance(n, str) and isinstance(v, torch.Tensor)}


def _shapes(head: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    groups = head.get("param_shapes") or []
    groups = groups if isinstance(groups, (list, tuple)) else [groups]
    return {name: tuple(shape) for group in groups for name, shape in group.items()}


def _group_shapes(head: dict[str, Any], group: int) -> dict[str, tuple[int, ...]]:
    groups = head.get("param_shapes") or []
    if not isinstance(groups, (list, tuple)) or group >= len(groups):
        raise CheckpointCorruptError(f"param_shapes has no group {group}")
    return {name: tuple(shape) for name, shape in groups[group].items()}


def _dtype_of(head: dict[str, Any]) -> torch.dtype:
    """The dtype of the model's parameters, from the configuration."""
    config = head.get("ds_config") or {}
    for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        section = config.get(key) if isinstance(config, dict) else None
        if isinstance(section, dict) and section.get("enabled"):
            return dtype
    return torch.float32


def _pairs(shared: Any) -> list[tuple[str, str]]:
    """(another name, name) of shared parameters."""
    items = shared.items() if isinstance(shared, dict) else shared or []
    return [(str(item[0]), str(item[1])) for item in items]


def _sharing_memory(module: dict[str, Any]) -> list[tuple[str, str]]:
    """(another name, name) of tensors that are one in the file: stage 0 does not list tied parameters."""
    first: dict[Any, str] = {}
    pairs = []
    for name, value in _tensors(module).items():
        if value.numel():
            key = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype)
            if first.setdefault(key, name) != name:
                pairs.append((name, first[key]))
    return pairs


def _tie(source: Source, pairs: list[tuple[str, str]]) -> None:
    for other, name in pairs:
        if other == name or name not in source.parameters or other in source.aliases.get(name, ()):
            continue
        for values in (source.parameters, source.masters, source.states):
            values.pop(other, None)
        source.aliases[name] = (*source.aliases.get(name, ()), other)


def _add_universal(source: Source, folder: Path) -> None:
    """Whole tensors, a folder per parameter; names may have separators in them."""
    for path in sorted(folder.rglob("fp32.pt")):
        name = str(path.parent.relative_to(folder)).replace("/", ".")
        for file in sorted(path.parent.glob("*.pt")):
            found = read_file(file)
            value = found.get("param") if isinstance(found, dict) else found
            if file.stem == "fp32":
                if not isinstance(value, torch.Tensor):
                    raise CheckpointCorruptError(f"{file}: got {type(value).__name__}, expected a tensor")
                source.masters[name] = Tensor.of(value)
                dtype = source.parameters[name].dtype if name in source.parameters else value.dtype
                source.parameters[name] = cast(source.masters[name], dtype)
            elif isinstance(value, torch.Tensor) and value.dim() and value.numel() > 1:
                source.states.setdefault(name, {})[file.stem] = Tensor.of(value)
            elif value is not None:
                source.states.setdefault(name, {})[file.stem] = plain_item(value)


def _add_layers(source: Source, layers: list[tuple[int, int, Path]], rules: SliceRules) -> None:
    """Layers of a pipeline: `<number of the layer>.<name in the layer>`, as in the module."""
    by_slice: dict[int, dict[str, Tensor]] = {}
    for number, part, path in layers:
        for name, value in _tensors(read_file(path)).items():
            by_slice.setdefault(part, {})[f"{number}.{name}"] = Tensor.of(value)
    found = rules.merge([by_slice[part] for part in sorted(by_slice)])
    known = {**source.parameters, **source.buffers}
    source.parameters.update({name: value for name, value in found.items() if name not in known})


def _training_state(part: _Part, common: Any) -> dict[str, Any]:
    """Counters, groups, schedule and loss scale, in the form of `TrainingState`.

    Args:
        common: the part of the optimizer that is not tensors, in a universal checkpoint.
    """
    head = part.head
    steps, config = _count(head, "global_steps"), head.get("ds_config") or {}
    accumulation = config.get("gradient_accumulation_steps", 1) if isinstance(config, dict) else 1
    optim = part.optim[0] if part.optim else common if isinstance(common, dict) else {}
    base = optim.get("base_optimizer_state") or optim.get("optimizer_state_dict") or head.get("optimizer") or optim
    if isinstance(base, dict):  # of stage 0 in 16 bits
        base = {**base, **(inner if isinstance(inner := base.get("optimizer_state_dict"), dict) else {})}
    groups = base.get("param_groups", []) if isinstance(base, dict) else []
    schedule = head.get("lr_scheduler")
    return {
        "counters": {
            "global_steps": steps, "global_samples": _count(head, "global_samples"),
            "skipped_steps": _count(head, "skipped_steps"),
            "micro_steps": steps * (accumulation if isinstance(accumulation, int) else 1),
        },
        "param_groups": [numbers_of_group(group) for group in groups if isinstance(group, dict)],
        "precision": {},
        "lr_scheduler": schedule if isinstance(schedule, dict) and _encodable(schedule) else {},
        "loss_scaler": _loss_scale(optim.get("loss_scaler", base)),
        "data": {},
        "config": config if isinstance(config, dict) and _encodable(config) else {},
        "versions": {"deepspeed": str(head.get("ds_version", ""))},
    }  # fmt: skip


def _count(head: dict[str, Any], key: str) -> int:
    value = head.get(key, 0)
    return value if type(value) is int and value >= 0 else 0


def _loss_scale(saved: Any) -> dict[str, Any]:
    """The scale of fp16; other precisions have one of 1 that never changes."""
    found = saved if isinstance(saved, dict) and saved.get("dynamic_loss_scale") else {}
    value: Callable[..., Any] = saved.value if isinstance(saved, Opaque) else found.get
    scale, iteration = value("cur_scale"), value("cur_iter")
    if not isinstance(scale, (int, float)) or not isinstance(iteration, int):
        return {"kind": "none"}
    return {
        "kind": "dynamic", "scale": float(scale), "hysteresis_left": value("cur_hysteresis", 1), "step": iteration,
        "last_overflow": value("last_overflow_iter", -1),
    }  # fmt: skip


def _client_state(head: dict[str, Any]) -> dict[str, Any]:
    """The plain values of the caller's state."""
    found = {key: value for key, value in head.items() if isinstance(key, str) and key not in _RESERVED}
    lost = [key for key, value in found.items() if not _encodable(value)]
    if lost:
        logger.warning("import: left out of the caller's state, because it needs code to be read: %s", ", ".join(lost))
    return {key: value for key, value in found.items() if key not in lost}


def _encodable(value: Any) -> bool:
    try:
        encode(value, "state", {})
    except CheckpointArgumentError:
        return False
    return True
