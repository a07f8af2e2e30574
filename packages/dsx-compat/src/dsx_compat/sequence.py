"""`TiledMLP` as programs for DeepSpeed call it: `TiledMLP.apply(mlp_forward, self, x, shards, compute_params)`.

The other names of `deepspeed.runtime.sequence_parallel.ulysses_sp` that dsx has are those of `dsx_activations`.
There `TiledMLP` is a module. This class only has DeepSpeed's signature, so it belongs here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from dsx_activations import run_in_tiles

__all__ = ["TiledMLP"]


class TiledMLP:
    """Runs an MLP on one piece of the sequence after the other, and recomputes each piece in the backward."""

    @staticmethod
    def apply(
        fn: Callable[[Any, torch.Tensor], torch.Tensor],
        self: Any,
        x: torch.Tensor,
        shards: int,
        compute_params: Sequence[torch.nn.Parameter] | None = None,
    ) -> torch.Tensor:
        """Compute `fn(self, piece)` for each piece of `x` and concatenate the results.

        Args:
            fn: a function that treats each token separately.
            self: first argument of `fn`, the module that holds the weights.
            x: [..., tokens, features]; dimension -2 is cut.
            shards: number of pieces; there are never more pieces than tokens.
            compute_params: has no effect. The gradients of all pieces are summed before they are reduced, for every
                parameter that `fn` uses.

        Returns:
            [..., tokens, features of the result].

        Raises:
            dsx_activations.ActivationArgumentError: `shards` is not a positive whole number, or the result of a
                piece has another length.
        """
        return run_in_tiles(partial(fn, self), x, tiles=shards)
