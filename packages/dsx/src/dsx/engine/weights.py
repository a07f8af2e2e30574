"""Collects full weights from a sharded model: as a state dict, or as a file that other programs read.

It walks over the model one unit at a time (the parameters that are gathered together). So each unit is gathered once,
and the device holds the full weights of only one unit more than in training. The values are copied to host memory.
In a pipeline each stage sends its tensors to the other stages, one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dsx_comm
import torch
from dsx_comm.registry import AxisGroup
from dsx_core import replacing
from dsx_core.device import Device
from torch import nn


@dataclass(frozen=True)
class Gather:
    """The functions by which full parameters are gathered.

    Attributes:
        whole: gathers some parameters for the duration of a context. Collective.
        unit: returns the unit of a parameter, because the parameters of a unit are gathered together; None if the
            parameter need not be gathered.
        stages: the ranks of this pipeline, which hold the other parts of the model; None without a pipeline.
    """

    whole: Callable[[list[nn.Parameter]], contextlib.AbstractContextManager[object]]
    unit: Callable[[nn.Parameter], Hashable]
    stages: AxisGroup | None = None

    def __call__(self, parameters: list[nn.Parameter]) -> contextlib.AbstractContextManager[object]:
        return self.whole(parameters)


def whole_tensors(
    module: nn.Module, gather: Gather, *, exclude_frozen: bool
) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Every parameter once, with all its names, and every persistent buffer under each of its names. Tensors are
    complete and on their device. In a pipeline these are the tensors of all stages; a weight that several stages share
    comes from the first of them.

    Collective: every rank must iterate to the end. A tensor is valid until the next one is asked for.
    """
    own = _own_tensors(module, gather, exclude_frozen=exclude_frozen)
    if gather.stages is None:
        yield from own
        return
    seen: set[str] = set()
    for stage in range(gather.stages.size):
        for names, value in _sent_by(stage, gather.stages, own):
            fresh = [name for name in names if name not in seen]
            seen.update(names)
            if fresh:
                yield fresh, value


def _sent_by(
    stage: int, stages: AxisGroup, own: Iterator[tuple[list[str], torch.Tensor]]
) -> Iterator[tuple[list[str], torch.Tensor]]:
    """The tensors of a stage on all ranks of its pipeline; `own` are those of this rank (collective)."""
    while True:
        names, value = (next(own, None) if stages.rank == stage else None) or ([], None)
        header: list[Any] = [names, None if value is None else (value.shape, value.dtype, value.device.type)]
        dsx_comm.broadcast_object_list(header, group=stages.group, group_src=stage)
        if header[1] is None:
            return
        names, (shape, dtype, kind) = header
        if value is None:
            value = torch.empty(shape, dtype=dtype, device=Device.of(kind).torch_device)
        value = value.contiguous()
        if value.numel():
            dsx_comm.broadcast(value, group=stages.group, group_src=stage)
        yield names, value


def _own_tensors(
    module: nn.Module, gather: Gather, *, exclude_frozen: bool
) -> Iterator[tuple[list[str], torch.Tensor]]:
    """`whole_tensors` of this rank's module."""
    names: dict[int, list[str]] = {}
    units: dict[Hashable, dict[int, nn.Parameter]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        if parameter.requires_grad or not exclude_frozen:
            units.setdefault(gather.unit(parameter), {})[id(parameter)] = parameter
    for members in units.values():
        with gather(list(members.values())):
            for key in members:
                # Read it from the module again: gathering may have replaced a partitioned parameter by a plain one.
                yield names[key], module.get_parameter(names[key][0]).detach()
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield [f"{prefix}.{name}" if prefix else name], buffer.detach()


def state_dict(
    module: nn.Module, gather: Gather, *, exclude_frozen: bool, keeps: bool = True
) -> dict[str, torch.Tensor] | None:
    """Copies of all weights and persistent buffers in host memory, tied ones under each name. Collective.

    Ranks with `keeps=False` take part, keep no copies and get None.
    """
    collected: dict[str, torch.Tensor] = {}
    for aliases, value in whole_tensors(module, gather, exclude_frozen=exclude_frozen):
        if keeps:
            copy = value.to("cpu", copy=True)
            collected.update((alias, copy) for alias in aliases)
    if not keeps:
        return None
    if gather.stages is not None:
        return collected
    order = {name: index for index, name in enumerate(module.state_dict(keep_vars=True))}
    return dict(sorted(collected.items(), key=lambda item: order.get(item[0], len(order))))


_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


def save_weights(
    folder: Any,
    filename: str,
    module: nn.Module,
    gather: Gather,
    *,
    exclude_frozen: bool,
    writer: bool,
    elsewhere: Sequence[str] = (),
) -> None:
    """Gather on all ranks and write `folder/filename` on the rank with `writer=True`, atomically. Collective.

    A name `*.safetensors` gives that format (with one name per tied weight, as its readers expect); any other name
    gives torch's own format.

    Args:
        elsewhere: names of tensors of which other ranks hold other parts; with any, nothing is written.

    Raises:
        CheckpointArgumentError: the folder is not valid, the name has another ending, or a rank has tensors
            `elsewhere`; the same error on all ranks.
        CheckpointError: the file cannot be written; the same error on all ranks.
    """
    # Lazy import: training without saving does not need the format.
    from dsx_checkpoint.ranks import default_ranks

    ranks = default_ranks()
    path = ranks.keep("save_16bit_model", lambda: _checked_path(folder, filename, elsewhere))
    collected: dict[str, torch.Tensor] = {}
    for aliases, value in whole_tensors(module, gather, exclude_frozen=exclude_frozen):
        if writer:
            copy = value.to("cpu", copy=True)
            collected.update((alias, copy) for alias in (aliases[:1] if path.suffix == ".safetensors" else aliases))
    ranks.keep(f"writing {path}", (lambda: _write(path, collected)) if writer else (lambda: None))


def _checked_path(folder: Any, filename: str, elsewhere: Sequence[str]) -> Path:
    from dsx_checkpoint import CheckpointArgumentError
    from dsx_checkpoint.folder import check_folder

    if elsewhere:
        raise CheckpointArgumentError(
            f"this rank has only a part of {len(elsewhere)} tensors ({elsewhere[0]}, ...), the others are on other"
            " ranks (experts, slices of tensors); save_checkpoint writes them all, as whole tensors where their place"
            " is known"
        )
    path = check_folder(folder, "save_dir") / str(filename)
    if path.suffix not in _SUFFIXES:
        raise CheckpointArgumentError(
            f"save_filename: got {str(filename)!r}, expected a name ending in {', '.join(_SUFFIXES)}"
        )
    return path


def _write(path: Path, tensors: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file  # lazy import: only this branch needs it

            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, {"format": "pt"})
        else:
            torch.save(tensors, temporary)
