"""Backward of one stage, whole or in two parts: first the gradient of the input, later those of the parameters.

The parts of zero-bubble schedules are found in autograd's graph, so any module can be split. A *junction* is a node on
a path from the output to the stage's input that also has an edge into a *branch*, which leads only to parameters (the
weight of a linear layer, the scale of a norm). The input part runs autograd towards the input and records the gradients
that reach each junction. The weight part starts at the junctions with those gradients and computes their branches.
Nothing of the input part is repeated, since a node computes only the gradients that are asked for. (A node of a user's
own `autograd.Function` with parameters among its arguments computes all its gradients, so it does this twice.)

The graph and its saved tensors are kept until the weight part is done; schedules count activations accordingly.

Two kinds of stages are not split. If the stage's input needs no gradient (the first stage), the whole backward runs in
the weight part, since no other stage waits for it. If the graph has a reentrant checkpoint, which cannot compute single
gradients, the whole backward runs in the input part. A parameter that several junctions use belongs to the input part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

Grads = Sequence["torch.Tensor | None"]


class DeferredWeights:
    """Inputs of the weight part of backward: per junction its incoming gradients and the edges into its branches.

    If the whole backward was deferred, `whole` has the outputs and their gradients.
    """

    def __init__(self) -> None:
        self.junctions: list[tuple[Any, list[torch.Tensor | None], list[GradientEdge]]] = []
        self.whole: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None

    def run(self) -> None:
        """Compute the deferred gradients, add them to the parameters' `.grad` and free the graph."""
        whole, self.whole = self.whole, None
        if whole is not None:
            torch.autograd.backward(*whole)
        ends: list[GradientEdge] = []
        grads: list[torch.Tensor] = []
        while self.junctions:
            node, incoming, branches = self.junctions.pop()
            known = [(GradientEdge(node, i), g) for i, g in enumerate(incoming) if g is not None]
            if not known:
                continue
            found = torch.autograd.grad(
                [edge for edge, _ in known], branches, [g for _, g in known], allow_unused=True
            )  # fmt: skip  # pyright: ignore[reportArgumentType, reportCallIssue]
            for edge, gradient in zip(branches, found):
                if gradient is not None:
                    ends.append(edge)
                    grads.append(gradient)
        if ends:
            torch.autograd.backward(ends, grads)  # pyright: ignore[reportArgumentType]


def whole_backward(outputs: Sequence[torch.Tensor], grads: Grads) -> None:
    """Compute all gradients and add them to `.grad` of inputs and parameters.

    `grads` are the gradients of the outputs, as in `input_backward`.
    """
    used, filled = _outputs_with_gradients(outputs, grads)
    if used:
        torch.autograd.backward(used, filled)


