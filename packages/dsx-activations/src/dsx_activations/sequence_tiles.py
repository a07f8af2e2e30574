"""Tiled computation under the names and arguments of DeepSpeed's sequence parallelism: `SequenceTiledCompute`,
`sequence_tiled_compute` and `TiledFusedLogitsLoss`.

    loss = TiledFusedLogitsLoss.apply(loss_fn, self, hidden, labels, None, 8, [self.lm_head.weight], "mean")

A function is run on one piece of the sequence after the other, and again in the backward (`checkpoint`). So its large
results (logits) exist for one piece at a time. New code should use `run_in_tiles` and `linear_cross_entropy`.

Two arguments have no effect here. Gradients reach every tensor that requires them, not only
`grad_requiring_tensor_key`. Parameters need not be listed in `compute_params`, because autograd adds up the gradients
of the pieces before they are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .call import run_checkpoint
from .errors import ActivationArgumentError

__all__ = ["SequenceTiledCompute", "TiledFusedLogitsLoss", "sequence_tiled_compute"]


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, torch.Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[torch.nn.Parameter] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """Run `fn` on `shards` pieces of a sequence and put the results together.

    Args:
        fn: called with keyword arguments.
        seqlen: length of dimension 1 of the tensors that are cut.
        shards: number of pieces, of ceil(seqlen / shards) tokens each; fewer if the sequence ends before.
        kwargs_to_shard: tensors (batch, seqlen, ...), which are cut along dimension 1.
        kwargs_to_pass: given to every call as they are.
        grad_requiring_tensor_key: the name of a tensor that is cut; see the module's text.
        compute_params: see the module's text.
        output_unshard_dimension: dimension along which results are concatenated; 0: each result is a single value (a
            loss).
        output_reduction: "mean" or "sum" of the concatenated results; None: no reduction. The mean of the pieces'
            losses is the mean over all tokens only if all pieces have equally many tokens that count.

    Raises:
        ActivationArgumentError: an argument does not fit.
    """
    name = "sequence_tiled_compute"
    _check(name, shards, output_reduction)
    if grad_requiring_tensor_key not in kwargs_to_shard:
        raise ActivationArgumentError(
            f"{name}(grad_requiring_tensor_key=...): got {grad_requiring_tensor_key!r}, expected one of"
            f" {', '.join(kwargs_to_shard)}"
        )
    for key, tensor in kwargs_to_shard.items():
        if tensor.dim() < 2 or tensor.shape[1] != seqlen:
            raise ActivationArgumentError(
                f"{name}: {key} has the shape {tuple(tensor.shape)}, expected (batch, {seqlen}, ...), of which"
                " dimension 1 is cut"
            )
    step = -(-seqlen // shards)
    found = []
    for start in range(0, seqlen, step):
        pieces = {key: tensor[:, start : start + step] for key, tensor in kwargs_to_shard.items()}
        found.append(_run(fn, (), {**pieces, **kwargs_to_pass}))
    if output_unshard_dimension == 0:
        found = [part.unsqueeze(0) for part in found]
    return _reduced(torch.cat(found, dim=output_unshard_dimension), output_reduction)


class SequenceTiledCompute:
    """`sequence_tiled_compute` with flat arguments."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Sequence[torch.nn.Parameter] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> torch.Tensor:
        """See `sequence_tiled_compute`. `args`: the values of `keys_to_shard`, then those of `keys_to_pass`.

        Raises:
            ActivationArgumentError: an argument does not fit.
        """
        keys = (*keys_to_shard, *keys_to_pass)
        if len(args) != len(keys):
            raise ActivationArgumentError(
                f"SequenceTiledCompute: got {len(args)} values, expected {len(keys)}: {', '.join(keys)}"
            )
        cut = len(keys_to_shard)
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            dict(zip(keys_to_shard, args[:cut])),
            dict(zip(keys_to_pass, args[cut:])),
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


class TiledFusedLogitsLoss:
    """A loss whose logits exist for one piece of the tokens at a time."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        self: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Sequence[torch.nn.Parameter] | None,
        output_reduction: str,
    ) -> torch.Tensor:
        """The mean or sum of `fn(self, x_piece, y_piece[, mask_piece])` over `shards` pieces of the tokens.

        Args:
            fn: gives a single value.
            self: its first argument, as a rule the module that holds the head.
            x: (batch, tokens, ...), such as hidden states; pieces are (rows, ...) of batch x tokens rows.
            y: (batch, tokens, ...), such as labels; cut like `x`.
            mask: (batch, tokens), cut like `x` and given to `fn`; None: `fn` gets none.
            shards: number of pieces; fewer where there are fewer tokens.
            compute_params: see the module's text.
            output_reduction: "mean" or "sum" of the pieces' values.

        Raises:
            ActivationArgumentError: an argument does not fit.
        """
        name = "TiledFusedLogitsLoss"
        if output_reduction is None:
            raise ActivationArgumentError(f"{name}: got output_reduction None, expected mean or sum")
        _check(name, shards, output_reduction)
        given = [("x", x), ("y", y), *((("mask", mask),) if mask is not None else ())]
        for key, tensor in given:
            if tensor.dim() < 2 or tensor.shape[:2] != x.shape[:2] or (key == "mask" and tensor.dim() != 2):
                shape = "(batch, tokens)" if key == "mask" else "(batch, tokens, ...)"
                raise ActivationArgumentError(
                    f"{name}: {key} has the shape {tuple(tensor.shape)}, expected {shape} as x, {tuple(x.shape)}"
                )
        pieces = [tensor.reshape(-1, *tensor.shape[2:]).chunk(shards) for _, tensor in given]
        found = [_run(fn, (self, *piece), {}) for piece in zip(*pieces)]
        return _reduced(torch.stack(found), output_reduction)


def _run(fn: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return run_checkpoint(fn, args, kwargs) if torch.is_grad_enabled() else fn(*args, **kwargs)


def _check(name: str, shards: Any, reduction: Any) -> None:
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise ActivationArgumentError(f"{name}: got {shards!r} shards, expected a whole number of at least 1")
    if reduction not in ("mean", "sum", None):
        raise ActivationArgumentError(f"{name}: got output_reduction {reduction!r}, expected mean, sum or None")


def _reduced(values: torch.Tensor, reduction: str | None) -> torch.Tensor:
    if reduction is None:
        return values
    return values.mean() if reduction == "mean" else values.sum()
