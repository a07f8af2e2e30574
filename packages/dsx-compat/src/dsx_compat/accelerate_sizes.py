"""Accelerate's `ParallelismConfig`: the sizes that its call of `deepspeed.initialize` does not pass on.

Accelerate makes a mesh of `dp_replicate`, `dp_shard`, `cp`, `sp` and `tp`, and tells DeepSpeed of `sp` alone (as an
mpu). With the others DeepSpeed divides the model over all ranks, as if they had not been given. Here `dp_replicate` x
`dp_shard` is hybrid sharding, and `cp` and `tp` are refused with what to use.

`dp_replicate` alone divides over all ranks: Accelerate itself writes the number of processes there if nobody gives a
size.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from dsx.engine import EngineArgumentError

__all__ = ["with_accelerate_sizes"]

_INSTEAD = {
    "tp": "a model of DTensors is trained by dsx.initialize(model=..., optimizer=..., config=..., "
    'mesh_param=accelerator.torch_device_mesh["dp_shard"]), without accelerator.prepare for it',
    "cp": "ParallelismConfig(sp_size=...) cuts sequences over ranks, and all of them compute the attention",
}


def with_accelerate_sizes(source: Any) -> Any:
    """The configuration with the sizes that this process' Accelerator has; as it is where there is none.

    Raises:
        EngineArgumentError: a size that dsx does not serve this way; names what to use.
    """
    sizes = _sizes()
    if sizes is None or not isinstance(source, Mapping):
        return source
    for name, instead in _INSTEAD.items():
        size = getattr(sizes, f"{name}_size", 1)
        if size > 1:
            raise EngineArgumentError(
                f"ParallelismConfig({name}_size={size}): with Accelerate's DeepSpeed plugin it has to be 1; {instead}"
            )
    copies, shards = sizes.dp_replicate_size, sizes.dp_shard_size
    zero = dict(source.get("zero_optimization") or {})
    if copies == 1 or shards == 1 or not zero.get("stage"):
        return source
    if zero.get("mics_shard_size", shards) not in (-1, shards):
        raise EngineArgumentError(
            f"zero_optimization.mics_shard_size: got {zero['mics_shard_size']} and"
            f" ParallelismConfig(dp_shard_size={shards}), expected one of them"
        )
    return {**source, "zero_optimization": {**zero, "mics_shard_size": shards}}


def _sizes() -> Any:
    """The `ParallelismConfig` of this process' Accelerator, if it uses DeepSpeed; None otherwise."""
    module = sys.modules.get("accelerate.state")  # a program that has an Accelerator has imported it
    if module is None or not module.is_initialized():
        return None
    state = module.AcceleratorState()
    return getattr(state, "parallelism_config", None) if state.distributed_type.value == "DEEPSPEED" else None
