"""Probes for calls of ordinary training loops, which the comparison of an engine's own steps does not make.

The comparison in `run.py` trains with `engine.backward` and `engine.step`. A user's loop also clears gradients through
the module, clips them with torch's functions, calls `loss.backward()`, keeps a graph over a step, or replaces a
parameter. The effect of such a call in plain torch is known. Probes make these calls between the comparisons, in a way
that does not change training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from dsx_verify.compare import Comparison
from torch import nn

from ..engine.engine import Engine
from ..engine.errors import EngineError

_STALE = "modified by an inplace operation"


class Probes:
    """Probes of one verification, on one rank. Every rank calls each of them.

    Args:
        engine: the engine under test.
        found: is called with each difference.
        of_rank_0: gives rank 0's value to every rank. Collective.
        names: names of the trained parameters.
        tolerance: relative tolerance of a norm.
    """

    def __init__(
        self,
        engine: Engine,
        found: Comparison,
        of_rank_0: Callable[[Any], Any],
        names: list[str],
        tolerance: float,
    ) -> None:
        self._engine, self._found, self._of_rank_0, self._names = engine, found, of_rank_0, names
        self._tolerance = tolerance
        self._graph: torch.Tensor | None = None
        self._plain: torch.Tensor | None = None

    # - A micro-batch that is thrown away

    def throw_away(self, step: int, loss: torch.Tensor, norm: float | None) -> None:
        """Differentiate a loss, clip its gradients with torch's function, and clear them through the module.

        Args:
            norm: the expected norm of the gradients; None if they are not finite.
        """
        engine, parts = self._engine, self._engine._parts
        engine.set_gradient_accumulation_boundary(True)  # so that gradients are averaged in every stage
        if parts.backwards.refuses:
            self._judge(step, "refused", "loss.backward() without the loss scale", _refuses(loss))
        engine.scale(loss).backward()
        if norm is not None:
            self._clip(step, norm)
        engine.module.zero_grad()
        engine.set_gradient_accumulation_boundary(None)
        parts.window.close()
        parts.accumulation.restart()
        engine._losses.take()  # not `engine.forget_micro_batches()`, which clears the gradients itself

    def _clip(self, step: int, norm: float) -> None:
        parameters = [p for p in self._engine.module.parameters() if p.grad is not None]
        got = float(nn.utils.clip_grad_norm_(parameters, math.inf))
        self._found.numbers(
            step, "norm", "clip_grad_norm_ of the module's parameters", got, norm, self._tolerance * norm
        )
        nn.utils.clip_grad_norm_(parameters, got / 2)
        after = float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        name = "the gradients after clip_grad_norm_ to half of it"
        self._found.numbers(step, "norm", name, after, norm / 2, self._tolerance * norm)

    def direct(self, step: int) -> bool:
        """Whether this update uses `loss.backward()`: every second one does, if that is possible."""
        return step % 2 == 0 and not self._engine._parts.backwards.refuses

    # - Graphs that are kept over an update

    def keep_graphs(self, forward: Callable[[], torch.Tensor], plain: Callable[[], torch.Tensor] | None) -> None:
        """Before an update: keep a loss of the engine, and on rank 0 the same loss in plain torch."""
        self._graph, self._plain = forward(), None if plain is None else plain()

    def judge_graphs(self, step: int) -> None:
        """After an applied update: the engine's graph must be stale if that of plain torch is."""
        graph, plain, self._graph, self._plain = self._graph, self._plain, None, None
        wanted = self._of_rank_0(plain is not None and _is_stale(plain.backward))
        if graph is not None and graph.grad_fn is not None:
            with self._engine.no_sync():
                stale = _is_stale(self._engine.scale(graph).backward)
            self._judge(step, "stale", "the graph of a loss of before the update", stale, wanted)
        self._engine.forget_micro_batches()

    # - A parameter that was replaced

    def replace_a_parameter(self, step: int) -> None:
        """A step must be refused after a parameter of the model was replaced. The engine cannot be used afterwards."""
        name = self._names[0]
        path, _, leaf = name.rpartition(".")
        owner = self._engine.module.get_submodule(path)
        kept = owner._parameters[leaf]
        try:
            other = torch.zeros_like(kept, requires_grad=False)  # type: ignore[arg-type]
            owner._parameters[leaf] = nn.Parameter(other)
            self._engine._parts.shards.step()
            noticed = False
        except RuntimeError as error:
            noticed = name in str(error)
        finally:
            owner._parameters[leaf] = kept
        self._judge(step, "refused", f"a step after {name} was replaced in the module", noticed)

    def _judge(self, step: int, kind: str, name: str, got: bool, expected: bool = True) -> None:
        self._found.numbers(step, kind, name, float(got), float(expected), 0.0)


def _refuses(loss: torch.Tensor) -> bool:
    try:
        loss.backward(retain_graph=True)
    except EngineError:
        return True
    return False


def _is_stale(backward: Callable[[], object]) -> bool:
    try:
        backward()
    except RuntimeError as error:
        if _STALE not in str(error):
            raise
        return True
    return False
