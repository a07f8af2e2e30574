"""Weights of a checkpoint for other programs: safetensors, one file of torch, or torch.distributed.checkpoint.

    export(source, "weights", to="safetensors", dtype="bf16", max_shard_size="5GB")

All files are written tensor by tensor, so that one tensor at a time is in memory. If there are several files of
safetensors, an index in the form of Hugging Face is written too. `torch_file.py` writes a single file of torch; torch
itself writes a folder of torch.distributed.checkpoint.

With `optimizer=True` a folder of torch.distributed.checkpoint has `model` and `optim` in the layout of
`torch.distributed.checkpoint.state_dict`, which programs with FSDP2 load.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from dsx_core import sync_folder

from .boxes import Region
from .crc import Chunks, Sums
from .direct import writing
from .errors import CheckpointArgumentError, CheckpointError, shown
from .files import create
from .foreign.source import Progress, Source, Tensor
from .format import CHUNK_BYTES, MODEL, WEIGHT_MAP_NAME, TensorSpec, dtype_name
from .plan import FilePlan, plan_files, weight_map
from .regions import write_region
from .selecting import compiled
from .torch_file import write_torch_file

__all__ = ["DTYPES_OF_EXPORTS", "bytes_of", "export"]

DTYPES_OF_EXPORTS: Mapping[str, torch.dtype | None] = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "as-saved": None,
}  # fmt: skip
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_FORMATS = ("safetensors", "torch", "dcp")


def bytes_of(size: str | int) -> int:
    """`5GB`, `300MB`, `2GiB` or a number of bytes. Raises `CheckpointArgumentError`."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(size))
    if found is None or found[2].upper() not in _UNITS or float(found[1]) * _UNITS[found[2].upper()] < 1:
        raise CheckpointArgumentError(f"got the size {shown(size)}, expected a number of bytes such as 5GB or 300MB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def export(
    source: Source,
    target: str | os.PathLike[str],
    *,
    to: str = "safetensors",
    dtype: str = "fp32",
    only: Sequence[str] = (),
    exclude_frozen: bool = False,
    max_shard_size: str | int = "5GB",
    optimizer: bool = False,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Write the weights and return where: a folder, or with `to="torch"` a file.

    Args:
        to: "safetensors", "torch" (a state dict for `torch.load`) or "dcp" (torch.distributed.checkpoint).
        dtype: "fp32" (the masters, where there are some), "bf16", "fp16", or "as-saved". Integers stay as they are.
        only: regular expressions; other tensors are left out.
        exclude_frozen: leave out parameters that are not trained.
        max_shard_size: size at which safetensors are split.
        optimizer: the optimizer states too; with `to="dcp"` only.

    Raises:
        CheckpointArgumentError: an argument is none of these, or there are no optimizer states.
        CheckpointError: the target exists, or cannot be written.
    """
    if to not in _FORMATS or dtype not in DTYPES_OF_EXPORTS:
        raise CheckpointArgumentError(
            f"export: got to={to!r} and dtype={dtype!r}, expected one of {', '.join(_FORMATS)}, and one of"
            f" {', '.join(DTYPES_OF_EXPORTS)}"
        )
    if optimizer and (to != "dcp" or not source.states):
        why = f"to={to!r}, expected 'dcp'" if to != "dcp" else "a checkpoint without optimizer states"
        raise CheckpointArgumentError(f"export with optimizer states: got {why}")
    if optimizer and (groups := (source.engine or {}).get("param_groups") or []) and groups != groups[:1] * len(groups):
        raise CheckpointArgumentError(
            f"export with optimizer states: got a checkpoint with {len(groups)} parameter groups of different numbers, "
            "which does not say which parameters are in which; load it with dsx, or export the weights alone"
        )
    path, limit = Path(target), bytes_of(max_shard_size)
    if path.exists() and (to == "torch" or not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path}: exists already; choose another place, or remove it first")
    tensors = _chosen(source, dtype, only, exclude_frozen, aliases=to != "safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}-{os.urandom(6).hex()}")
    try:
        if to == "safetensors":
            _write_safetensors(temporary, tensors, limit, progress)
        elif to == "dcp":
            from .foreign.dcp_writing import write_dcp  # lazy import: it loads torch.distributed.checkpoint

            write_dcp(temporary, tensors, source if optimizer else None, progress)
        else:
            total = sum({id(tensor.fetch): tensor.nbytes for tensor in tensors.values()}.values())
            write_torch_file(temporary, tensors, _Counted(progress, total).add)
        if path.is_dir():
            path.rmdir()
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True) if temporary.is_file() else None
        raise
    sync_folder(path.parent)
    return path


def _chosen(
    source: Source, dtype: str, only: Sequence[str], exclude_frozen: bool, *, aliases: bool
) -> dict[str, Tensor]:
    wanted = DTYPES_OF_EXPORTS[dtype]
    patterns = [compiled("only", pattern) for pattern in only]
    converted: dict[int, Tensor] = {}  # a tied tensor is one under all its names
    found: dict[str, Tensor] = {}
    for name, tensor in source.weights(masters=wanted is not None, aliases=aliases):
        if (patterns and not any(p.search(name) for p in patterns)) or (exclude_frozen and name in source.frozen):
            continue
        if wanted is None or not tensor.dtype.is_floating_point:
            found[name] = tensor
        else:
            found[name] = converted.setdefault(id(tensor), _converted(tensor, wanted))
    if not found:
        raise CheckpointArgumentError(f"export: no tensor matches {list(only)}; see 'dsx checkpoint inspect --tensors'")
    return found


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return Tensor(tensor.shape, dtype, lambda: tensor.fetch().to(dtype))


def _write_safetensors(folder: Path, tensors: Mapping[str, Tensor], limit: int, progress: Progress) -> None:
    specs = [TensorSpec(name, dtype_name(tensor.dtype), tensor.shape) for name, tensor in tensors.items()]
    files = plan_files(MODEL, specs, limit)
    folder.mkdir()
    counted = _Counted(progress, sum(spec.nbytes for spec in specs))
    for file in files:
        _write_file(folder, file, tensors, counted.add)
    text = weight_map(files)
    if text:
        create(folder / WEIGHT_MAP_NAME, text, len(text))
    sync_folder(folder)


class _Counted:
    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, nbytes: int) -> None:
        """Add `nbytes` to the bytes that are done."""
        self._done += nbytes
        self._progress(self._done, self._total)


def _write_file(folder: Path, file: FilePlan, tensors: Mapping[str, Tensor], count: Callable[[int], None]) -> None:
    create(folder / file.name, file.header, file.size)
    with writing(folder / file.name) as target:
        for placed in file.tensors:
            spec, sums = placed.spec, Sums(Chunks.grid(placed.spec.nbytes, CHUNK_BYTES, ()))
            value = tensors[spec.name].fetch().detach().contiguous().reshape(-1)
            write_region(target, placed, Region.whole(spec.shape), value, sums)
            target.wait()  # memory holds one tensor at a time
            count(spec.nbytes)
