"""Finds the layer of a stage in which values stop being finite, in the forward or in the backward.

A stage that finds a loss or a gradient that is not finite runs again on its kept input. In the forward
every layer's output is checked. In the backward the gradients of every layer's input and output are computed, and
`.grad` is not changed. The error began in the layer whose output has a finite gradient and whose input does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .structure import flatten

Run = Callable[[], Sequence[torch.Tensor]]


def is_finite(value: Any) -> bool:
    """Whether all floating-point numbers in a value are finite."""
    return all(bool(torch.isfinite(t).all()) for t in flatten(value)[1] if t.is_floating_point() or t.is_complex())


def first_in_forward(module: Any, run: Callable[[], Any]) -> tuple[bool, str | None]:
    """Run a forward. Return (whether its output is finite, the first layer whose output is not finite or None)."""
    found: list[str] = []

    def check_output(name: str, layer: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if not found and not is_finite(output):
            found.append(_layer_label(name, layer))

    with _forward_hooks(module, check_output), torch.no_grad():
        output = run()
    return not found and is_finite(output), found[0] if found else None


@dataclass
class _Call:
    """One call of a layer, with its inputs and outputs that require gradients."""

    name: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


def first_in_backward(module: Any, run: Run, grads: Sequence[torch.Tensor | None]) -> str | None:
    """The layer in whose backward gradients stop being finite; None if there is no such layer, or it is not found.

    Args:
        module: the stage.
        run: runs its forward again and returns the tensors that are differentiated.
        grads: gradients of these tensors; None for a tensor that is not used, or for a scalar (then 1).
    """
    calls: list[_Call] = []

    def record_call(name: str, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs, outputs = ([t for t in flatten(v)[1] if t.requires_grad] for v in ([*args, *kwargs.values()], output))
        calls.append(_Call(_layer_label(name, layer), inputs, outputs))

    with _forward_hooks(module, record_call), torch.enable_grad():
        outputs = run()
    roots, filled = [], []
    for output, gradient in zip(outputs, grads):
        if output.requires_grad and (gradient is not None or output.numel() == 1):
            roots.append(output)
            filled.append(torch.ones_like(output) if gradient is None else gradient)
    if not roots:
        return None
    tensors = {id(t): t for call in calls for t in (*call.inputs, *call.outputs)}
    bad = _not_finite(roots, filled, tensors)

    def begins(call: _Call) -> bool:
        return bool(call.outputs) and not bad & set(map(id, call.outputs)) and bool(bad & set(map(id, call.inputs)))

    # A layer's forward ends after those of its sublayers. So in reverse order the outermost layer comes first; its
    # sublayers are searched next.
    outer = next((call for call in reversed(calls) if begins(call)), None)
    if outer is not None:
        inside = f"{outer.name.partition(' ')[0]}."
        parts = [call for call in calls if call.name.startswith(inside) and begins(call)]
        return max([outer, *parts], key=lambda call: call.name.count(".")).name
    return _first_parameter(module, roots, filled)


def _first_parameter(module: Any, roots: list[torch.Tensor], filled: list[torch.Tensor]) -> str | None:
    """The last layer that has a parameter whose gradient is not finite."""
    named = list(module.named_parameters()) if isinstance(module, nn.Module) else []
    bad = _not_finite(roots, filled, {id(p): p for _, p in named if p.requires_grad})
    return next((layer_of_parameter(module, n) for n, p in reversed(named) if id(p) in bad), None)


def layer_of_parameter(module: nn.Module, name: str) -> str:
    """The layer that has a parameter, with its class."""
    owner = name.rpartition(".")[0]
    return _layer_label(owner, module.get_submodule(owner)) if owner else name


def _not_finite(roots: list[torch.Tensor], filled: list[torch.Tensor], asked: dict[int, torch.Tensor]) -> set[int]:
    """The keys of `asked` whose tensors have a gradient that is not finite."""
    if not asked:
        return set()
    found = torch.autograd.grad(roots, list(asked.values()), filled, retain_graph=True, allow_unused=True)
    return {key for key, g in zip(asked, found) if g is not None and not bool(torch.isfinite(g).all())}


def finite_parameters(module: Any) -> tuple[list[str], torch.Tensor]:
    """The names of the parameters that have a `.grad`, and for each whether it is finite, on their device. It passes
    over them once, and does not wait for the device.

    A gradient of a subclass of `torch.Tensor` may have its values on several ranks, so its own `norm` is called.
    dsx-zero's gradients are asked one by one: it takes `_foreach_norm` of a list for the sum of `clip_grad_norm_`, and
    refuses that where ranks hold different slices (test_both_together).
    """
    held = list(module.named_parameters()) if isinstance(module, nn.Module) else []
    grads = {name: p.grad for name, p in held if p.grad is not None}
    values = {name: g.coalesce().values() if g.is_sparse else g for name, g in grads.items()}
    values = {name: g for name, g in values.items() if g.numel()}
    if not values:
        return [], torch.empty(0, dtype=torch.bool, device="cpu")
    order = float("inf")  # the maximum norm; it is NaN if a value is NaN
    plain = {name: g for name, g in values.items() if type(g) is torch.Tensor}
    norms = {name: g.norm(order) for name, g in values.items() if name not in plain}
    if plain:
        together = torch._foreach_norm(list(plain.values()), order)  # pyright: ignore[reportPrivateImportUsage]
        norms.update(zip(plain, together))
    device = next(iter(norms.values())).device
    rows = torch.stack([norms[name].to(device, torch.float32) for name in values])
    return list(values), torch.isfinite(rows)


def read_together(tensors: Sequence[torch.Tensor]) -> list[list[float]]:
    """The numbers of some 1-D tensors. Waits once for the device, however many tensors there are."""
    filled = [t for t in tensors if t.numel()]
    if not filled:
        return [[] for _ in tensors]
    device = next((t.device for t in filled if t.device.type != "cpu"), filled[0].device)
    row = iter(torch.cat([t.to(device, torch.float64, non_blocking=True) for t in filled]).tolist())
    return [[next(row) for _ in range(t.numel())] for t in tensors]


@contextmanager
def _forward_hooks(module: Any, callback: Callable[..., None]) -> Any:
    """Call `callback(name, layer, args, kwargs, output)` after every layer's forward."""
    handles = []
    if isinstance(module, nn.Module):
        for name, part in module.named_modules():
            if name:
                handles.append(part.register_forward_hook(_named_hook(name, callback), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _named_hook(name: str, callback: Callable[..., None]) -> Callable[..., None]:
    def hook(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        callback(name, layer, args, kwargs, output)

    return hook


def _layer_label(name: str, layer: nn.Module) -> str:
    return f"{name} ({type(layer).__name__})"
