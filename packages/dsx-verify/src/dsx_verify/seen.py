"""Records of a forward pass by hooks: dtypes and checksums of each module's output, and the last random state.

An audit compares them with those of plain torch, to name the first module that computes something else.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .system import plain_name

__all__ = ["Seen", "watch_forward"]


@dataclass
class Seen:
    """One forward pass, in the order in which modules ended.

    Attributes:
        outputs: by module: shape, sum and sum of magnitudes of its first output.
        dtypes: by module with matrix weights: dtype of its output.
        random: stands for the state of the host's generator after the pass.
        passes: how often the outermost module ran.
    """

    outputs: dict[str, tuple[tuple[int, ...], float, float]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    random: str = ""
    passes: int = 0


@contextlib.contextmanager
def watch_forward(
    module: nn.Module,
    begin: Callable[[], Seen] | None = None,
    prefix: str = "",
    current: Callable[[], Seen] | None = None,
) -> Iterator[Seen]:
    """Hooks on a module and all modules inside.

    Args:
        begin: called when the outermost module begins in training; returns where to note. None: one object for all.
        current: tells where to note, of one who knows himself when a pass begins; without it, what `begin` returned.
        prefix: a first part of names that only a wrapper adds.
    """
    seen = [Seen()]

    def starts(*_: Any) -> None:
        if begin is not None and module.training:
            seen[0] = begin()

    where = current or (lambda: seen[0])

    def ends(*_: Any) -> None:
        if current is not None and not module.training:  # an evaluation between updates
            return
        where().passes += 1
        where().random = hashlib.sha256(bytes(torch.get_rng_state().tolist())).hexdigest()[:12]

    hooks = [module.register_forward_pre_hook(starts, prepend=True)]
    for name, part in module.named_modules():
        own = plain_name(name, prefix)
        hooks.append(part.register_forward_hook(_noting(own, part, where)))
    hooks.append(module.register_forward_hook(ends))
    try:
        yield seen[0]
    finally:
        for hook in hooks:
            hook.remove()


def _noting(name: str, part: nn.Module, where: Callable[[], Seen]) -> Callable[..., None]:
    weight = getattr(part, "weight", None)
    multiplies = isinstance(weight, torch.Tensor) and not isinstance(part, (nn.Embedding, nn.LayerNorm))

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, (tuple, list)) and output else output
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            return
        value = getattr(tensor, "to_local", lambda: tensor)().detach().double()
        where().outputs.setdefault(name, (tuple(value.shape), float(value.sum()), float(value.abs().sum())))
        if multiplies:
            where().dtypes.setdefault(name, str(tensor.dtype))

    return note