def input_backward(outputs: Sequence[torch.Tensor], grads: Grads, inputs: Sequence[torch.Tensor]) -> DeferredWeights:
    """Compute the gradients of the inputs and add them to their `.grad`. Return the deferred work for the parameters.

    Args:
        outputs: outputs of the stage.
        grads: gradients of the outputs; None for an output that was not used, or for a scalar loss (then 1).
        inputs: the stage's input tensors that need a gradient; they are leaves of the graph.
    """
    deferred = DeferredWeights()
    used, filled = _outputs_with_gradients(outputs, grads)
    if not used:
        return deferred
    graph = _Graph([get_gradient_edge(o).node for o in used], [get_gradient_edge(i).node for i in inputs])
    if not graph.on_path:
        deferred.whole = (used, filled)
        return deferred
    if graph.reentrant:
        torch.autograd.backward(used, filled)
        return deferred
    branches, shared = graph.branches()
    recorded: dict[Any, list[torch.Tensor | None]] = {}
    handles = [node.register_prehook(_record_gradients(recorded, node)) for node in branches]
    # an output that does not depend on the input has no input part: its whole backward runs below
    on_path = [get_gradient_edge(o).node in graph.on_path for o in used]
    try:
        roots, gradients = zip(*((o, g) for o, g, reaches in zip(used, filled, on_path) if reaches))
        ends: Any = (*inputs, *shared)  # torch takes tensors and edges together; its annotation does not say so
        found = torch.autograd.grad(roots, ends, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    for leaf, gradient in zip(inputs, found):
        if gradient is not None:
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
    not_deferred = [(e, g) for e, g in zip(shared, found[len(inputs) :]) if g is not None]
    not_deferred += [(get_gradient_edge(o), g) for o, g, reaches in zip(used, filled, on_path) if not reaches]
    if not_deferred:
        starts: Any = [edge for edge, _ in not_deferred]
        torch.autograd.backward(starts, [g for _, g in not_deferred], retain_graph=True)
    deferred.junctions = [
        (node, recorded[node], edges) for node, edges in branches.items() if node in recorded and edges
    ]
    return deferred


def _outputs_with_gradients(
    outputs: Sequence[torch.Tensor], grads: Grads
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(outputs that need a backward, their gradients). A missing gradient of a scalar is 1."""
    used, filled = [], []
    for output, gradient in zip(outputs, grads):
        if not output.requires_grad or (gradient is None and output.numel() != 1):
            continue
        used.append(output)
        filled.append(torch.ones_like(output) if gradient is None else gradient)
    return used, filled


def _record_gradients(recorded: dict[Any, list[torch.Tensor | None]], node: Any) -> Any:
    def hook(gradients: tuple[torch.Tensor | None, ...]) -> None:
        recorded[node] = list(gradients)

    return hook


class _Graph:
    """Autograd's graph from some outputs (`roots`) to the stage's inputs (`ends`).

    Attributes:
        order: all nodes, children before parents.
        reentrant: whether the graph has a reentrant checkpoint.
        on_path: the nodes from which an input can be reached.
    """

    def __init__(self, roots: list[Any], ends: list[Any]) -> None:
        self.order = _post_order(roots)
        self.reentrant = any("CheckpointFunctionBackward" in node.name() for node in self.order)
        targets = set(ends)
        self.on_path: set[Any] = set()
        for node in self.order:  # children come before their parents
            if node in targets or any(child in self.on_path for child, _ in node.next_functions):
                self.on_path.add(node)

    def branches(self) -> tuple[dict[Any, list[GradientEdge]], list[GradientEdge]]:
        """(edges into the branches of each junction, parameters that several junctions lead to).

        A branch that leads to such a parameter is left out, so each parameter belongs to one junction or to none.
        """
        leaves: dict[tuple[Any, int], set[Any]] = {}
        owned: dict[Any, list[tuple[Any, int]]] = {}
        count: Counter[Any] = Counter()
        for node in self.order:
            if node not in self.on_path:
                continue
            edges = {(c, i) for c, i in node.next_functions if c is not None and c not in self.on_path}
            for edge in edges:
                if edge not in leaves:
                    leaves[edge] = {n for n in _post_order([edge[0]]) if hasattr(n, "variable")}
            owned[node] = [edge for edge in edges if leaves[edge]]
            count.update(set().union(*(leaves[edge] for edge in edges)))
        several = {leaf for leaf, n in count.items() if n > 1}
        while True:  # all parameters of a branch with such a parameter are treated alike
            more = set().union(*(found for found in leaves.values() if found & several)) - several
            if not more:
                break
            several |= more
        own = {
            node: [GradientEdge(c, i) for c, i in edges if not leaves[c, i] & several] for node, edges in owned.items()
        }
        return {node: edges for node, edges in own.items() if edges}, [GradientEdge(leaf, 0) for leaf in several]


def _post_order(roots: list[Any]) -> list[Any]:
    """All nodes that can be reached from the roots, children before parents."""
    seen: set[Any] = set()
    found: list[Any] = []
    stack: list[tuple[Any, bool]] = [(root, False) for root in roots if root is not None]
    while stack:
        node, done = stack.pop()
        if done:
            found.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None)
    return found
