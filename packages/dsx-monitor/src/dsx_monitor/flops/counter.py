"""Watches a profiled step: a dispatch mode counts operators, and hooks tell which module runs.

An operator is counted in one of four places: the forward of a module, the backward of a module (the owner of the
running autograd node, see `owners`), recomputation, which is part of backward, or outside the model. Hooks on finished
gradients (accumulation, reduction over ranks) count as outside, so that a sharded model has exactly the counts of the
plain one.

Time in backward is cut at the operators where the owner changes. The pieces include the host's work between operators,
and add up to the length of backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from dsx_core.device import Device
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .owners import Owners
from .rules import COMPOUND, VIEW, rule_for
from .tree import Node

__all__ = ["Totals", "Watch"]

_task, _node = torch._C._current_graph_task_id, torch._C._current_autograd_node
_ACCUMULATE = 2**63  # numbers from here on are those of autograd's accumulation nodes
_NEW = object()
_FREE_MODULES = (nn.modules.dropout._DropoutNd,)  # the mask's arithmetic is not counted


@dataclass
class Totals:
    """Totals, and counts that have no place in the tree.

    Attributes:
        backward_flops, backward_macs: everything that autograd ran, including a loss outside the model.
        recompute_flops: the part of it that was a forward done again.
        backward_seconds: length of all backwards together.
        outside_flops: operations outside the model and outside autograd: a loss, the reduction of gradients.
        unknown: operators without a rule, with how often they ran.
    """

    backward_flops: int = 0
    backward_macs: int = 0
    recompute_flops: int = 0
    backward_seconds: float = 0.0
    outside_flops: int = 0
    unknown: Counter[str] = field(default_factory=Counter)


class _Counting(TorchDispatchMode):
    """Passes every operator to the watch, with the rule that counts it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns True. Otherwise the base class would wrap the method below, at several microseconds per call, to hide
        it from the compiler. That is not needed: under a mode, compiled functions run eagerly.
        """
        return False

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self._rules: dict[int, Any] = {}  # by id: an operator's own hash is Python code
        self._seen: list[Any] = []  # keeps the operators alive, so that their ids are not used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = self._rules.get(id(func), _NEW)
        if rule is _NEW:
            self._rules[id(func)] = rule = rule_for(func)
            self._seen.append(func)
        if rule is VIEW:
            return _run(func, args, kwargs)
        if rule is COMPOUND:
            # Under inference mode compound operators are not decomposed before they arrive here. Decompose them to see
            # their parts. Operators on nested tensors cannot be decomposed.
            if not any(getattr(argument, "is_nested", False) for argument in args):
                with self:
                    result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            rule = None
        watch = self._watch
        owner, backward = watch.before()
        result = _run(func, args, kwargs)
        if rule is None:
            watch.note_unknown(func)
        elif not isinstance(rule, str):  # operators without arithmetic have a string as their rule
            try:
                flops, macs = rule(args, kwargs, result)
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                watch.note_unknown(func)  # a call that its rule cannot read must not stop the model
                return result
            if flops:
                watch.book(owner, backward, flops, macs)
        return result


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator as it would run without a mode.

    A call from Python would go through `__torch_function__` of tensor subclasses, which the call has passed already.
    dsx_zero's gradients refuse operations there that autograd itself may do with them.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


class _Clock:
    """Takes marks in time: with the host's clock, or as events on the current stream that are read at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = Device.of(device)
        self._pieces: list[tuple[Any, str, Any, Any]] = []

    def mark(self) -> Any:
        """A mark for this moment."""
        return self._device.mark()

    def add(self, target: Any, field_name: str, start: Any, end: Any) -> None:
        """Add the time between two marks to `target.field_name`, now or in `settle`."""
        if self._device.is_accelerator:
            self._pieces.append((target, field_name, start, end))
        else:
            setattr(target, field_name, getattr(target, field_name) + end - start)

    def settle(self) -> None:
        """Read all events; waits for the device."""
        pieces, self._pieces = self._pieces, []
        for target, name, start, end in pieces:
            setattr(target, name, getattr(target, name) + self._device.milliseconds(start, end) / 1e3)


