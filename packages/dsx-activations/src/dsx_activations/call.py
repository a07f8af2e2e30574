"""`checkpoint`: run a function, keep its inputs only, and run it again in the backward pass.

Tensors anywhere in the arguments (lists, dicts, keyword arguments) take part in autograd; everything else is passed on
as it is. The recomputation sees the autocast state, the random state of CPU and device, and the states of all tracked
generators of the first run, and leaves the present ones as they were.

The form that does not re-enter autograd is the default: it also works with `torch.autograd.grad`, with frozen inputs,
and with graphs that are differentiated in part. With `use_reentrant=True` the first run records no graph. If no input
requires gradients, that form would lose the gradients of parameters, so the default form is used instead.

Buffers of a module (running statistics) are updated by the first run only, where the function is the module or a
method of it.

Inside another checkpoint, inputs are not packed: the outer checkpoint frees them until its own recomputation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from dsx_core.device import Device
from dsx_core.modules import outside_graphs
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import tree_flatten, tree_unflatten

from .configured import State, current
from .errors import ActivationStateError
from .rng import RngSnapshot

__all__ = ["checkpoint", "non_reentrant_checkpoint", "run_checkpoint"]

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

_log = logging.getLogger("dsx_activations")


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    context_fn: ContextFn | None = None,
    **kwargs: Any,
) -> Any:
    """Run `function(*args, **kwargs)` and compute it again in the backward pass, as `configure` says.

    Args:
        function: what to run; it must compute the same when it is run again with the same inputs.
        args, kwargs: its arguments.
        use_reentrant: see the module's text. Outputs are then tensors, or containers of them.
        preserve_rng_state: False skips saving random states, for functions that draw no random numbers.
        context_fn: gives two context managers, for the first run and for the recomputation, as of
            `torch.utils.checkpoint.checkpoint`; not with `use_reentrant`.

    Returns:
        What the function returns.

    Raises:
        ActivationStateError: `context_fn` with `use_reentrant`; from the backward, where an input was changed in place
            in the meantime.
    """
    return run_checkpoint(
        function,
        args,
        kwargs,
        use_reentrant=use_reentrant,
        preserve_rng_state=preserve_rng_state,
        context_fn=context_fn,
    )


def run_checkpoint(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    context_fn: ContextFn | None = None,
) -> Any:
    """`checkpoint` with the function's arguments as a tuple and a dict, so that they may have any names."""
    if not isinstance(use_reentrant, bool):
        raise ActivationStateError(f"checkpoint(use_reentrant=...): got {use_reentrant!r}, expected True or False")
    if context_fn is not None and use_reentrant:
        raise ActivationStateError(
            "checkpoint(context_fn=...): got use_reentrant=True, expected False: the form that re-enters autograd has"
            " no contexts"
        )
    if torch.compiler.is_compiling() and current().keeper.plain:
        contexts: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
        return torch_checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **contexts, **kwargs
        )
    return _checkpoint(function, args, kwargs, use_reentrant, preserve_rng_state, context_fn)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`checkpoint` in the form that does not re-enter autograd, whatever `use_reentrant` its default may be."""
    return checkpoint(function, *args, use_reentrant=False, **kwargs)


@outside_graphs
def _checkpoint(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    reentrant: bool,
    preserve: bool,
    context_fn: ContextFn | None,
) -> Any:
    state = current()
    state.uses += 1
    leaves, structure = tree_flatten((args, kwargs))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[index] for index in places]
    others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    reentrant = reentrant and any(tensor.requires_grad for tensor in tensors)

    def call(*given: torch.Tensor) -> Any:
        filled = list(others)
        for index, tensor in zip(places, given):
            filled[index] = tensor
        inner_args, inner_kwargs = tree_unflatten(filled, structure)
        return function(*inner_args, **inner_kwargs)

    run = _Run(call, state, tracked=preserve, flat=reentrant, module=_module_of(function))
    hooks: Any = nullcontext()
    if not state.keeper.plain and not state.depth and torch.is_grad_enabled():
        hooks = state.keeper.keeping(tensors)
    contexts: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
    with hooks:
        out = torch_checkpoint.checkpoint(
            run, *tensors, use_reentrant=reentrant, preserve_rng_state=preserve, **contexts
        )
    return run.assembled(out) if reentrant else out


_TENSOR = object()
"""Stands for a tensor among the leaves of an output."""


class _Run:
    """The function as PyTorch's checkpoint calls it: once in the forward pass, then once for each recomputation.

    Args:
        function: takes the tensors among the inputs.
        state: settings and tracked generators.
        tracked: restore tracked generators for a recomputation.
        flat: return the tensors of the output as a flat tuple; `assembled` puts them back into their containers.
        module: a recomputation leaves its buffers (running statistics) as they were before it.
    """

    def __init__(
        self, function: Callable[..., Any], state: State, *, tracked: bool, flat: bool, module: nn.Module | None
    ) -> None:
        self._function, self._state, self._flat, self._module = function, state, flat, module
        self._tracked = tracked
        self._began: RngSnapshot | None = None
        self._first = True
        self._number = state.uses
        self._output: tuple[Any, list[Any]] | None = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        state = self._state
        first, self._first = self._first, False
        before = state.rng.snapshot() if self._tracked else None
        buffers = [] if first or self._module is None else [(b, b.detach().clone()) for b in self._module.buffers()]
        if first:
            self._began = before
        elif self._began is not None:
            state.rng.restore(self._began)
        self._synchronize_if_asked(tensors)
        began = time.perf_counter()
        state.depth += 1
        try:
            out = self._function(*tensors)
        finally:
            state.depth -= 1
            if not first and before is not None:
                state.rng.restore(before)
            restore_buffers(buffers)
            self._synchronize_if_asked(tensors)
            if state.settings.profile:
                what = "forward" if first else "recomputation"
                _log.info("checkpoint %d: %s %.3f ms", self._number, what, (time.perf_counter() - began) * 1e3)
        return self._flattened(out, first) if self._flat else out

    def _synchronize_if_asked(self, tensors: tuple[torch.Tensor, ...]) -> None:
        settings = self._state.settings
        if not (settings.synchronize_checkpoint_boundary or settings.profile):
            return
        device = Device.in_use()
        if not synchronize(tensors) and device is not None:
            device.synchronize()  # the function may use the current device

    def _flattened(self, out: Any, first: bool) -> tuple[torch.Tensor, ...]:
        leaves, structure = tree_flatten(out)
        if first:
            self._output = (structure, [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    def assembled(self, tensors: Any) -> Any:
        """The output as the function returned it."""
        if self._output is None:
            raise ActivationStateError("checkpoint(): the function was not run")
        structure, leaves = self._output
        given = iter((tensors,) if isinstance(tensors, torch.Tensor) else tensors)
        return tree_unflatten([next(given) if leaf is _TENSOR else leaf for leaf in leaves], structure)


def _module_of(function: Callable[..., Any]) -> nn.Module | None:
    """The module, if `function` is a module or a method of one."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def restore_buffers(values: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write earlier values back into buffers. Their version counters do not change, because graphs that saved the
    buffers stay valid.
    """
    with torch.no_grad():
        for buffer, value in values:
            with torch.autograd._unsafe_preserve_version_counter(buffer):  # pyright: ignore[reportPrivateImportUsage]
                buffer.copy_(value)


def synchronize(tensors: Iterable[torch.Tensor]) -> int:
    """Let the host wait for the accelerators of these tensors, whatever device is current; returns their number."""
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    for device in devices:
        Device.of(device).synchronize()
    return len(devices)
