"""Sections of features that dsx does not have, and the section `compile`, of which dsx has a part.

They are checked so that a configuration with them can be read. A section of a feature that dsx does not have is
accepted if it is switched off, and refused with an explanation if it is switched on (see ``availability.py``).
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from .base import Count, Section, Toggle

__all__ = [
    "CompileSection", "HybridEngine", "Nebula",
]  # fmt: skip


class HybridEngine(Toggle):
    """Training and generation in one engine."""

    max_out_tokens: Count = Field(512, description="most tokens of a generation")
    inference_tp_size: Count = Field(1, description="tensor-parallel size of generation")
    release_inference_cache: bool = Field(False, description="free the cache after generation")
    pin_parameters: bool = Field(True, description="keep gathered parameters pinned")
    tp_gather_partition_size: Count = Field(8, description="parameters per gather")
    enable_cuda_graph: bool = Field(False, description="capture generation in a graph")


class Nebula(Toggle):
    """Checkpoints through a cloud service."""

    persistent_storage_path: str | None = Field(None, description="folder of the checkpoints")
    persistent_time_interval: Count = Field(100, description="seconds between two checkpoints")
    num_of_version_in_retention: Count = Field(2, description="number of checkpoints that are kept")
    enable_nebula_load: bool = Field(True, description="load checkpoints through the service")
    load_path: str | None = Field(None, description="folder to load from")


class CompileSection(Section):
    """`torch.compile` of the model's blocks."""

    enabled: bool = Field(False, description="compile the blocks when the engine is built, as engine.compile() does")
    backend: str | None = Field(None, description="backend of torch.compile; null: inductor")
    kwargs: dict[str, Any] = Field(
        {}, description="further arguments of torch.compile: mode, dynamic, fullgraph, options"
    )
    deepcompile: bool = Field(False, description="DeepSpeed: rewrite the compiled graph")
    free_activation: bool = Field(False, description="free activations early")
    offload_activation: bool = Field(False, description="keep activations in host memory")
    offload_opt_states: bool = Field(False, description="keep optimizer states in host memory")
    offload_parameters: bool = Field(False, description="keep parameters in host memory")
    double_buffer: bool = Field(True, description="two gather buffers")
    symmetric_memory: bool = Field(False, description="gather through symmetric memory")
    passes: list[str] | None = Field(None, description="passes to run")
    debug_log: bool = Field(False, description="log the passes")
    sync_before_reduce: bool = Field(False, description="wait before a reduction")
    sync_after_reduce: bool = Field(False, description="wait after a reduction")
    sync_before_allgather: bool = Field(False, description="wait before a gather")
    sync_after_allgather: bool = Field(False, description="wait after a gather")
    keep_int_input_tensors: bool = Field(True, description="keep integer inputs")
    keep_all_input_tensors: bool = Field(False, description="keep all inputs")
