"""The `expert_parallel` section of a training configuration, and how it is applied to a model.

Only code that reads a configuration imports this module, because it needs pydantic. Keys and defaults are those of
DeepSpeed's AutoEP.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import dsx_comm
from dsx_comm import parallel_groups
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from torch import nn

from .errors import MoEConfigError
from .huggingface import apply_expert_parallel
from .rules import RouterRule

__all__ = ["ExpertParallelConfig", "apply_config"]


def _without_fraction(value: Any) -> Any:
    """Turn 1e2 into 100. The strict check of pydantic accepts or refuses everything else."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Count = Annotated[int, BeforeValidator(_without_fraction), Field(ge=1)]
_Size = Annotated[int, BeforeValidator(_without_fraction), Field(ge=0)]
_Name = Annotated[str, Field(min_length=1)]

_FROM_MODULES = "it is taken from the modules"
_KERNELS = "there is one grouped matrix product, chosen by device and data type"
_BACKEND = "dsx_comm sends the tokens"


class ExpertParallelConfig(BaseModel):
    """Mixture-of-experts models of Hugging Face in expert-parallel form."""

    NO_EFFECT: ClassVar[dict[str, str]] = {
        "has_shared_experts": "shared experts are found by their name",
        "preset_model": "experts are found by their structure, without presets",
        "validate_folding_routing": "routing is the same on all ranks that hold the same tokens by construction",
        "async_split_plan": "the sizes come with the counts of tokens",
        "use_grouped_mm": _KERNELS,
        "disable_triton_grouped_mm": _KERNELS,
        "combine_impl": _KERNELS,
        "row_weighting_impl": _KERNELS,
        "gate_up_impl": _KERNELS,
        "comm_backend": _BACKEND,
        "comm_num_sm": _BACKEND,
        "comm_qp_margin": _BACKEND,
        "comm_max_tokens_per_rank": _BACKEND,
        "num_expert_groups": "the model's own router does it",
        "num_limited_groups": "the model's own router does it",
        "score_apply": "weights are applied to the experts' outputs",
        "expert_w1": _FROM_MODULES,
        "expert_w2": _FROM_MODULES,
        "expert_w3": _FROM_MODULES,
        "expert_activation": _FROM_MODULES,
        "num_experts_attr": _FROM_MODULES,
        "top_k_attr": _FROM_MODULES,
    }
    """Keys that are accepted because published files have them, and why they have no effect."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    enabled: bool = Field(False, description="keep only this rank's experts of the model")
    autoep_size: _Count = Field(1, description="number of ranks that divide the experts of each layer")
    expert_tensor_parallel_size: _Count = Field(
        1, description="number of ranks that slice one expert: 1, or the model-parallel size"
    )
    moe_layer_pattern: _Name | None = Field(
        None, description="regular expression for the names of expert blocks; null: found by their structure"
    )
    expert_pattern: _Name | None = Field(None, description="name of a block's list of experts; null: experts")
    router_pattern: _Name | None = Field(None, description="name of a block's router; null: found by name")
    shared_experts_pattern: _Name | None = Field(
        None, description="name of a block's shared experts; null: found by name"
    )
    shared_experts_gate_pattern: _Name | None = Field(
        None, description="name of the gate of the shared experts; null: found by name"
    )
    top_k: _Count | Literal["auto"] = Field(
        "auto", description="experts per token, for blocks with a list of experts; auto: the block's own setting"
    )
    score_func: Literal["auto", "softmax", "sigmoid"] = Field(
        "auto", description="function from router logits to scores, for blocks with a list of experts; auto: softmax"
    )
    route_norm: bool | None = Field(
        None, description="divide the chosen experts' weights by their sum; null: the block's own setting"
    )
    route_scale: float = Field(1.0, description="factor on the experts' weights")
    routed_scaling_factor: float | Literal["auto"] = Field("auto", description="another name of route_scale")
    load_balance_coeff: float | None = Field(
        None, description="DeepSpeed: rate of a bias that balances the experts; dsx accepts only null"
    )
    overlap_chunks: _Count = Field(
        1, description="number of parts of the tokens; one part is sent while the experts compute another (dsx only)"
    )
    devices_per_node: _Count | None = Field(
        None,
        description="devices of a node; the all-to-all then has two hops, inside nodes and between them (dsx only)",
    )
    # - accepted without effect
    has_shared_experts: bool | None = Field(None, description="whether a block has shared experts; null: found by name")
    preset_model: str | None = Field(None, description="name of a family of models")
    validate_folding_routing: bool = Field(
        False, description="DeepSpeed: check that ranks with the same tokens route them alike"
    )
    async_split_plan: bool = Field(False, description="DeepSpeed: compute the sizes of the all-to-all asynchronously")
    use_grouped_mm: bool = Field(True, description="DeepSpeed: compute all experts with one kernel")
    disable_triton_grouped_mm: bool = Field(False, description="DeepSpeed: do not use the Triton kernel")
    combine_impl: str = Field("auto", description="DeepSpeed: implementation that combines the experts' outputs")
    row_weighting_impl: str = Field("auto", description="DeepSpeed: implementation that weights the experts' outputs")
    gate_up_impl: str = Field(
        "separate", description="DeepSpeed: compute gate and up projections together or separately"
    )
    comm_backend: str = Field("comm", description="DeepSpeed: library of the all-to-all")
    comm_num_sm: _Size = Field(12, description="DeepSpeed: multiprocessors that the all-to-all uses")
    comm_qp_margin: _Size = Field(4, description="DeepSpeed: spare queue pairs of the all-to-all")
    comm_max_tokens_per_rank: _Size = Field(0, description="DeepSpeed: tokens per rank in the buffer of the all-to-all")
    num_expert_groups: _Count | None = Field(None, description="number of groups of experts in the router")
    num_limited_groups: _Count | None = Field(None, description="number of these groups that a token may use")
    score_apply: Literal["auto", "pre", "post"] = Field(
        "auto", description="whether weights are applied before or after the experts"
    )
    expert_w1: str | None = Field(None, description="name of the experts' gate weight")
    expert_w2: str | None = Field(None, description="name of the experts' down weight")
    expert_w3: str | None = Field(None, description="name of the experts' up weight")
    expert_activation: str | None = Field(None, description="activation function of the experts")
    num_experts_attr: str | None = Field(
        None, description="attribute of the model's configuration with the number of experts"
    )
    top_k_attr: str | None = Field(
        None, description="attribute of the model's configuration with the experts per token"
    )

    def rule(self) -> RouterRule:
        """The settings of the section for blocks with a list of experts."""
        scale = self.route_scale if self.routed_scaling_factor == "auto" else self.routed_scaling_factor
        return RouterRule(
            top_k=None if self.top_k == "auto" else self.top_k,
            score_func="sigmoid" if self.score_func == "sigmoid" else "softmax",
            route_norm=self.route_norm,
            route_scale=scale,
            router=self.router_pattern,
            experts=self.expert_pattern,
            shared_experts=self.shared_experts_pattern,
            shared_experts_gate=self.shared_experts_gate_pattern,
        )


def apply_config(
    model: nn.Module,
    config: ExpertParallelConfig,
    *,
    use_data_before_expert_parallelism: bool = False,
    may_lack: bool = False,
) -> list[str]:
    """Replace the experts of a model as a section says (collective). Returns the names of the replaced modules.

    Args:
        model: a Hugging Face model; changed in place.
        config: the section `expert_parallel`. If it is not enabled, nothing is changed.
        use_data_before_expert_parallelism: neighbouring ranks hold the same experts, instead of different ones.
        may_lack: a model without experts is not changed; for a stage of a pipeline.

    Raises:
        MoEConfigError: a value is not supported.
        ConversionError: see `apply_expert_parallel`.
    """
    if not config.enabled:
        return []
    slices = _slice_group(config.expert_tensor_parallel_size)
    if config.load_balance_coeff is not None:
        raise MoEConfigError(
            f"expert_parallel.load_balance_coeff: got {config.load_balance_coeff}, expected null: the model keeps its "
            "own router; build the layer with MoE(bias_update_rate=...)"
        )
    return apply_expert_parallel(
        model,
        config.autoep_size,
        pattern=config.moe_layer_pattern,
        rule=config.rule(),
        overlap_chunks=config.overlap_chunks,
        devices_per_node=config.devices_per_node,
        tensor_group=slices,
        slice_experts=slices is not None,
        use_data_before_expert_parallel=use_data_before_expert_parallelism,
        may_lack=may_lack,
    )


def _slice_group(size: int) -> Any:
    """The group over which one expert is cut: the model-parallel ranks; None if `size` is 1."""
    if size == 1:
        return None
    there = parallel_groups.given().size("tensor") if dsx_comm.is_initialized() else 1
    if size != there:
        raise MoEConfigError(
            f"expert_parallel.expert_tensor_parallel_size: got {size}, expected 1, or the {there} ranks that share the "
            "model in slices (tensor_parallel.autotp_size, or the mpu's)"
        )
    return parallel_groups.given().axis("tensor").group
