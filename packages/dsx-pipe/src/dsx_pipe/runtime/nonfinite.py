"""Where values of a stage stop being finite: in which layer, in the forward or in the backward.

A stage that finds a loss or a gradient that is not finite runs again on its kept input. In the forward
every layer's output is checked. In the backward the gradients of every layer's input and output are computed, and
`.grad` is not changed. The error began in the layer whose output has a finite gradient and whose input has not.
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
    """(whether the output is finite, the first layer whose output is not)."""
    found: list[str] = []

    def look(name: str, layer: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if not found and not is_finite(output):
            found.append(_named(name, layer))

    with _watched(module, look), torch.no_grad():
        output = run()
    return not found and is_finite(output), found[0] if found else None


@dataclass
class _Call:
    """One call of a layer, with the tensors that carry gradients."""

    name: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


def first_in_backward(module: Any, run: Run, grads: Sequence[torch.Tensor | None]) -> str | None:
    """The layer in whose backward gradients stop being finite; None if none does, or none can be told.

    Args:
        run: the forward once more, to the tensors that are differentiated.
        grads: their gradients; None where nothing uses one, or for a scalar (then 1).
    """
    calls: list[_Call] = []

    def note(name: str, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs, outputs = ([t for t in flatten(v)[1] if t.requires_grad] for v in ([*args, *kwargs.values()], output))
        calls.append(_Call(_named(name, layer), inputs, outputs))

    with _watched(module, note), torch.enable_grad():
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

    # a layer ends behind its parts, so the outermost comes first from the back: then look inside it
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
    return _named(owner, module.get_submodule(owner)) if owner else name


def _not_finite(roots: list[torch.Tensor], filled: list[torch.Tensor], asked: dict[int, torch.Tensor]) -> set[int]:
    """Keys of the tensors whose gradient is not finite."""
    if not asked:
        return set()
    found = torch.autograd.grad(roots, list(asked.values()), filled, retain_graph=True, allow_unused=True)
    return {key for key, g in zip(asked, found) if g is not None and not bool(torch.isfinite(g).all())}


def parameters_not_finite(module: Any) -> list[str]:
    """Names of the parameters whose `.grad` is not finite. One pass over them, and one wait for the device.

    A gradient of another class than `torch.Tensor` may have its values on several ranks, and answers for itself with
    `norm`: dsx-zero's are asked one by one, because a list of them is taken for the sum of `clip_grad_norm_`, which it
    refuses where ranks hold different slices (test_both_together).
    """
    held = list(module.named_parameters()) if isinstance(module, nn.Module) else []
    grads = {name: p.grad for name, p in held if p.grad is not None}
    values = {name: g.coalesce().values() if g.is_sparse else g for name, g in grads.items()}
    values = {name: g for name, g in values.items() if g.numel()}
    if not values:
        return []
    order = float("inf")  # the norm is NaN where there is a NaN
    plain = {name: g for name, g in values.items() if type(g) is torch.Tensor}
    norms = {name: g.norm(order) for name, g in values.items() if name not in plain}
    if plain:
        together = torch._foreach_norm(list(plain.values()), order)  # pyright: ignore[reportPrivateImportUsage]
        norms.update(zip(plain, together))
    device = next(iter(norms.values())).device
    rows = torch.stack([norm.to(device, torch.float32) for norm in norms.values()])
    finite = dict(zip(norms, torch.isfinite(rows).tolist()))
    return [name for name in values if not finite[name]]


@contextmanager
def _watched(module: Any, look: Callable[..., None]) -> Any:
    """Call `look(name, layer, args, kwargs, output)` behind every layer's forward."""
    handles = []
    if isinstance(module, nn.Module):
        for name, part in module.named_modules():
            if name:
                handles.append(part.register_forward_hook(_hook(name, look), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(name: str, look: Callable[..., None]) -> Callable[..., None]:
    def hook(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        look(name, layer, args, kwargs, output)

    return hook


def _named(name: str, layer: nn.Module) -> str:
    return f"{name} ({type(layer).__name__})"
