"""Long sequences in tiles: a part of the model that treats each token alone runs on one piece of the sequence after the
other, and again in the backward, so that its activations exist for one piece at a time.

    y = run_in_tiles(mlp, x, tiles=8)                                  # the activations of an eighth
    loss = linear_cross_entropy(hidden, head.weight, targets, chunk=1024)   # the logits of 1024 tokens

The largest tensor of a language model is often its logits: tokens x vocabulary in fp32. `linear_cross_entropy` never
holds all of them; `chunked_cross_entropy` takes existing logits and avoids the copies that the loss makes of them.

Left out are kernels that fuse the head with the loss, and vocabularies that are cut over ranks (see dsx-pipe).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from .call import checkpoint
from .errors import ActivationArgumentError

__all__ = ["TiledMLP", "chunked_cross_entropy", "linear_cross_entropy", "run_in_tiles"]


def run_in_tiles(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, *, tiles: int, dim: int = -2
) -> torch.Tensor:
    """`function(x)`, piece by piece along `dim`, with each piece recomputed in the backward.

    Args:
        function: treats the pieces independently (an MLP, a norm, a head).
        x: (..., tokens, features) for the default `dim`.
        tiles: number of pieces; fewer where `x` is shorter.
        dim: along which `x` and the result are cut.

    Raises:
        ActivationArgumentError: `tiles` is not a positive number, or a piece's result has another length along `dim`.
    """
    if isinstance(tiles, bool) or not isinstance(tiles, int) or tiles < 1:
        raise ActivationArgumentError(f"run_in_tiles(tiles=...): got {tiles!r}, expected a whole number of at least 1")
    found = []
    for piece in x.chunk(tiles, dim):
        out = checkpoint(function, piece) if torch.is_grad_enabled() else function(piece)
        if out.dim() != x.dim() or out.shape[dim] != piece.shape[dim]:
            raise ActivationArgumentError(
                f"run_in_tiles: got a result of shape {tuple(out.shape)} for a piece of shape {tuple(piece.shape)},"
                f" expected as many elements along dimension {dim}"
            )
        found.append(out)
    return torch.cat(found, dim)


class TiledMLP(nn.Module):
    """A module that treats each token alone, run in tiles of the sequence.

    Args:
        module: the module; its parameters have the names `module.*`.
        tiles: number of pieces.
    """

    def __init__(self, module: nn.Module, tiles: int) -> None:
        super().__init__()
        self.module, self.tiles = module, tiles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The module's output for `x`, of shape (..., tokens, features)."""
        return run_in_tiles(self.module, x, tiles=self.tiles)

    def extra_repr(self) -> str:
        return f"tiles={self.tiles}"


def chunked_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    chunk: int = 1024,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` of logits in any dtype, computed in fp32 for `chunk` tokens at a time.

    Args:
        logits: (..., classes).
        targets: (...), class numbers.
        chunk: tokens at a time.
        ignore_index: targets of this value do not count.
        reduction: "mean" over the tokens that count, or "sum".

    Raises:
        ActivationArgumentError: shapes do not fit, or another reduction.
    """
    return _in_chunks(lambda piece: piece, logits, targets, chunk, ignore_index, reduction)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunk: int = 1024,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """`cross_entropy(linear(hidden, weight, bias), targets)` without the logits of more than `chunk` tokens.

    Args:
        hidden: (..., features).
        weight: (classes, features). At ZeRO stage 3 call it inside the forward of the module that holds the weight.
        targets: (...), class numbers.
        bias: (classes,).
        chunk: tokens at a time.
        ignore_index: targets of this value do not count.
        reduction: "mean" over the tokens that count, or "sum".

    Raises:
        ActivationArgumentError: shapes do not fit, or another reduction.
    """
    return _in_chunks(
        lambda piece, *head: F.linear(piece, *head), hidden, targets, chunk, ignore_index, reduction,
        *((weight,) if bias is None else (weight, bias)),
    )  # fmt: skip


def _in_chunks(
    logits_of: Callable[..., torch.Tensor],
    x: torch.Tensor,
    targets: torch.Tensor,
    chunk: int,
    ignore_index: int,
    reduction: str,
    *head: torch.Tensor,
) -> torch.Tensor:
    if x.shape[:-1] != targets.shape:
        raise ActivationArgumentError(
            f"cross entropy: got {tuple(x.shape)} and targets of shape {tuple(targets.shape)}, expected"
            f" {tuple(x.shape[:-1])}: one target for each row"
        )
    if reduction not in ("mean", "sum"):
        raise ActivationArgumentError(f"cross entropy: got reduction {reduction!r}, expected mean or sum")
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ActivationArgumentError(f"cross entropy: got chunk {chunk!r}, expected a whole number of at least 1")

    def part(rows: torch.Tensor, wanted: torch.Tensor, *head: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits_of(rows, *head).float(), wanted, ignore_index=ignore_index, reduction="sum")

    rows, wanted = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    total = rows.new_zeros((), dtype=torch.float32)
    for piece, some in zip(rows.split(chunk), wanted.split(chunk)):
        total = total + (checkpoint(part, piece, some, *head) if torch.is_grad_enabled() else part(piece, some, *head))
    return total / (wanted != ignore_index).sum() if reduction == "mean" else total
