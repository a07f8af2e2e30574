"""Writing a checkpoint.

The call sequence (all ranks take every step; a failure on one rank becomes the same error on all):

    0) every rank lists the slices it owns; the lists are merged into one catalogue
    1) rank 0 makes a temporary folder beside the target and the files in it, at full size, with their headers
    2) every rank writes its own byte ranges, hashes them, and flushes
    3) rank 0 writes the index with all hashes and flushes
    4) rank 0 renames the folder to its final name: from here on the checkpoint exists
    5) rank 0 replaces `latest`

Until step 4 nothing that was there before has been touched; a process killed earlier leaves only a `.tmp-` folder, which
the next save of the same tag clears away. Left out: asynchronous saving.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .encode import encode
from .errors import CheckpointError
from .files import create, opened, replace_text, write_range
from .folder import check_folder, check_one_folder, check_tag, publish, saving, temporary_name
from .format import (
    CLIENT,
    INDEX_NAME,
    MODEL,
    OPTIMIZER,
    WEIGHT_MAP_NAME,
    Index,
    Placed,
    Slice,
    TensorSpec,
    dtype_name,
)
from .plan import MAX_FILE_BYTES, FilePlan, plan_files
from .ranks import Ranks, default_ranks


@dataclass
class _Item:
    """One range of one tensor that this rank writes."""

    spec: TensorSpec
    start: int
    data: torch.Tensor


@dataclass
class _Share:
    """What this rank contributes: ranges per file family, single numbers, names."""

    items: dict[str, list[_Item]] = field(default_factory=lambda: {MODEL: [], OPTIMIZER: [], CLIENT: []})
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    excluded: list[str] = field(default_factory=list)

    def add(self, family: str, name: str, shape: Sequence[int], start: int, data: torch.Tensor) -> None:
        """Take a range into the share; empty ranges only announce the tensor."""
        self.items[family].append(_Item(TensorSpec(name, dtype_name(data.dtype), tuple(shape)), start, data))


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each buffer that belongs to the state_dict, shared ones once."""
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


def _share_of(slices: Iterable[Any], module: nn.Module, rank: int, exclude_frozen: bool) -> _Share:
    share = _Share()
    for part in slices:
        if exclude_frozen and not part.trainable:
            share.excluded.append(part.name)
            continue
        share.aliases[part.name] = tuple(part.aliases)
        share.add(MODEL, part.name, part.shape, part.start, part.param)
        if part.master is not None and part.master.dtype != part.param.dtype:
            share.add(OPTIMIZER, f"master/{part.name}", part.shape, part.start, part.master)
        for key, value in part.states.items():
            _add_state(share, key, value, part)
        for key, start, values in part.ranges:
            share.add(OPTIMIZER, f"{key}/{part.name}", part.shape, start, values)
    if rank == 0:
        for name, buffer in persistent_buffers(module):
            share.add(MODEL, name, buffer.shape, 0, buffer.detach().reshape(-1))
    return share


def _add_state(share: _Share, key: str, value: Any, part: Any) -> None:
    if not isinstance(value, torch.Tensor):
        share.scalars.setdefault(key, {})[part.name] = value
    elif value.dim() == 0:
        share.scalars.setdefault(key, {})[part.name] = value.item()
    elif value.numel() == part.stop - part.start:
        share.add(OPTIMIZER, f"{key}/{part.name}", part.shape, part.start, value.reshape(-1))
    else:
        raise CheckpointError(
            f"optimizer state {key!r} of {part.name!r} has {value.numel()} elements for a slice of {part.stop - part.start}; "
            "expected one number or one element per parameter element"
        )


def _merge_specs(shares: list[dict[str, TensorSpec]]) -> list[TensorSpec]:
    merged: dict[str, TensorSpec] = {}
    for rank, specs in enumerate(shares):
        for name, spec in specs.items():
            known = merged.setdefault(name, spec)
            if known != spec:
                raise CheckpointError(
                    f"{name!r} is {spec} on rank {rank} but {known} on another; ranks must hold one model"
                )
    return list(merged.values())


