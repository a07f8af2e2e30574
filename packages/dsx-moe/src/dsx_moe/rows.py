"""Copies rows of tokens to rows of routes, and sums them back: two linear maps, each the adjoint of the other.

`gather_rows` copies a token's row for each of its routes; `sum_rows` adds the rows of a token's routes. The backward
of one is the other, so gradients of any order exist. Both are gathers: a scatter-add is not used, because its order of
additions would differ from run to run on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from .routing import Routing


def gather_rows(tokens: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[T, ...] -> [R, ...]: row r of the result is the row of the token of route r."""
    return _Gather.apply(tokens, routing.token, routing.slot)  # type: ignore[no-any-return]


def sum_rows(routes: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[R, ...] -> [T, ...]: row t of the result is the sum of the rows of token t's routes; zero if it has none."""
    return _Sum.apply(routes, routing.token, routing.slot)  # type: ignore[no-any-return]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, token: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token, slot)
        return tokens.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None, None]:  # type: ignore[override]
        return _Sum.apply(grad, *ctx.saved_tensors), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, routes: torch.Tensor, token: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token, slot)
        count = routes.shape[0]
        if count == 0:
            return routes.new_zeros(slot.shape[0], *routes.shape[1:])
        first, *others = slot.unbind(1)
        out = _rows_or_zero(routes, first, complete=count == slot.numel())
        for column in others:
            out.add_(_rows_or_zero(routes, column, complete=count == slot.numel()))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None, None]:  # type: ignore[override]
        return _Gather.apply(grad, *ctx.saved_tensors), None, None


def _rows_or_zero(routes: torch.Tensor, column: torch.Tensor, *, complete: bool) -> torch.Tensor:
    """The rows at the indices `column`, and zero where the index is R (a dropped route). `complete`: none is R."""
    if complete:
        return routes.index_select(0, column)
    count = routes.shape[0]
    missing = (column == count).view(-1, *[1] * (routes.dim() - 1))
    # dropped rows are filled with zero, not multiplied by it: zero times an infinite row would be NaN
    return routes.index_select(0, column.clamp(max=count - 1)).masked_fill_(missing, 0)
