"""Sequence parallelism as programs for DeepSpeed call it, over `dsx_activations`.

`UlyssesSPAttentionHF.register_with_transformers` makes the groups and notes what is asked for; `deepspeed.initialize`
converts the model that it is given with these groups (`convert`). `DistributedAttention`, `TiledMLP` and the adapter of
loaders only have DeepSpeed's signatures, so they belong here. The other names are those of `dsx_activations`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import dsx_comm
import torch
from dsx.engine import EngineArgumentError
from dsx_activations import SequenceLoader, SequenceParallel, UlyssesAttention, run_in_tiles, sequence_parallel
from dsx_comm import GroupRegistry, Mpu, ProcessTopology, parallel_groups
from torch import nn

__all__ = [
    "DistributedAttention",
    "TiledMLP",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "convert",
    "initialize_sequence_parallel",
]

_KERNELS = {"flex_attention": "flex"}
"""Kernels of dsx for transformers' names; others are computed by torch's own choice of kernels."""


class UlyssesMpu(Mpu):
    """The groups, and how attention is to be computed."""

    kernel = "auto"
    disable_in_eval = False
    length: int | None = None


def initialize_sequence_parallel(sequence_parallel_size: int) -> UlyssesMpu:
    """Make groups of neighbouring ranks that share sequences, which are in use from now on. Collective.

    Raises:
        EngineArgumentError: the size does not divide the number of ranks.
    """
    world = dsx_comm.get_world_size() if dsx_comm.is_initialized() else 1
    size = sequence_parallel_size
    if not isinstance(size, int) or size < 1 or world % size:
        raise EngineArgumentError(
            f"sequence_parallel_size: got {size!r} on {world} ranks, expected a divisor of {world}; call"
            " deepspeed.init_distributed before"
        )
    mpu = UlyssesMpu(GroupRegistry(ProcessTopology(("data", "sequence"), (world // size, size))))
    parallel_groups.use(mpu)
    return mpu


class UlyssesSPAttentionHF:
    """Runs the attention of Hugging Face models over sequences that are cut over ranks."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> Any:
        """Make the groups; `deepspeed.initialize(mpu=...)` with what is returned converts the model. Collective.

        Args:
            model_name_or_path: not used: the model that is given to `initialize` is converted.
            core_attn_implementation: "flex_attention" computes with FlexAttention, others with the kernel that torch
                chooses.
            sequence_parallel_size: ranks that share a sequence; numbers of heads need not divide.
            micro_batch_size: not used: any batch can be cut.
            seq_length: tokens of each sequence, if it never changes.
            seq_length_is_variable: `seq_length` is not used.
            disable_in_eval: in evaluation the model attends to the tokens that it is given, on each rank alone.
            max_length: older name of `seq_length`.

        Returns:
            An mpu with `get_sequence_parallel_group`, `_rank` and `_world_size`; None for a size of 1.
        """
        if sequence_parallel_size == 1:
            return None
        mpu = initialize_sequence_parallel(sequence_parallel_size)
        mpu.kernel = _KERNELS.get(core_attn_implementation, "auto")
        mpu.disable_in_eval = bool(disable_in_eval)
        mpu.length = None if seq_length_is_variable else (seq_length or max_length)
        return mpu


_converted: WeakKeyDictionary[nn.Module, SequenceParallel] = WeakKeyDictionary()


def convert(model: nn.Module, mpu: Any) -> None:
    """Convert the model of an engine whose `mpu` is that of `register_with_transformers`. An earlier conversion of the
    model ends.
    """
    if not isinstance(mpu, UlyssesMpu) or mpu.get_sequence_parallel_world_size() == 1:
        return
    if model in _converted:
        _converted.pop(model).remove()
    parallel = sequence_parallel(model, mpu.get_sequence_parallel_group(), length=mpu.length, kernel=mpu.kernel)
    if mpu.disable_in_eval:
        handle = model.register_forward_pre_hook(lambda module, _: parallel.pause(not module.training), prepend=True)
        parallel.call_at_the_end(handle.remove)
    _converted[model] = parallel


class UlyssesSPDataLoaderAdapter(SequenceLoader):
    """Gathers the batches of the ranks that share sequences, and gives each rank its part of one after the other.

    Args:
        dl: the loader of this rank: dictionaries with `input_ids`, `labels` and `position_ids`.
        sp_rank, sp_world_size: this rank's place in the group; they are the group's own.
        sp_group: the group.
        device: where the parts are put.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        super().__init__(dl, sp_group, own_batches=True, device=device)
        if (sp_rank, sp_world_size) != (self.rank, self.size):
            raise EngineArgumentError(
                f"UlyssesSPDataLoaderAdapter: got rank {sp_rank} of {sp_world_size}, expected {self.rank} of"
                f" {self.size}, this process' place in sp_group"
            )
        self.dl = dl
        self._batches: Any = None

    def __next__(self) -> dict[str, Any]:
        """The next part; the adapter is its own iterator where `next` is called on it."""
        if self._batches is None:
            self._batches = iter(self)
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = None
            raise


class DistributedAttention(nn.Module):
    """Attention over sequence shards around a local attention, in Megatron's or Hugging Face's layout.

    Args:
        local_attention: called as `local_attention(query, key, value, *args, **kwargs)` with whole sequences of this
            rank's heads, in the layout of the call.
        sequence_process_group: ranks that share the sequence.
        scatter_idx: dimension of heads; it is 2.
        gather_idx: dimension of tokens: 0, or 1 where the batch is first.
        sp_stream: not used: messages run on streams of their own.
    """

    def __init__(
        self,
        local_attention: Callable[..., torch.Tensor],
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
    ) -> None:
        super().__init__()
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise EngineArgumentError(
                f"DistributedAttention: got scatter_idx={scatter_idx} and gather_idx={gather_idx}, expected heads in"
                " dimension 2 and tokens in dimension 0 or 1"
            )
        self.local_attn, self.spg, self.gather_idx = local_attention, sequence_process_group, gather_idx

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The attention of this rank's tokens.

        Args:
            query, key, value: (tokens, batch, heads, features), or with `batch_dim_idx` 0 (batch, tokens, ...).
            batch_dim_idx: dimension of the batch.
            args, kwargs: for the local attention.

        Returns:
            As the local attention: heads and features apart or joined, in the layout of `query`.
        """
        if batch_dim_idx not in (0, 1) or query.dim() != 4:
            raise EngineArgumentError(
                f"DistributedAttention: got batch_dim_idx={batch_dim_idx} and queries of shape {tuple(query.shape)},"
                " expected 0 or 1, and four dimensions"
            )
        # (batch, heads, tokens, features) and back
        order = (0, 2, 1, 3) if batch_dim_idx == 0 else (1, 2, 0, 3)
        back = (0, 2, 1, 3) if batch_dim_idx == 0 else (2, 0, 1, 3)
        joined = False

        def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            nonlocal joined
            out = self.local_attn(*(t.permute(back) for t in (q, k, v)), *args, **kwargs)
            joined = out.dim() == 3
            return (out.unflatten(2, (q.shape[1], -1)) if joined else out).permute(order)

        found = UlyssesAttention(local, self.spg)(*(t.permute(order) for t in (query, key, value))).permute(back)
        return found.flatten(2) if joined else found


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
