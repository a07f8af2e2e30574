"""The sections `activation_checkpointing` and `sequence_parallel` of a configuration. They need pydantic,
so the package does not import this module.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from .budget import check_budget
from .settings import CheckpointingSettings

__all__ = ["ActivationCheckpointing", "SequenceParallelSection"]


def _whole(value: Any) -> Any:
    """Turn 1e1 into 10; the strict check judges all other values."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]


class ActivationCheckpointing(BaseModel):
    """Recomputation of activations: where the inputs of `dsx.checkpointing.checkpoint` are kept."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())

    partition_activations: bool = Field(False, description="divide the kept inputs among the model-parallel ranks")
    cpu_checkpointing: bool = Field(False, description="keep inputs in host memory")
    contiguous_memory_optimization: bool = Field(
        False, description="partition_activations: copy the slices into buffers that are allocated once"
    )
    number_checkpoints: Count | None = Field(None, description="number of checkpoints that these buffers have room for")
    synchronize_checkpoint_boundary: bool = Field(
        False, description="wait for the device before and after every checkpoint"
    )
    profile: bool = Field(False, description="log the time of every checkpoint")
    memory_budget: int | float | None = Field(
        None,
        description=(
            "bytes of activations, or a fraction (at most 1) of what is kept without recomputation: blocks are"
            " recomputed so that it holds"
        ),
    )

    @model_validator(mode="after")
    def _agrees(self) -> ActivationCheckpointing:
        CheckpointingSettings.read(self)
        if self.memory_budget is not None:
            check_budget(self.memory_budget)
        return self


class SequenceParallelSection(BaseModel):
    """Options for attention over the ranks of `sequence_parallel_size`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())

    convert: bool = Field(
        True, description="let the model's attention run over sequence shards; false: the model does it by itself"
    )
    order: Literal["plain", "zigzag"] = Field(
        "plain", description="how the tokens are cut; zigzag balances a causal mask in a ring"
    )
    length: Count | None = Field(None, description="tokens of every sequence; null: the ranks ask each other")
    team: Count | None = Field(
        None,
        description="ranks that exchange tokens for heads; null: as many as there are key heads to deal out evenly",
    )
    overlap: Count = Field(1, description="messages in which heads travel, each while others are computed")
    kernel: Literal["auto", "sdpa", "flex", "pieces"] = Field("auto", description="kernel of the attention")
    host_chunks: Count | None = Field(
        None,
        description="chunks of queries, keys and values that wait for the backward in host memory; null: on the device",
    )

    def options(self) -> dict[str, Any]:
        """The arguments of `sequence_parallel`."""
        return {key: getattr(self, key) for key in ("order", "length", "team", "overlap", "kernel", "host_chunks")}
