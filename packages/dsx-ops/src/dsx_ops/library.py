"""The one `torch.library` of this package, and how an operator enters it.

An operator is a schema, a function that runs it (which asks for the compiled kernel and falls back on its PyTorch
reference), a fake that gives shapes and dtypes for tracing, and, where it is differentiable, the formula of its
backward. What has one is differentiable once: the operators that compute gradients say so when they are differentiated
themselves, instead of contributing nothing. With these `torch.library.opcheck` and `torch.compile` work. A kernel for
one device is added with `implement(name, "CUDA", function)` and takes precedence there. What an operator writes to, as
its schema says (`Tensor(a!)`), gets a new version, whichever kernel did it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .errors import TensorError
from .tables import wrote

NAMESPACE = "dsx_ops"
_library = torch.library.Library(NAMESPACE, "DEF")  # the registrations live as long as this object


def operator(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    gradient: bool = False,
) -> None:
    """Define `dsx_ops::<schema>`; `run` serves every device without a kernel of its own, `setup` and `backward` are
    autograd's.

    `gradient`: the operator is a part of another one's backward, and raises `TensorError` when it is to be
    differentiated.
    """
    name = schema.split("(", 1)[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    if any(a.alias_info is not None and a.alias_info.is_write for a in _overload(name)._schema.arguments):
        _library.impl(name, _counting_writes(name), "ADInplaceOrView", with_keyset=True)
    if gradient:
        backward = _refusal(name)
    if backward is not None:
        torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=_library)


def _overload(name: str) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _counting_writes(name: str) -> Callable[..., Any]:
    """Runs the operator below autograd, and tells autograd which arguments were written, as torch's own operators
    do.
    """
    overload = _overload(name)
    written = [
        i for i, a in enumerate(overload._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    ]
    below: Any = torch._C._after_ADInplaceOrView_keyset  # pyright: ignore[reportAttributeAccessIssue]

    def run(keyset: Any, *arguments: Any) -> Any:
        # Writes by torch's operators inside are not counted a second time: the guard switches this key off in the
        # thread.
        with torch._C._AutoDispatchBelowADInplaceOrView():  # pyright: ignore[reportAttributeAccessIssue]
            found = overload.redispatch(keyset & below, *arguments)
        wrote(arguments[i] for i in written)
        return found

    return run


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise TensorError(
            f"{name}: got a second derivative to compute, expected only first ones: the functions of dsx_ops are"
            " differentiable once; use torch.nn.functional's where gradients of gradients are needed (gradient"
            " penalties, Hessians)"
        )

    return refuse


def implement(name: str, key: str, function: Callable[..., Any]) -> None:
    """Give the operator `name` a kernel for one dispatch key, e.g. `"CUDA"`."""
    _library.impl(name, function, key)
