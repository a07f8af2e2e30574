"""What watches a profiled step: a dispatch mode that counts operators and hooks that say which module runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..timers import WallClock
from .rules import cost_of, is_known
from .tree import Node

__all__ = ["Totals", "Watch"]


@dataclass
class Totals:
    """What has no place in the tree of forward calls."""

    backward_flops: int = 0
    backward_macs: int = 0
    recompute_flops: int = 0
    outside_flops: int = 0
    unknown: Counter[str] = field(default_factory=Counter)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _Counting(TorchDispatchMode):
    """Hands the cost of every operator to the watch."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, name = func._schema.name.split("::")
        if namespace == "aten" and not is_known(name):
            # Under inference mode compound operators arrive whole: take them apart to see what they are made of.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        self._watch.count(namespace, name, args, result)
        return result


class Watch:
    """Counts from `start` to `stop`.

    Args:
        model: hooks are put on its modules in between, and taken off again.
        ignored: classes whose calls are not counted, nor what they call.
    """

    def __init__(self, model: nn.Module, ignored: Iterable[type[nn.Module]] = ()) -> None:
        self._model, self._ignored = model, tuple(ignored)
        self._hooks: list[Any] = []
        self._mode: _Counting | None = None
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._clock = WallClock(device)
        self.totals = Totals()
        self.root = Node("", type(model).__name__, _unique(model))
        self._stack: list[Node] = []
        self._ranges: list[tuple[Node, Any]] = []
        self._keys: dict[str, Node] = {}
        self._silent = self._recomputing = 0

    def start(self) -> None:
        """Begin to count."""
        names = {module: name for name, module in self._model.named_modules()}
        for module, name in names.items():
            self._hooks.append(module.register_forward_pre_hook(self._enter(name), prepend=True))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        self._mode = _Counting(self)
        self._mode.__enter__()

    def stop(self) -> None:
        """End counting, take everything off the model and read the clocks; waits for the device."""
        if self._mode is None:
            return
        self._mode.__exit__(None, None, None)
        self._mode = None
        while self._hooks:
            self._hooks.pop().remove()
        for key, milliseconds in self._clock.elapsed(wait=True):
            self._keys[key].seconds += milliseconds / 1e3

    def count(self, namespace: str, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Book one operator under whatever runs now."""
        if self._silent:
            return
        cost = cost_of(name, args, result) if namespace == "aten" else None
        if cost is None:
            self.totals.unknown[f"{namespace}::{name}"] += 1
            return
        flops, macs = cost
        if _in_backward():
            self.totals.backward_flops += flops
            self.totals.backward_macs += macs
            self.totals.recompute_flops += flops if self._recomputing else 0
        elif self._stack:
            self._stack[-1].own_flops += flops
            self._stack[-1].own_macs += macs
        else:
            self.totals.outside_flops += flops

    def _enter(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if self._silent or (self._ignored and isinstance(module, self._ignored)):
                self._silent += 1
            elif _in_backward():
                self._recomputing += 1
            else:
                self._push(self._node(module, name))

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._silent:
            self._silent -= 1
        elif _in_backward():
            self._recomputing -= 1
        elif self._ranges:
            self._stack.pop()
            self._ranges.pop()[1].__exit__(None, None, None)

    def _push(self, node: Node) -> None:
        key = str(id(node))  # nodes live as long as the watch
        self._keys[key] = node
        node.calls += 1
        timed = self._clock.range(key)
        timed.__enter__()
        self._stack.append(node)
        self._ranges.append((node, timed))

    def _node(self, module: nn.Module, name: str) -> Node:
        if module is self._model:
            return self.root
        parent = self._stack[-1] if self._stack else self.root
        if name not in parent.children:
            parent.children[name] = Node(name, type(module).__name__, _unique(module))
        return parent.children[name]


def _unique(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
