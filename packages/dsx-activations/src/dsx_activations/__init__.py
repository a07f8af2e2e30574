"""Activations that fit into memory: a part of the model keeps only its inputs and is computed again in the backward
pass, kept inputs wait in host memory, and large layers run on one piece of the sequence after the other.

    dsx_activations.configure(mpu, partition_activations=True, checkpoint_in_cpu=True)
    hidden = dsx_activations.checkpoint(block, hidden, attention_mask=mask)

PyTorch does the recomputation (`torch.utils.checkpoint`). This package adds places for the kept inputs (divided among
the model-parallel ranks, in host memory, in buffers that are made once), the state of every tracked random generator,
and the choice of what to recompute from a budget in bytes. It needs neither sharding nor an engine.

Map: `call` has the checkpoint function, `kept` packs and restores inputs, `places` has the memory they are kept in,
`divided` the slices of model-parallel ranks, `rng` the tracked generators, `settings` the configuration as data,
`config` the same as a section of a configuration file, `configured` the settings of this process. Budgets: `blocks`
recomputes modules, `operators` keeps the results of matrix products and attention, `measured` counts what modules save
and how long they take, `plan` makes the choice (plain arithmetic), `budget` puts these together. `tiles` and
`sequence_tiles` run modules that treat each token alone on one piece of the sequence after the other. `attention` runs
over a sequence that is cut over ranks.
"""

from ._version import __version__ as __version__
from .attention import (
    SequenceLoader,
    SequenceParallel,
    UlyssesAttention,
    gather_documents,
    ring_attention,
    run_in_host_chunks,
    sequence_attention,
    sequence_parallel,
    sequence_segments,
    shard_sequence,
    token_mean,
)
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
from .errors import ActivationArgumentError, ActivationConfigError, ActivationError, ActivationStateError
from .rng import RngTracker
from .sequence_tiles import SequenceTiledCompute, TiledFusedLogitsLoss, sequence_tiled_compute
from .settings import CheckpointingSettings
from .tiles import TiledMLP, chunked_cross_entropy, linear_cross_entropy, run_in_tiles

__all__ = [
    "ActivationArgumentError",
    "ActivationConfigError",
    "ActivationError",
    "ActivationStateError",
    "CheckpointingSettings",
    "MemoryBudget",
    "RngTracker",
    "SequenceLoader",
    "SequenceParallel",
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "UlyssesAttention",
    "apply_memory_budget",
    "checkpoint",
    "chunked_cross_entropy",
    "configure",
    "gather_documents",
    "get_cuda_rng_tracker",
    "is_configured",
    "linear_cross_entropy",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "ring_attention",
    "run_in_host_chunks",
    "run_in_tiles",
    "sequence_attention",
    "sequence_parallel",
    "sequence_segments",
    "sequence_tiled_compute",
    "set_num_layers",
    "shard_sequence",
    "token_mean",
    "use_count",
]
