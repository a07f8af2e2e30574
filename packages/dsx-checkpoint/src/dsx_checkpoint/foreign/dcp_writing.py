"""A folder of torch.distributed.checkpoint, written by torch, one tensor at a time.

torch plans the folder from tensors without memory (device "meta"), and asks for each tensor's values when it writes
them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from .source import Progress, Source, Tensor

__all__ = ["write_dcp"]


def write_dcp(folder: Path, weights: Mapping[str, Tensor], optimizer_of: Source | None, progress: Progress) -> None:
    """Write `model`, and with `optimizer_of` also `optim` of that source, for the names of `weights` alone."""
    tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
    state: dict[str, Any] = {"model": {name: _empty(tensor) for name, tensor in weights.items()}}
    if optimizer_of is not None:
        chosen = {name: values for name, values in optimizer_of.states.items() if name in weights}
        states: dict[str, dict[str, Any]] = {}
        for name, values in chosen.items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optim.state.{name}.{key}"] = value
                    states.setdefault(name, {})[key] = _empty(value)
                else:  # torch's optimizers keep their number of steps as a tensor
                    states.setdefault(name, {})[key] = torch.tensor(float(value), device="cpu")
        state["optim"] = {"state": states, "param_groups": _groups(optimizer_of, list(chosen))}
    writer = filesystem.FileSystemWriter(str(folder), sync_files=True, thread_count=1)
    planner = _OneAtATime(tensors, progress)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is intended here
        state_dict_saver.save(state, storage_writer=writer, planner=planner, no_dist=True)


def _empty(tensor: Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class _OneAtATime(DefaultSavePlanner):
    """Gives torch the values of one tensor when it writes it."""

    def __init__(self, tensors: Mapping[str, Tensor], progress: Progress) -> None:
        super().__init__()
        self._tensors, self._progress = tensors, progress
        self._done, self._total = 0, sum(tensor.nbytes for tensor in tensors.values())

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The values of an entry of the plan."""
        tensor = self._tensors.get(index.fqn)
        if tensor is None:
            return super().lookup_object(index)
        value = tensor.fetch().detach()
        self._done += tensor.nbytes
        self._progress(self._done, self._total)
        return value


def _groups(source: Source, names: list[str]) -> list[dict[str, Any]]:
    """The single parameter group, in the form of torch's optimizer.

    In addition to the checkpoint's numbers it has the entries that the constructor of torch's optimizer of this name
    sets, because a program that loads the folder needs these keys.
    """
    engine = source.engine or {}
    numbers = next(iter(engine.get("param_groups") or []), {})
    kind = str(((engine.get("config") or {}).get("optimizer") or {}).get("type", ""))
    made = {name.lower(): getattr(torch.optim, name) for name in ("Adam", "AdamW", "SGD", "Adagrad", "NAdam", "RAdam")}
    optimizer = made.get(kind.lower())
    defaults = optimizer([torch.nn.Parameter(torch.zeros(1, device="cpu"))]).defaults if optimizer is not None else {}
    return [{**defaults, **numbers, "params": names}]
