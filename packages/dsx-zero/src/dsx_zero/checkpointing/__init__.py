"""Activation checkpointing: inputs of a part of the model are kept in place of everything that it computes, and the
part is computed again in the backward pass.

    dsx_zero.checkpointing.configure(mpu, partition_activations=True, checkpoint_in_cpu=True)
    hidden = dsx_zero.checkpointing.checkpoint(block, hidden, attention_mask=mask)

Recomputation is PyTorch's (`torch.utils.checkpoint`); what is added is where the kept inputs lie (divided among the
model-parallel ranks, in host memory, in buffers made once), the state of every tracked random generator, and the choice
of what to recompute from a budget in bytes. It needs neither sharding nor an engine.

Map: `call` the checkpoint function, `kept` what becomes of a kept input, `places` the memory it lies in, `divided` the
slices of model-parallel ranks, `rng` tracked generators, `settings` what can be configured, `configured` the settings
of this process. Budgets: `blocks` recomputes modules, `operators` all of them but matrix products and attention,
`measured` what modules save and how long they take, `plan` the choice (plain arithmetic), `budget` puts these together,
`compiled` tells compiled modules. `tiles` and `sequence_tiles` run what treats tokens alone in pieces.
"""

from .budget import MemoryBudget, apply_memory_budget
from .call import checkpoint, non_reentrant_checkpoint
from .configured import (
    configure,
    get_cuda_rng_tracker,
    is_configured,
    model_parallel_cuda_manual_seed,
    model_parallel_reconfigure_tp_seed,
    partition_activations_in_checkpoint,
    reset,
    set_num_layers,
    use_count,
)
from .rng import RngTracker
from .sequence_tiles import SequenceTiledCompute, TiledFusedLogitsLoss, sequence_tiled_compute
from .settings import CheckpointingSettings
from .tiles import TiledMLP, chunked_cross_entropy, linear_cross_entropy, run_in_tiles

__all__ = [
    "CheckpointingSettings",
    "MemoryBudget",
    "RngTracker",
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "apply_memory_budget",
    "checkpoint",
    "chunked_cross_entropy",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "linear_cross_entropy",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "run_in_tiles",
    "sequence_tiled_compute",
    "set_num_layers",
    "use_count",
]
