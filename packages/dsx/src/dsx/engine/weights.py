"""Whole weights out of a sharded model: as a state dict, or as a file other programs read.

Walks the model one module at a time and gathers only that module's own parameters, so that the device never holds more
than one module's whole weights beyond what training keeps; the collected values go to host memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import EngineArgumentError

Gather = Callable[[list[nn.Parameter]], contextlib.AbstractContextManager[object]]


def whole_tensors(
    module: nn.Module, gather: Gather, *, exclude_frozen: bool
) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Every parameter and persistent buffer once: all its names, and its whole value on its device.

    Collective: every rank must exhaust it. The tensor is valid until the next one is asked for.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for prefix, child in module.named_modules():
        own = [p for p in child._parameters.values() if p is not None and id(p) in names]
        wanted = [(names.pop(id(p)), p) for p in dict.fromkeys(own)]
        with gather(own):
            for aliases, parameter in wanted:
                if parameter.requires_grad or not exclude_frozen:
                    yield aliases, _current(child, aliases, prefix, parameter)
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield [f"{prefix}.{name}" if prefix else name], buffer.detach()


def _current(child: nn.Module, aliases: list[str], prefix: str, parameter: nn.Parameter) -> torch.Tensor:
    """The parameter as the module holds it now: gathering may have put a plain one in the place of a partitioned one."""
    start = f"{prefix}." if prefix else ""
    for alias in aliases:
        local = alias[len(start) :]
        if alias.startswith(start) and local in child._parameters:
            return child._parameters[local].detach()  # type: ignore[union-attr]
    return parameter.detach()


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
