"""Keys of `zero_optimization` beside their values: second and old names, keys that dsx does not have, and keys without
effect.
"""

from __future__ import annotations

__all__ = ["NOT_YET", "NO_EFFECT", "OLD_NAMES", "READ_AS", "SECOND_NAMES"]

SECOND_NAMES: dict[str, str] = {
    "cpu_offload_param": "cpu_offload_params",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    **{
        name: f"stage3_{name}"
        for name in (
            "max_live_parameters",
            "max_reuse_distance",
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
        )
    },
}
"""Second name of a setting -> the name that the documentation uses."""

_SUPERCHIPS = "dsx has no plan for it, because the host step is not bound to its own cores (decision 0016)"

NOT_YET: dict[str, str] = {
    "legacy_stage1": "the first implementation of stage 1 is gone; stage 1 itself works",
    "offload_optimizer.cpuadam_cores_perc": _SUPERCHIPS,
    "offload_optimizer.super_offload": _SUPERCHIPS,
    "zenflow": "dsx has no plan for it, because it changes what is trained (decision 0016)",
}
"""Setting -> why dsx does not have it. This table and `NO_EFFECT` alone judge these settings; `dsx` uses them, too."""

NO_EFFECT: dict[str, str] = {
    "allgather_partitions": "updated parameters are always gathered with one collective",
    "compute_grad_norm": "the norm is computed where clipping, the overflow check or a report needs it",
    "contiguous_gradients": "gradients are always in one buffer per unit",
    "elastic_checkpoint": "every checkpoint loads at every world size and stage",
    "enable_sanity_checks": "writes to partitioned parameters always work or raise",
    "grad_hooks": "gradients are always reduced from backward hooks",
    "log_trace_cache_warnings": "deviations from the agreed order of modules are always reported",
    "memory_efficient_linear": "gathered weights are never kept by autograd",
    "override_module_apply": "nothing is patched",
    "parameter_alignment": "each parameter begins at a multiple of 64 bytes of its flat buffer",
    "pipeline_loading_checkpoint": "each rank reads only its own slices",
    "reduce_scatter": "stages 1-3 always reduce-scatter; the values are the same",
    "round_robin_gradients": "shards are equal parts of flat buffers, so the order does not matter",
    "stage3_allgather_sequential": "gathers are issued in one agreed order",
    "stage3_use_all_reduce_for_fetch_params": "parameters are always all-gathered",
    "use_multi_rank_bucket_allreduce": "gradients are reduce-scattered",
}
"""Setting -> why it has no effect: the behaviour that it chooses is the only one."""

OLD_NAMES: dict[str, str] = {
    "cpu_offload": "it is an old name, read as offload_optimizer with device cpu; write that",
    "cpu_offload_params": "it is an old name, read as offload_param with device cpu; write that",
    "cpu_offload_use_pin_memory": "it is an old name, read as pin_memory of offload_optimizer and offload_param",
}
"""Setting -> what it is an old name of."""

READ_AS = {"cpu_offload": "offload_optimizer", "cpu_offload_params": "offload_param"}