_OUTSIDE = object()
"""Stands for the owner of operators that belong to no module's forward or backward."""


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
        self._clock = _Clock(device)
        self.totals = Totals()
        self._sizes = _sizes(model)
        self.root = Node("", type(model).__name__, self._sizes[model])
        self._by_name: dict[str, Node] = {"": self.root}
        self._owners = Owners()
        self._stack: list[tuple[Node, Any]] = []  # modules in their forward, with when they began
        self._again: list[Node] = []  # modules that are being recomputed
        self._silent = 0
        self._tasks: list[int] = []  # running backwards, the innermost last
        self._creates_graph = False
        self._piece: tuple[Any, Any] | None = None  # owner and start of the running piece of backward

    def start(self) -> None:
        """Begin to count."""
        names = {module: name for name, module in self._model.named_modules()}
        for module, name in names.items():
            self._hooks.append(module.register_forward_pre_hook(self._enter(name), prepend=True))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        self._owners.note(None)
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
        self._cut(None)
        self._clock.settle()
        self.totals.backward_seconds += sum(node.own_backward_seconds for _, node in self.root.walk())

    # - Operators

    def before(self) -> tuple[Any, bool]:
        """The owner of the operator that is about to run, and whether autograd runs it."""
        task = _task()
        if task == -1:
            return (self._stack[-1][0] if self._stack else _OUTSIDE), False
        if task not in self._tasks:
            self._begin_backward(task)
        owner = self._again[-1] if self._again else self._owner_in_backward()
        if owner is not _OUTSIDE and (self._piece is None or self._piece[0] is not owner):
            self._cut(owner)
        return owner, True

    def _owner_in_backward(self) -> Any:
        """Owner of the running autograd node; None for a node that no module made."""
        node = _node()
        if node is None or (sequence := node._sequence_nr()) >= _ACCUMULATE:
            return _OUTSIDE
        return self._owners.of(sequence, nested=len(self._tasks) > 1)

    def note_unknown(self, func: Any) -> None:
        """Remember an operator that has no rule."""
        if not self._silent:
            self.totals.unknown[func._overloadpacket._qualified_op_name] += 1

    def book(self, owner: Any, backward: bool, flops: int, macs: int) -> None:
        """Count an operator for the owner that `before` returned."""
        if self._silent:
            return
        if owner is _OUTSIDE:
            self.totals.outside_flops += flops
        elif backward:
            self._book_backward(owner, flops, macs)
        else:
            owner.own_flops += flops
            owner.own_macs += macs

    def _book_backward(self, owner: Node | None, flops: int, macs: int) -> None:
        totals = self.totals
        again = flops if self._again or (torch.is_grad_enabled() and not self._creates_graph) else 0
        totals.backward_flops += flops
        totals.backward_macs += macs
        totals.recompute_flops += again
        if owner is not None:
            owner.own_backward_flops += flops
            owner.own_backward_macs += macs
            owner.own_recompute_flops += again

    # - Backward

    def _begin_backward(self, task: int) -> None:
        if not self._tasks:
            # Without create_graph autograd records nothing in backward, so a recorded operator is recomputation. With
            # create_graph the two cannot be told apart this way.
            self._creates_graph = torch.is_grad_enabled()
        self._tasks.append(task)

        def end() -> None:
            self._tasks.remove(task)
            if not self._tasks:
                self._cut(None)
                self._piece = None

        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _cut(self, owner: Any) -> None:
        """End the running piece of backward and begin one of `owner`."""
        now = self._clock.mark()
        if self._piece is not None:
            before, start = self._piece
            if before is None:
                self._clock.add(self.totals, "backward_seconds", start, now)
            else:
                self._clock.add(before, "own_backward_seconds", start, now)
        self._piece = (owner, now)

    # - Modules

    def _enter(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if self._silent or isinstance(module, (*self._ignored, *_FREE_MODULES)):
                self._silent += 1
                return
            if _task() != -1:
                node = self._by_name.get(name) or self._node(module, name)
                self._again.append(node)
            else:
                node = self._node(module, name)
                node.calls += 1
                self._stack.append((node, self._clock.mark()))
            self._owners.note(node)

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._silent:
            self._silent -= 1
        elif _task() != -1:
            if self._again:
                self._again.pop()
                owner = self._again[-1] if self._again else self._owner_in_backward()
                self._owners.note(None if owner is _OUTSIDE else owner)
        elif self._stack:
            node, start = self._stack.pop()
            self._clock.add(node, "seconds", start, self._clock.mark())
            self._owners.note(self._stack[-1][0] if self._stack else None)

    def _node(self, module: nn.Module, name: str) -> Node:
        if module is self._model:
            return self.root
        parent = self._stack[-1][0] if self._stack else self.root
        node = parent.children.get(name)
        if node is None:
            node = parent.children[name] = Node(name, type(module).__name__, self._sizes[module])
            self._by_name.setdefault(name, node)
        return node


def _sizes(model: nn.Module) -> dict[nn.Module, int]:
    """Number of parameter elements of every module, in one pass over the tree; shared parameters count once."""
    found: dict[nn.Module, dict[int, int]] = {}

    def visit(module: nn.Module) -> dict[int, int]:
        if module not in found:
            numels = {id(p): p.numel() for p in module._parameters.values() if p is not None}
            found[module] = numels
            for child in module._modules.values():
                if child is not None:
                    numels.update(visit(child))
        return found[module]

    visit(model)
    return {module: sum(numels.values()) for module, numels in found.items()}
