"""Rows of a sequence picked out and put back: what random layerwise token dropping (random-LTD, Yao et al. 2022) does
around a layer.

`indices` [batch, kept] (int64) names, for every sample, distinct positions in its sequence. Gathering is the backward
of scattering and the other way round, so both are differentiable:

    part = token_gather(x, indices)               part[b, k] = x[b, indices[b, k]]
    y = token_scatter(x, layer(part), indices)    y = x with those rows replaced

Sequences are [batch, sequence, hidden], or [sequence, batch, hidden] with `batch_first=False`. Which tokens to drop is
decided elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import library, native
from .checks import check
from .errors import TensorError

_ANY = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def token_gather(x: Tensor, indices: Tensor, batch_first: bool = True) -> Tensor:
    """The rows of x [batch, sequence, hidden] at `indices` [batch, kept]: [batch, kept, hidden]. Raises
    `TensorError`.
    """
    return torch.ops.dsx_ops.token_gather(x, indices, batch_first)


def token_scatter(full: Tensor, part: Tensor, indices: Tensor, batch_first: bool = True) -> Tensor:
    """A copy of `full` with the rows at `indices` replaced by those of `part` [batch, kept, hidden]. Raises
    `TensorError`.
    """
    return torch.ops.dsx_ops.token_scatter(full, part, indices, batch_first)


def token_scatter_(full: Tensor, part: Tensor, indices: Tensor, batch_first: bool = True) -> Tensor:
    """As `token_scatter`, in place and without a gradient; returns `full`. Raises `TensorError`."""
    if torch.is_grad_enabled() and (full.requires_grad or part.requires_grad):
        raise TensorError(
            "token_scatter_: got tensors that require gradients, which it does not carry; use token_scatter"
        )
    torch.ops.dsx_ops.token_scatter_(full, part, indices, batch_first)
    return full


def token_sort_(indices: Tensor) -> Tensor:
    """Sort every row of `indices` upwards, in place; returns it. Kept tokens stay in their order."""
    check(indices, "indices", dtypes=(torch.int64, torch.int32))
    indices.copy_(indices.sort(-1).values)
    return indices


def mask_gather_bert(mask: Tensor, indices: Tensor) -> Tensor:
    """The attention mask [batch, 1, s, s] of the kept tokens: [batch, 1, kept, kept], rows and columns at `indices`
    [batch, kept]. Raises `TensorError` for other shapes.
    """
    if mask.dim() != 4 or mask.shape[-1] != mask.shape[-2]:
        raise TensorError(f"mask: got shape {tuple(mask.shape)}, expected [batch, heads, sequence, sequence]")
    if indices.dim() != 2 or (indices.shape[0] not in (mask.shape[0], 1) and mask.shape[0] != 1):
        raise TensorError(f"indices: got shape {tuple(indices.shape)}, expected [{mask.shape[0]}, kept]")
    batch = torch.arange(indices.shape[0], device=mask.device).view(-1, 1, 1)
    wide = mask.expand(indices.shape[0], *mask.shape[1:])
    return wide[batch, :, indices[:, :, None], indices[:, None, :]].permute(0, 3, 1, 2).contiguous()


def mask_gather_gpt(mask: Tensor, kept: int) -> Tensor:
    """The causal attention mask of `kept` sorted tokens: the leading [.., kept, kept] of mask [.., s, s]. Raises
    `TensorError` where `kept` is more than s.
    """
    if mask.dim() < 2 or not 0 <= kept <= min(mask.shape[-2:]):
        raise TensorError(
            f"kept: got {kept} for a mask of shape {tuple(mask.shape)}, expected at most its last dimensions"
        )
    return mask[..., :kept, :kept].contiguous()


# ---- reference -------------------------------------------------------------------------------------------------------


def _wide(indices: Tensor, hidden: int, batch_first: bool) -> Tensor:
    """Indices in the form that torch.gather and scatter want."""
    rows = indices if batch_first else indices.t()
    return rows.unsqueeze(-1).expand(*rows.shape, hidden)


def reference_gather(x: Tensor, indices: Tensor, batch_first: bool) -> Tensor:
    """`token_gather` in plain PyTorch."""
    return torch.gather(x, 1 if batch_first else 0, _wide(indices, x.shape[-1], batch_first))


def reference_scatter_(full: Tensor, part: Tensor, indices: Tensor, batch_first: bool) -> None:
    """`token_scatter_` in plain PyTorch."""
    full.scatter_(1 if batch_first else 0, _wide(indices, full.shape[-1], batch_first), part)


# ---- operators -------------------------------------------------------------------------------------------------------


def _part_shape(full: Tensor, indices: Tensor, batch_first: bool) -> tuple[int, ...]:
    check(full, "sequence", dtypes=_ANY)
    if full.dim() != 3:
        raise TensorError(
            f"sequence: got shape {tuple(full.shape)}, expected three dimensions (batch, sequence, hidden)"
        )
    batch = full.shape[0 if batch_first else 1]
    if indices.dim() != 2 or indices.shape[0] != batch:
        raise TensorError(f"indices: got shape {tuple(indices.shape)}, expected [{batch}, kept]")
    check(indices, "indices", dtypes=(torch.int64,), like=full)
    kept, hidden = indices.shape[1], full.shape[2]
    return (batch, kept, hidden) if batch_first else (kept, batch, hidden)


def _check_indices(full: Tensor, indices: Tensor, batch_first: bool) -> None:
    """Values, too; not on devices, where looking would mean waiting."""
    if indices.device.type != "cpu" or indices.numel() == 0:
        return
    sequence = full.shape[1 if batch_first else 0]
    low, high = (int(v) for v in indices.aminmax())
    if low < 0 or high >= sequence:
        raise TensorError(f"indices: got values from {low} to {high}, expected positions from 0 to {sequence - 1}")
    ordered = indices.sort(-1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise TensorError("indices: got a position twice in a row, expected distinct ones")


def _native(module: Any, gather: bool, full: Tensor, part: Tensor, indices: Tensor, batch_first: bool) -> None:
    batch, kept = indices.shape
    sequence = full.shape[1 if batch_first else 0]
    addresses = [full.data_ptr(), part.data_ptr(), indices.data_ptr()]
    sizes = [batch, kept, sequence, full.shape[2] * full.element_size()]
    module.move_rows(gather, addresses, sizes, batch_first, native.threads())


def _run_gather(x: Tensor, indices: Tensor, batch_first: bool) -> Tensor:
    out = _fake_gather(x, indices, batch_first)
    _check_indices(x, indices, batch_first)
    module = native.module_for(x, "token_gather", out.numel())
    if module is None:
        return reference_gather(x, indices, batch_first)
    _native(module, True, x, out, indices, batch_first)
    return out


def _fake_gather(x: Tensor, indices: Tensor, batch_first: bool) -> Tensor:
    return x.new_empty(_part_shape(x, indices, batch_first))


def _check_scatter(full: Tensor, part: Tensor, indices: Tensor, batch_first: bool) -> None:
    shape = _part_shape(full, indices, batch_first)
    check(part, "tokens", dtypes=(full.dtype,), shape=shape, like=full)


def _run_scatter_(full: Tensor, part: Tensor, indices: Tensor, batch_first: bool) -> None:
    _check_scatter(full, part, indices, batch_first)
    _check_indices(full, indices, batch_first)
    module = native.module_for(full, "token_scatter", part.numel())
    if module is None:
        reference_scatter_(full, part, indices, batch_first)
    else:
        _native(module, False, full, part, indices, batch_first)


def _run_scatter(full: Tensor, part: Tensor, indices: Tensor, batch_first: bool) -> Tensor:
    _check_scatter(full, part, indices, batch_first)
    out = full.clone()
    _run_scatter_(out, part, indices, batch_first)
    return out


def _fake_scatter(full: Tensor, part: Tensor, indices: Tensor, batch_first: bool) -> Tensor:
    _check_scatter(full, part, indices, batch_first)
    return torch.empty_like(full)


# ---- autograd --------------------------------------------------------------------------------------------------------


def _setup_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, indices, ctx.batch_first = inputs
    ctx.shape = x.shape
    ctx.save_for_backward(indices)


def _backward_gather(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (indices,) = ctx.saved_tensors
    full = grad.new_zeros(ctx.shape)
    return torch.ops.dsx_ops.token_scatter(full, grad.contiguous(), indices, ctx.batch_first), None, None


def _setup_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, part, indices, ctx.batch_first = inputs
    ctx.shape = part.shape
    ctx.save_for_backward(indices)


def _backward_scatter(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (indices,) = ctx.saved_tensors
    whole = grad.contiguous()
    part = torch.ops.dsx_ops.token_gather(whole, indices, ctx.batch_first)
    rest = torch.ops.dsx_ops.token_scatter(whole, grad.new_zeros(ctx.shape), indices, ctx.batch_first)
    return rest, part, None, None


library.operator(
    "token_gather(Tensor x, Tensor indices, bool batch_first) -> Tensor",
    _run_gather,
    _fake_gather,
    setup=_setup_gather,
    backward=_backward_gather,
)
library.operator(
    "token_scatter(Tensor full, Tensor part, Tensor indices, bool batch_first) -> Tensor",
    _run_scatter,
    _fake_scatter,
    setup=_setup_scatter,
    backward=_backward_scatter,
)
library.operator(
    "token_scatter_(Tensor(a!) full, Tensor part, Tensor indices, bool batch_first) -> ()",
    _run_scatter_,
    _check_scatter,
)
