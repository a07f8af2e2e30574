"""A run of a function as a checkpoint whose inputs are fetched again for the recomputation, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from ..call import run_checkpoint
from ..errors import ActivationArgumentError

__all__ = ["Recorded"]


class _Entry(torch.autograd.Function):
    """Gives a tensor a node of its own, so that its gradient can be asked for without holding it."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None


class Recorded:
    """One run of a function as a checkpoint, whose inputs come from shelves for the recomputation.

    Args:
        function: what is run.
        inputs: tensors, each with the function that gives it again; those that get no gradient have None.
        known: parameters that get gradients.
    """

    def __init__(
        self, function: Callable[..., Any], inputs: Sequence[tuple[torch.Tensor, Callable[[], torch.Tensor] | None]],
        known: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        self._known = known
        token = torch.empty(0, device=inputs[0][0].device, requires_grad=True)
        with torch.enable_grad():
            given = [t if again is None else _Entry.apply(token, t.detach()) for t, again in inputs]
            self._edges = [get_gradient_edge(t) for t, (_, again) in zip(given, inputs) if again is not None]
            sources = {(t.data_ptr(), t.shape): again for t, (_, again) in zip(given, inputs) if again is not None}

            def pack(tensor: torch.Tensor) -> Any:
                return sources.get((tensor.data_ptr(), tensor.shape)) or tensor

            with saved_tensors_hooks(pack, lambda kept: kept if isinstance(kept, torch.Tensor) else kept()):
                out = run_checkpoint(function, tuple(given), {})
        found = out if isinstance(out, (tuple, list)) else (out,)
        _check_leaves([t.grad_fn for t in found], known, token)
        self._outputs = [get_gradient_edge(t) if t.requires_grad else None for t in found]
        self.results = tuple(t.detach() for t in found)

    def gradients(self, grads: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """The gradients of the inputs that were given again, and of the parameters."""
        pairs = [(edge, grad) for edge, grad in zip(self._outputs, grads) if edge is not None]
        outputs, given = [edge for edge, _ in pairs], [grad for _, grad in pairs]
        found = torch.autograd.grad(
            outputs, [*self._edges, *self._known], given, allow_unused=True  # type: ignore[arg-type, list-item]
        )  # fmt: skip
        return list(found[: len(self._edges)]), list(found[len(self._edges) :])


def _check_leaves(nodes: Sequence[Any], known: Sequence[torch.Tensor], token: torch.Tensor) -> None:
    """Raise if the graph ends in a tensor that would get no gradient."""
    allowed, seen, waiting = {id(p) for p in (*known, token)}, set(), [n for n in nodes if n is not None]
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in allowed:
            raise ActivationArgumentError(
                f"run_in_host_chunks: a function uses a tensor of shape {tuple(leaf.shape)} that requires gradients and"
                " is not among its parameters; give all of them with parameters="
            )
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                waiting.append(before)