def save(
    directory: str | os.PathLike[str],
    tag: str,
    *,
    module: nn.Module,
    slices: Iterable[Any],
    state: dict[str, Any],
    ranks: Ranks | None = None,
    exclude_frozen: bool = False,
    save_latest: bool = True,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Write `<directory>/<tag>/` collectively; returns its path.

    `slices` yields what this rank owns (`dsx_zero.ParamSlice`: name, aliases, shape, start, stop, trainable, param,
    master, states, ranges). `state` is any JSON-able structure with tensors in it. Raises `CheckpointError`, the same on all ranks.
    """
    ranks = ranks or default_ranks()

    def listing() -> tuple[Path, _Share, Any]:
        target = check_folder(directory, "save") / check_tag(tag)
        share = _share_of(slices, module, ranks.rank, exclude_frozen)
        return target, share, _encode_state(share, state, ranks.rank)

    target, mine, encoded = ranks.all_or_none("listing what to save", listing)
    tag = target.name
    announced = {family: {i.spec.name: i.spec for i in items} for family, items in mine.items.items()}
    everyone = ranks.gather((announced, mine.scalars, uuid.uuid4().hex[:12], os.path.realpath(target)))
    check_one_folder("save", [path for *_, path in everyone])
    plans = [p for f in mine.items for p in plan_files(f, _merge_specs([a[f] for a, *_ in everyone]), max_file_bytes)]
    temporary = target.with_name(temporary_name(tag, everyone[0][2]))
    with ExitStack() as lock:  # of rank 0
        try:
            prepare = (lambda: _prepare(lock, temporary, tag, plans)) if ranks.rank == 0 else (lambda: None)
            ranks.all_or_none(f"making {temporary}", prepare)
            hashes = ranks.together(f"writing {target}", lambda: _write(temporary, plans, mine))
            index = _index(plans, hashes, mine, _merge_scalars([s for _, s, *_ in everyone]), encoded)
            commit = (lambda: _commit(temporary, target, index, save_latest)) if ranks.rank == 0 else (lambda: None)
            ranks.all_or_none(f"committing {target}", commit)
        except BaseException:
            if ranks.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
    return target


def _encode_state(share: _Share, state: dict[str, Any], rank: int) -> Any:
    """Rank 0's state counts; others still check theirs, so that an unsaveable value is an error everywhere."""
    tensors: dict[str, torch.Tensor] = {}
    encoded = encode(state, "state", tensors)
    for name, tensor in tensors.items() if rank == 0 else ():
        share.add(CLIENT, name, tensor.shape, 0, tensor.reshape(-1))
    return encoded


def _merge_scalars(shares: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    for share in shares:
        for key, values in share.items():
            merged.setdefault(key, {}).update(values)
    return merged


def _prepare(lock: ExitStack, folder: Path, tag: str, plans: list[FilePlan]) -> None:
    lock.enter_context(saving(folder.parent, tag))
    folder.mkdir()
    for plan in plans:
        create(folder, plan)


def _write(folder: Path, plans: list[FilePlan], share: _Share) -> dict[str, list[Slice]]:
    """Write this rank's ranges; returns their hashes by tensor."""
    hashes: dict[str, list[Slice]] = {}
    items: dict[str, list[_Item]] = {}
    for family in share.items.values():
        for item in family:
            items.setdefault(item.spec.name, []).append(item)
    for plan in plans:
        if not any(placed.spec.name in items for placed in plan.tensors):
            continue
        with opened(folder / plan.name, os.O_WRONLY) as fd:
            for placed in plan.tensors:
                for item in items.get(placed.spec.name, ()):
                    if item.data.numel() or not placed.spec.numel:
                        hashes.setdefault(placed.spec.name, []).append(write_range(fd, placed, item.start, item.data))
            os.fsync(fd)
    return hashes


def _index(
    plans: list[FilePlan],
    hashes: list[dict[str, list[Slice]]],
    share: _Share,
    scalars: dict[str, dict[str, Any]],
    state: dict[str, Any],
) -> Index:
    tensors: dict[str, Placed] = {p.spec.name: p for plan in plans for p in plan.tensors}
    slices = {n: tuple(sorted({s for h in hashes for s in h.get(n, ())}, key=lambda s: s.start)) for n in tensors}
    return Index(tensors, slices, share.aliases, tuple(share.excluded), scalars, state)


def _commit(temporary: Path, target: Path, index: Index, save_latest: bool) -> None:
    model = {n: p.file for n, p in index.tensors.items() if p.file.startswith(MODEL)}
    if len(set(model.values())) > 1:
        total = sum(index.tensors[n].spec.nbytes for n in model)
        weight_map = {"metadata": {"total_size": total}, "weight_map": model}
        replace_text(temporary / WEIGHT_MAP_NAME, json.dumps(weight_map, indent=1))
    text = index.to_json()
    Index.from_json(text, str(target / INDEX_NAME))  # a checkpoint that could not be read is not committed
    replace_text(temporary / INDEX_NAME, text)
    publish(temporary, target, latest=save_latest)
