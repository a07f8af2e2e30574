"""A whole model inside a context: generation of many tokens without a gather per token.

At stage 3 each forward gathers every unit again. Here the units are gathered once and stay. The hooks that gather, free
and agree with other ranks are paused, so that a rank may call the model, or parts of it, as often as it likes. The
price is the memory of the whole parameters; for models that do not fit there is `uneven_forwards`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .gather.registry import stage3_of

__all__ = ["gather_hooks_paused", "unwrap_model_for_generation"]


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Inside, `model` (a module, or an engine with a `module`) is an ordinary module with all its parameters
    (collective to enter and to leave).

        with dsx_zero.unwrap_model_for_generation(engine) as model:
            tokens = model.generate(prompt)

    Gradients are off: what a graph would have saved is freed when the context ends. Below stage 3 there is nothing to
    gather.
    """
    module = model if isinstance(model, nn.Module) else model.module
    stage = stage3_of(module)
    with torch.no_grad():
        if stage is None:
            yield model
            return
        with stage.lifetime.gathered([unit.index for unit in stage.partitioned]), stage.hooks.paused():
            yield model


@contextmanager
def gather_hooks_paused(model: nn.Module) -> Iterator[None]:
    """Forwards of `model` inside neither gather, free nor agree with other ranks: for callers that hold all of its
    parameters with `GatheredParameters`. Below stage 3 there is nothing to pause.
    """
    stage = stage3_of(model)
    if stage is None:
        yield
        return
    with stage.hooks.paused():
        yield
