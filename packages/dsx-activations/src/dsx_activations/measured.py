"""Measures in one forward pass what the blocks of a model save for the backward, and how long their forwards take.

In that pass every block runs four times: once to count what it saves, twice to measure the cost of keeping the results
of its expensive operators (`operators.py`) and computing the rest again, and once through `checkpoint`. Nothing of the
first three runs is kept, so that the measurement needs no more memory than recomputing everything. They leave random
state and buffers (running statistics) as they were.

The count is the bytes of the distinct storages that autograd saves, without parameters and buffers. Temporary tensors
inside operators are not seen.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from dsx_core.modules import CALL, AroundCall, is_compiled
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from .call import checkpoint, restore_buffers, synchronize
from .configured import current
from .operators import KeepResults, keep_operators
from .plan import BlockCost, Selective

__all__ = ["Measurement"]

_log = logging.getLogger("dsx_activations")


class Measurement:
    """Measures one forward pass, between `begin` and `end`.

    Args:
        model: the model whose forward is measured.
        names: the names of its blocks.
        operators: also measure the cost of keeping the results of expensive operators.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], *, operators: bool = True) -> None:
        self._blocks = {name: model.get_submodule(name) for name in names}
        inside = {part for block in self._blocks.values() for part in block.modules()}
        self._around = [module for module in model.modules() if module not in inside]
        self._opaque = frozenset() if operators else frozenset(names)
        self._opaque |= {name for name, block in self._blocks.items() if is_compiled(block)}
        """Blocks whose operators cannot be seen, or are not to be measured."""
        self._costs: dict[str, BlockCost] = {}
        self._between = 0
        self._inside = False
        self._seen: set[int] = set()
        self._held: list[torch.Tensor] = []
        self._calls: list[tuple[nn.Module, Any]] = []
        self._hooks = ExitStack()

    def begin(self) -> None:
        """Start watching the blocks and the tensors that are saved outside of them."""
        for name, module in self._blocks.items():
            inner = getattr(module, CALL, None)
            self._calls.append((module, inner))
            setattr(module, CALL, _MeasuredCall(self, name, module, inner))
        self._hooks.enter_context(saved_tensors_hooks(self._note_outside, _unpack))

    def end(self) -> tuple[tuple[BlockCost, ...], int]:
        """Stop watching.

        Returns:
            Costs in the order of the forward pass, and the bytes that were saved behind the last block.
        """
        self._hooks.close()
        for module, inner in self._calls:
            setattr(module, CALL, inner)
        self._calls, self._held = [], []
        return tuple(self._costs.values()), self._between

    def _note_outside(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._inside and not _of([tensor]) <= self._seen:
            self._seen |= _storages(self._around)  # at ZeRO stage 3 parameters come and go
            self._between += _new_bytes([tensor], self._seen)
            self._held.append(tensor)  # keep it, so that no other tensor gets its address
        return tensor.detach()

    def run(self, name: str, module: nn.Module, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a block."""
        if not torch.is_grad_enabled() or self._inside:
            return call(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._held += inputs
        probe = _Probe(module, self._seen, inputs, operators=name not in self._opaque)
        self._inside = True
        try:
            with probe:
                out = checkpoint(call, *args, **kwargs)
        finally:
            self._inside = False
        before = self._costs.get(name, BlockCost(name, 0, 0, 0.0))
        self._costs[name] = BlockCost(
            name,
            before.kept + probe.kept,
            before.inputs + _new_bytes(inputs, self._seen),
            before.seconds + probe.seconds,
            before.outside + self._between,
            _together(before.selective, probe.selective) if name in self._costs else probe.selective,
        )
        self._between = 0
        return out


def _together(first: Selective | None, second: Selective | None) -> Selective | None:
    """The costs of two calls of one block, whose tensors are alive at the same time."""
    if first is None or second is None:
        return None
    return Selective(first.kept + second.kept, first.alive + second.alive, first.seconds + second.seconds)


class _MeasuredCall(AroundCall):
    def __init__(self, measurement: Measurement, name: str, module: nn.Module, inner: Any) -> None:
        super().__init__(module, inner)
        self._measurement, self._name = measurement, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._measurement.run(self._name, self.module, self.call, args, kwargs)


class _Probe:
    """Replaces a module's `forward` for one call, inside the module's hooks, and runs it several times."""

    def __init__(self, module: nn.Module, seen: set[int], inputs: Sequence[torch.Tensor], *, operators: bool) -> None:
        self._module, self._seen, self._inputs, self._operators = module, seen, inputs, operators
        self._own = module.__dict__.get("forward")
        self.kept, self.seconds = 0, 0.0
        self.selective: Selective | None = None

    def __enter__(self) -> None:
        self._forward = self._module.forward
        self._module.forward = self  # type: ignore[method-assign]

    def __exit__(self, *exc_info: object) -> None:
        del self._module.forward
        if self._own is not None:
            self._module.forward = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs, alive = self._count(args, kwargs)
        keeping = None if outputs is None else self._keeping(args, kwargs)
        synchronize(self._inputs)
        began = time.perf_counter()
        out = self._forward(*args, **kwargs)
        synchronize(self._inputs)
        self.seconds = time.perf_counter() - began
        if keeping is not None and outputs is not None:
            first, again = keeping
            self.selective = Selective(outputs, alive, max(0.0, first - self.seconds) + again)
        return out

    def _count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | None, int]:
        """Count the bytes that a call saves. Returns the bytes of the results of expensive operators (None where these
        cannot be kept), and the bytes of these results together with everything that autograd saves.
        """
        held: list[torch.Tensor] = []
        results = KeepResults()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            held.append(tensor)
            return tensor.detach()

        with self._undone(), saved_tensors_hooks(pack, _unpack):
            with results if self._operators else nullcontext():
                out = self._forward(*args, **kwargs)
        try:
            known = self._seen | _storages(self._module.modules())
            self.kept = _new_bytes(held, set(known))
            handed_out = _of([leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)])
            outputs = results.tensors()
            if not outputs or handed_out & _of(outputs):
                return None, 0  # the code that gets this result as an output may write to it in place
            kept = _new_bytes(outputs, known)
            return kept, kept + _new_bytes(held, known)
        finally:
            held.clear()  # autograd keeps `pack` as long as the graph, which would hold its own tensors

    def _keeping(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, float] | None:
        """Seconds of a forward that keeps the results of expensive operators, and of the recomputation from them. None
        if a result is written to in place.
        """
        times = []
        try:
            for context in keep_operators():
                # With other hooks: the hooks around this call belong to the checkpoint that it is inside of.
                with self._undone(), saved_tensors_hooks(torch.Tensor.detach, _unpack):
                    synchronize(self._inputs)
                    began = time.perf_counter()
                    with context:
                        self._forward(*args, **kwargs)
                    synchronize(self._inputs)
                    times.append(time.perf_counter() - began)
        except RuntimeError as error:
            _log.debug("%s: results of operators are not kept: %s", type(self._module).__name__, error)
            return None
        return times[0], times[1]

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """A forward inside the context has no effect on buffers and random state."""
        buffers = [(buffer, buffer.detach().clone()) for buffer in self._module.buffers()]
        devices = sorted({tensor.device.index for tensor in self._inputs if tensor.is_cuda})
        rng = current().rng
        streams = rng.snapshot()
        try:
            with torch.random.fork_rng(devices=devices):
                yield
        finally:
            rng.restore(streams)
            restore_buffers(buffers)


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a hook has packed, which is detached: a graph that held its own output would never be freed, as
    Python sees only half of that cycle (`test_checkpointing_freed.py`). Autograd attaches the tensor to its node again.
    """
    return tensor


def _new_bytes(tensors: Sequence[torch.Tensor], seen: set[int]) -> int:
    """Bytes of the storages that are not in `seen` yet; adds them to `seen`."""
    total = 0
    for tensor in tensors:
        for key, size in _places(tensor):
            if key not in seen:
                seen.add(key)
                total += size
    return total


def _places(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Address and bytes of a tensor's storage; an empty list for a tensor without a storage (subclasses)."""
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
        return []
    storage = tensor.untyped_storage()
    return [(storage.data_ptr(), storage.nbytes())] if storage.nbytes() else []


def _of(tensors: Sequence[torch.Tensor]) -> set[int]:
    return {key for tensor in tensors for key, _ in _places(tensor)}


def _storages(modules: Iterable[nn.Module]) -> set[int]:
    """Storages of the modules' own parameters and buffers."""
    own = (t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)
    return _of([tensor.detach() for tensor in own if type(tensor) in (torch.Tensor, nn.Parameter)])
