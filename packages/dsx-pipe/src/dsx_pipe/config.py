"""The `pipeline` and `tensor_parallel` sections of a configuration (needs pydantic; imported only by code that loads
one).

Every key takes effect. `stages`, `partition`, `schedule`, `chunks`, `seed_layers`, `activation_checkpoint_interval` and
`use_reentrant` are arguments of `PipelineModule` that the script did not give (`module_options`). `pipe_partitioned`
and `grad_partitioned` are arguments of the runtime. The keys of `tensor_parallel` are arguments of
`tensor.slice_model`.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import torch.utils.checkpoint
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from .tensor.rules import rules_of


def _without_fraction(value: Any) -> Any:
    """Turn 4e0 into 4. The strict check of pydantic accepts or refuses everything else."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Size = Annotated[int, BeforeValidator(_without_fraction), Field(ge=0)]
Count = Annotated[int, BeforeValidator(_without_fraction), Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())


class Pipeline(_Section):
    """Pipeline parallelism."""

    stages: Count | Literal["auto"] = Field(
        "auto", description="number of pipeline stages; auto: the number that the script passes"
    )
    partition: str = Field("best", description="how layers are divided: best, uniform, parameters, type:<regex>, time")
    schedule: str | None = Field(
        None, description="schedule of the stages, as interleaved, zb-h1, zbv; null: 1f1b, or the script's own"
    )
    chunks: Count | None = Field(None, description="stages of each rank, for interleaved (virtual stages)")
    seed_layers: bool = Field(False, description="use a different random seed to build each layer")
    activation_checkpoint_interval: Size = Field(0, description="layers per recomputed block; 0: no recomputation")
    pipe_partitioned: bool = Field(
        True, description="each model-parallel rank sends a slice of an activation to the next stage"
    )
    grad_partitioned: bool = Field(
        True, description="each model-parallel rank sends a slice of a gradient to the stage before"
    )
    use_reentrant: bool = Field(True, description="use_reentrant of torch.utils.checkpoint")

    def module_options(self) -> dict[str, Any]:
        """Arguments of `PipelineModule` that the configuration sets; the script decides about "auto" and unset keys."""
        given = self.model_fields_set
        found: dict[str, Any] = {}
        if self.stages != "auto":
            found["num_stages"] = self.stages
        if "partition" in given:
            found["partition_method"] = self.partition
        for key in ("seed_layers", "activation_checkpoint_interval"):
            if key in given:
                found[key] = getattr(self, key)
        for key in ("schedule", "chunks"):
            if getattr(self, key) is not None:
                found[key] = getattr(self, key)
        if "use_reentrant" in given:
            checkpoint = torch.utils.checkpoint.checkpoint
            found["activation_checkpoint_func"] = partial(checkpoint, use_reentrant=self.use_reentrant)
        return found


class TensorParallel(_Section):
    """Automatic tensor parallelism."""

    autotp_size: Size = Field(0, description="number of tensor-parallel ranks; 0: no tensor parallelism")
    tp_overlap_comm: bool = Field(False, description="all-reduce input gradients while weight gradients are computed")
    sequence_parallel: bool = Field(
        False, description="divide the sequence among the ranks between the sliced layers of a block (dsx only)"
    )
    preset_model: str | None = Field(
        None, description="name of a model family whose layers are known; null: found from the model"
    )
    partition_config: dict[str, Any] | None = Field(None, description="rules that say which layers are sliced, and how")

    @field_validator("partition_config")
    @classmethod
    def _check_partition_config(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        """Let `tensor.rules` check the keys now, before any model is built."""
        if value is not None:
            rules_of(value)
        return value

    def slice_options(self) -> dict[str, Any]:
        """Arguments of `dsx_pipe.tensor.slice_model`."""
        return {
            "preset": self.preset_model,
            "config": self.partition_config,
            "overlap": self.tp_overlap_comm,
            "sequence_parallel": self.sequence_parallel,
        }
