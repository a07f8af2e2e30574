"""Forwards outside training in different numbers on each rank: generation until a stop token, evaluation of uneven
parts of a data set.

At stage 3 a forward gathers parameters from all ranks, so a rank that is done has to go on giving its shards until the
others are done too. The idea is that of `torch.distributed.algorithms.Join`; only forwards without gradients are meant,
training steps have the optimizer step as their common end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .gather.registry import stage3_of

__all__ = ["uneven_forwards"]


@contextmanager
def uneven_forwards(model: nn.Module) -> Iterator[None]:
    """Inside, each rank may call `model` (under `torch.no_grad` or `torch.inference_mode`) as often as it likes, also
    never.

        with torch.no_grad(), dsx_zero.uneven_forwards(model):
            while not done(tokens):
                tokens = append(tokens, model(tokens))

    Leaving is collective: it returns when every rank has left. Other collectives of the caller belong outside. Below
    stage 3 parameters are whole everywhere and nothing waits. If the body raises, the rank does not wait for the
    others.

    Raises:
        ScheduleDivergence: another rank is at its optimizer step instead.
    """
    yield
    stage = stage3_of(model)
    if stage is not None:
        stage.lifetime.join()
