"""`TiledMLP` as programs for DeepSpeed call it: `TiledMLP.apply(mlp_forward, self, x, shards, compute_params)`.

The other names of `deepspeed.runtime.sequence_parallel.ulysses_sp` that dsx has are those of `dsx_zero.checkpointing`.
There `TiledMLP` is a module; this class has its place here because it only has another signature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from dsx_zero.checkpointing import run_in_tiles

__all__ = ["TiledMLP"]


class TiledMLP:
    """An MLP that is run on one piece of the sequence after the other, and again in the backward."""

    @staticmethod
    def apply(
        fn: Callable[[Any, torch.Tensor], torch.Tensor],
        self: Any,
        x: torch.Tensor,
        shards: int,
        compute_params: Sequence[torch.nn.Parameter] | None = None,
    ) -> torch.Tensor:
        """`fn(self, piece)` for each piece of `x`, put together again.

        Args:
            fn: treats each token alone.
            self: its first argument, the module that holds the weights.
            x: (..., tokens, features); dimension -2 is cut.
            shards: number of pieces; fewer where there are fewer tokens.
            compute_params: chooses nothing: gradients of the pieces are added up before they are reduced, whichever
                parameters `fn` uses.

        Raises:
            dsx_zero.ZeroModelError: `shards` is no positive whole number, or a piece's result has another length.
        """
        return run_in_tiles(partial(fn, self), x, tiles=shards)
