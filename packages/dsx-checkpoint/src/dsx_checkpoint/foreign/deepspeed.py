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

import logging
import math
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointCorruptError, CheckpointError, shown
from .deepspeed_experts import ExpertNames, add_expert_states, same_values
from .deepspeed_files import DeepSpeedFiles, deepspeed_folder
from .deepspeed_pieces import (
    Where,
    cast,
    check_used_up,
    concatenated,
    fragments_by_mapping,
    fragments_by_order,
    joined,
    number_of_groups,
    plain_item,
    states_by_name,
    states_of,
    tensors_under,
)
from .deepspeed_stage0 import read_unnamed
from .deepspeed_state import client_state, training_state
from .slices import SliceRules
from .source import Source, Tensor
from .unpickling import Opaque, read_file

logger = logging.getLogger("dsx.checkpoint")

__all__ = ["deepspeed_folder", "read_deepspeed"]


def read_deepspeed(folder: Path) -> Source:
    """A tag's folder as a source.

    Raises:
        CheckpointError: files are missing or do not fit together, or this kind is not read.
    """
    files = DeepSpeedFiles.find(folder)
    if not files.model:
        raise CheckpointError(f"{folder}: has no file mp_rank_00_model_states.pt; expected a tag's folder of DeepSpeed")
    parts = [_Part.read(mp, files) for mp in sorted(files.model)]
    first = parts[0]
    _check_counts(folder, first.head, files)
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
        _check_masters({name: shape for part in parts for name, shape in _shapes(part.head).items()}, source.masters)
    _add_layers(source, files.layers, rules)
    _add_experts(source, files, rules)
    add_expert_states(source, parts, files.expert_optim)
    _tie(source, [pair for part in parts for pair in part.shared])
    source.frozen = frozenset(n for part in parts for n in (part.head.get("frozen_param_shapes") or {}))
    _check_whole(folder, source, parts)
    if not source.states:
        logger.warning("import: %s: no optimizer states were found, so only weights are imported", folder)
    common = folder / "zero" / "optimizer_state.pt"
    source.engine = training_state(first, read_file(common) if common.is_file() else {})
    source.client = client_state(first.head)
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
    def read(mp: int, files: DeepSpeedFiles) -> _Part:
        heads = [read_file(path) for path in files.model[mp]]
        for head, path in zip(heads, files.model[mp]):
            if not isinstance(head, dict) or "module" not in head:
                raise CheckpointCorruptError(f"{path}: has no key 'module'; expected the model states of DeepSpeed")
        optim = [read_file(path)["optimizer_state_dict"] for path in files.optim.get(mp, [])]
        for path, saved in zip(files.optim.get(mp, []), optim):
            count = saved.get("partition_count")
            count = max(count, default=None) if isinstance(count, (list, tuple)) else count
            if type(count) is int and count != len(optim):
                raise CheckpointCorruptError(
                    f"{path}: was saved by {count} ranks, and there are the optimizer states of {len(optim)}; files are"
                    " missing, or are of two saves"
                )
        return _Part(heads, optim)

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
        other: list[str] = []
        for group in range(number_of_groups(flats)):
            rows = [flat[group] for flat in flats]
            for name, where in self._fragments(group, rows).items():
                if ExpertNames.is_one(name):
                    continue  # another rank's expert of this name is another one: `add_expert_states`
                shape = shapes.get(name) or (self.parameters[name].shape if name in self.parameters else None)
                if shape is None:
                    raise CheckpointCorruptError(f"{shown(name)}: nothing says of which shape it is")
                self.masters[name] = joined(name, shape, rows, where)
                if len(where) > 1 and not same_values(self.masters, self.parameters, {name} & self.parameters.keys()):
                    other.append(name)  # nothing else says whether the ranks' pieces are in the right order
                found = states_by_name([s.get(group, {}) for s in states], [row.numel() for row in rows])
                for key, values in found.items():
                    self.states.setdefault(name, {})[key] = (
                        joined(name, shape, values, where) if isinstance(values, list) else values
                    )
        _check_masters(shapes, self.masters)
        if other:
            logger.warning(
                "import: the masters of %d parameters are not their weights, such as %s: files of ranks may have been"
                " exchanged", len(other), shown(other[0]),
            )  # fmt: skip

    def _fragments(self, group: int, rows: list[torch.Tensor]) -> dict[str, Where]:
        """The places of a group's parameters in the ranks' rows."""
        mappings = [sd.get("param_slice_mappings") for sd in self.optim]
        if all(mappings):
            return fragments_by_mapping([mapping[group] for mapping in mappings])
        shapes = _group_shapes(self.head, group)
        used, there = sum(math.prod(shape) for shape in shapes.values()), sum(row.numel() for row in rows)
        unit = 2 * len(rows)  # the whole row is padded to a multiple of it, of which files have all or nothing
        check_used_up(f"group {group}", -(-used // unit) * unit, -(-there // unit) * unit)
        return fragments_by_order(shapes, [row.numel() for row in rows])

    def _open_stage3(self) -> None:
        """Every parameter cut into a piece per rank."""
        ranks, shapes = len(self.optim), _shapes(self.head)
        rows = [tensors_under(sd, "fp32_flat_groups") for sd in self.optim]
        number_of_groups(rows)
        flats = [row[0].reshape(-1) if len(row) == 1 else torch.cat([f.reshape(-1) for f in row]) for row in rows]
        each = {name: -(-math.prod(shape) // ranks) for name, shape in shapes.items()}
        for rank, flat in enumerate(flats):
            check_used_up(f"rank {rank}", sum(each.values()), flat.numel())
        states = [states_of(sd.get("optimizer_state_dict")) for sd in self.optim]
        rowed = [concatenated(state, [f.numel() for f in row]) for state, row in zip(states, rows)]
        keyed = states_by_name(rowed, [flat.numel() for flat in flats])
        dtype, start = _dtype_of(self.head), 0
        for name, shape in shapes.items():
            where = [(rank, start, each[name]) for rank in range(ranks)]
            start += each[name]
            self.masters[name] = master = joined(name, shape, flats, where, padding=ranks)
            self.parameters[name] = cast(master, dtype)
            for key, values in keyed.items():
                self.states.setdefault(name, {})[key] = (
                    joined(name, shape, values, where, padding=ranks) if isinstance(values, list) else values
                )
        fragments = [head.get("frozen_param_fragments") or {} for head in self.heads]
        for name, shape in (self.head.get("frozen_param_shapes") or {}).items():
            pieces = [part[name].reshape(-1) for part in fragments if name in part]
            where = [(rank, 0, piece.numel()) for rank, piece in enumerate(pieces)]
            self.parameters[name] = joined(name, tuple(shape), pieces, where, padding=ranks)

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


def _check_masters(trained: dict[str, tuple[int, ...]], masters: dict[str, Tensor]) -> None:
    """Raise `CheckpointCorruptError` if a trained parameter has no master; its optimizer states would be lost too."""
    lost = [n for n, shape in trained.items() if n not in masters and not ExpertNames.is_one(n) and math.prod(shape)]
    if lost:
        raise CheckpointCorruptError(
            f"the optimizer states have no masters of {len(lost)} parameters that are trained, such as"
            f" {shown(lost[0])}: files are missing, or stand in the place of others"
        )


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


def _check_counts(folder: Path, head: dict[str, Any], files: DeepSpeedFiles) -> None:
    """Compare the number of model-parallel ranks and of experts with the files that are there."""
    ranks, experts = head.get("mp_world_size"), head.get("num_experts")
    if type(ranks) is int and ranks > len(files.model):
        raise CheckpointCorruptError(
            f"{folder}: was saved by {ranks} model-parallel ranks, and there are files of {len(files.model)}"
        )
    found = [len(layer) for layer in files.experts.values()]
    if isinstance(experts, list) and files.experts and not files.layers and found != experts:
        raise CheckpointCorruptError(
            f"{folder}: files are missing: the layers had {shown(experts)} experts, and there are files of {found}"
        )


def _check_whole(folder: Path, source: Source, parts: list[_Part]) -> None:
    """Raise `CheckpointCorruptError` unless everything of which the model states or the optimizer states speak was
    found. Weights of a pipeline under names that no file has (tied layers) are taken from their masters.
    """
    dtype = _dtype_of(parts[0].head)
    for name, master in source.masters.items():
        source.parameters.setdefault(name, cast(master, dtype))
    tied = {other for others in source.aliases.values() for other in others}
    named: set[str] = set(source.states) | source.frozen
    for part in parts:
        named |= {*_shapes(part.head), *map(str, part.head.get("buffer_names") or ())}
    known = {*source.parameters, *source.buffers, *tied}
    # Files of pipelines have the tied layers under the numbers of their places.
    lost = sorted(n for n in named - known if not ExpertNames.is_one(n) and not n.startswith("tied_modules."))
    if lost:
        raise CheckpointCorruptError(
            f"{folder}: {len(lost)} tensors of the model are in no file, such as {shown(lost[0])}: files are missing,"
            " or were edited"
        )
    new = [name for name in source.masters if name not in source.states]
    if new and source.states:
        logger.warning(
            "import: %d of %d trained parameters have no optimizer states, such as %s: these start from zero",
            len(new), len(source.masters), shown(new[0]),
        )  # fmt: skip


def _add_experts(source: Source, files: DeepSpeedFiles, rules: SliceRules) -> None:
    by_slice: dict[int, dict[str, Tensor]] = {}
    for expert in (expert for layer in files.experts.values() for expert in layer):
        for part, path in expert.items():
            by_slice.setdefault(part, {}).update({n: Tensor.of(v) for n, v in _tensors(read_file(path)).items()})
    source.parameters.update(rules.merge([by_slice[part] for part in sorted(by_slice)]))


def _add_layers(source: Source, layers: list[tuple[int, int, Path]], rules: SliceRules) -> None:
    """Layers of a pipeline: `<number of the layer>.<name in the layer>`, as in the module."""
    by_slice: dict[int, dict[str, Tensor]] = {}
    for number, part, path in layers:
        for name, value in _tensors(read_file(path)).items():
            by_slice.setdefault(part, {})[f"{number}.{name}"] = Tensor.of(value)
    found = rules.merge([by_slice[part] for part in sorted(by_slice)])
    known = {**source.parameters, **source.buffers}
    source.parameters.update({name: value for name, value in found.items() if name not in known})
