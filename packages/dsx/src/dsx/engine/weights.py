"""Whole weights out of a sharded model: as a state dict, or as a file other programs read.

Walks the model one unit at a time (what is gathered together anyway), so that each unit travels once and the device never holds
more than one unit's whole weights beyond what training keeps; the collected values go to host memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import EngineArgumentError


@dataclass(frozen=True)
class Gather:
    """How parameters become whole.

    Attributes:
        whole: makes some parameters whole for the length of a context. Collective.
        unit: parameters of one unit are gathered together, whichever of them is asked for; None for one that is always whole.
    """

    whole: Callable[[list[nn.Parameter]], contextlib.AbstractContextManager[object]]
    unit: Callable[[nn.Parameter], Hashable]

    def __call__(self, parameters: list[nn.Parameter]) -> contextlib.AbstractContextManager[object]:
        return self.whole(parameters)


NOTHING_TO_GATHER = Gather(lambda parameters: contextlib.nullcontext(), lambda parameter: None)


def whole_tensors(
    module: nn.Module, gather: Gather, *, exclude_frozen: bool
) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Every parameter once, with all its names, and every persistent buffer under each of its names; whole, on its device.

    Collective: every rank must exhaust it. The tensor is valid until the next one is asked for.
    """
    names: dict[int, list[str]] = {}
    units: dict[Hashable, dict[int, nn.Parameter]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        if parameter.requires_grad or not exclude_frozen:
            units.setdefault(gather.unit(parameter), {})[id(parameter)] = parameter
    for members in units.values():
        with gather(list(members.values())):
            for key in members:
                # As the module holds it now: gathering may have put a plain one in the place of a partitioned one.
                yield names[key], module.get_parameter(names[key][0]).detach()
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield [f"{prefix}.{name}" if prefix else name], buffer.detach()


def state_dict(module: nn.Module, gather: Gather, *, exclude_frozen: bool) -> dict[str, torch.Tensor]:
    """Copies of all weights and persistent buffers in host memory, tied ones under each name. Collective."""
    collected: dict[str, torch.Tensor] = {}
    for aliases, value in whole_tensors(module, gather, exclude_frozen=exclude_frozen):
        copy = value.to("cpu", copy=True)
        collected.update((alias, copy) for alias in aliases)
    order = {name: index for index, name in enumerate(module.state_dict(keep_vars=True))}
    return dict(sorted(collected.items(), key=lambda item: order.get(item[0], len(order))))


def save_weights(path: Path, module: nn.Module, gather: Gather, *, exclude_frozen: bool, writer: bool) -> None:
    """Gather on all ranks and write `path` on the rank with `writer=True`, atomically.

    `*.safetensors` is written as such (one name per tied weight, which is what readers of that format expect); any other
    name gets torch's own format.
    """
    if path.suffix not in {".safetensors", ".bin", ".pt", ".pth"}:
        raise EngineArgumentError(
            f"save_filename: got {path.name!r}, expected a name ending in .safetensors, .bin, .pt or .pth"
        )
    collected: dict[str, torch.Tensor] = {}
    for aliases, value in whole_tensors(module, gather, exclude_frozen=exclude_frozen):
        if writer:
            copy = value.to("cpu", copy=True)
            collected.update((alias, copy) for alias in (aliases[:1] if path.suffix == ".safetensors" else aliases))
    if writer:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".tmp-{path.name}")
        _write(temporary, collected, safetensors=path.suffix == ".safetensors")
        os.replace(temporary, path)


def _write(path: Path, tensors: dict[str, Any], *, safetensors: bool) -> None:
    if not safetensors:
        torch.save(tensors, path)
        return
    # Late: only this branch needs it.
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
