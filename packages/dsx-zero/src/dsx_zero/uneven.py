"""Different numbers of forwards on each rank, outside training: generation until a stop token, evaluation of uneven
parts of a data set.

At stage 3 a forward gathers parameters from all ranks. So a rank that has finished must still send its shards until
the other ranks have finished too. The idea is that of `torch.distributed.algorithms.Join`. It is only for forwards
without gradients: in training all ranks wait for each other at the optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .gather.registry import stage3_of

__all__ = ["uneven_forwards"]


@contextmanager
def uneven_forwards(model: nn.Module) -> Iterator[None]:
    """Inside, each rank may call `model` (under `torch.no_grad` or `torch.inference_mode`) any number of times, or not
    at all.

        with torch.no_grad(), dsx_zero.uneven_forwards(model):
            while not done(tokens):
                tokens = append(tokens, model(tokens))

    Leaving is collective: it returns when every rank has left. Other collectives of the caller belong outside. Below
    stage 3 every rank has whole parameters, and nothing waits. A rank whose body raises does not wait for the other
    ranks.

    Raises:
        ScheduleDivergence: another rank is at its optimizer step instead.
    """
    yield
    stage = stage3_of(model)
    if stage is not None:
        stage.lifetime.join()
