"""The `zero_optimization` section: every key that DeepSpeed documents, with its documented default.

`ZeroConfig` has the values. `check_available()` refuses features that do not exist yet; `notices()` names settings
that were given and have no effect here, because the behaviour they choose is the only one. Importing this module
imports pydantic; sharding without a configuration does not import it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from .config_keys import NO_EFFECT, NOT_YET, OLD_NAMES, READ_AS, SECOND_NAMES
from .config_sections import Auto, Count, LeafModules, LoCo, OffloadOptimizer, OffloadParam, Section, Size
from .errors import ZeroConfigError

__all__ = [
    "NOT_YET",
    "NO_EFFECT",
    "OLD_NAMES",
    "SECOND_NAMES",
    "LeafModules",
    "LoCo",
    "OffloadOptimizer",
    "OffloadParam",
    "ZeroConfig",
]

PATH = "zero_optimization"
GRADIENT_BLOCK = 256
"""Of quantised gradients, by default; decision 0059."""


def _no_boolean(value: Any) -> Any:
    """Refuse true and false, which Python takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("true or false is no stage; write 0, 1, 2 or 3")
    return value


class ZeroConfig(Section):
    """The sharding of optimizer states, gradients and parameters over the ranks. Sizes are in elements."""

    # The section's judgements of its keys: dsx takes them from here into its messages and its reference.
    NOT_YET: ClassVar[dict[str, str]] = NOT_YET
    NO_EFFECT: ClassVar[dict[str, str]] = NO_EFFECT
    OLD_NAMES: ClassVar[dict[str, str]] = OLD_NAMES
    BETTER: ClassVar[dict[str, str]] = {
        "elastic_checkpoint": "every checkpoint loads at every number of ranks and stage",
        "leaf_module": "an entry that fits no module is an error",
        "stage": "every stage gives the losses of plain PyTorch, unused parameters included",
    }

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_no_boolean)] = Field(
        0,
        description=(
            "what is sharded over the ranks: 0: nothing; 1: optimizer states; 2: also gradients; 3: also parameters"
        ),
    )
    keep_full_gradients: bool = Field(
        False,
        description=(
            "stages 2-3: the engine runs all micro-batches but the last in no_sync(), so that gradients are"
            " reduced once per step"
        ),
    )

    allgather_partitions: bool = Field(
        True, description="gather updated parameters with all-gather, as dsx always does"
    )
    allgather_bucket_size: Count = Field(500_000_000, description="most elements in one all-gather")
    overlap_comm: bool | None = Field(None, description="reduce gradients while backward runs; null: true")
    reduce_scatter: bool = Field(
        True,
        description="reduce gradients with reduce-scatter instead of all-reduce, as dsx always does from stage 1 on",
    )
    use_multi_rank_bucket_allreduce: bool = Field(
        True, description="DeepSpeed: put gradients of several ranks into one bucket"
    )
    reduce_bucket_size: Count | Auto = Field(500_000_000, description="most elements in one reduction of gradients")
    compute_grad_norm: bool = Field(True, description="DeepSpeed: compute the norm of gradients that are not clipped")
    contiguous_gradients: bool = Field(True, description="copy gradients into one buffer, as dsx always does")
    load_from_fp32_weights: bool = Field(
        True, description="load masters from the masters in a checkpoint, not from its parameters"
    )
    grad_hooks: bool = Field(True, description="reduce gradients from backward hooks, as dsx always does")
    step_agreement: Literal["message", "norm"] = Field(
        "message",
        description=(
            "how the ranks find out in each step whether all executed the same collectives; message: the hosts send a"
            " message to each other; norm (stages 1-3): the all-reduce of the norm tells it, and the host reads its"
            " result"
        ),
    )
    notice_data_writes: bool | None = Field(
        None,
        description=(
            "whether writes through p.data reach the masters of 16-bit parameters, which costs two passes over the"
            " parameters and a wait for the device per step; null: such writes are looked for in the first three"
            " updates, and in all if there was one in them"
        ),
    )
    round_robin_gradients: bool = Field(False, description="DeepSpeed: another order of parameters in the partitions")
    parameter_alignment: bool = Field(False, description="DeepSpeed: align each parameter in its flat buffer")
    elastic_checkpoint: bool = Field(
        False, description="DeepSpeed: write checkpoints that load at other world sizes, as those of dsx always do"
    )
    ignore_unused_parameters: bool = Field(
        True, description="false: the step raises if a trainable parameter has no gradient on some rank"
    )
    legacy_stage1: bool = Field(False, description="DeepSpeed's first implementation of stage 1")
    offload_param: OffloadParam | None = Field(None, description="where parameters live between uses")
    offload_optimizer: OffloadOptimizer | None = Field(None, description="where optimizer states live")
    cpu_offload: bool = Field(False, description="old name of offload_optimizer.device = cpu")
    cpu_offload_params: bool = Field(False, description="old name of offload_param.device = cpu")
    cpu_offload_use_pin_memory: bool = Field(False, description="old name of pin_memory")
    sub_group_size: Count = Field(
        1_000_000_000_000,
        description=(
            "elements of this rank's masters that the optimizer updates at a time. With states on disk it is 4194304"
            " if it is not set; a value of the size of the model has all states in host memory at once"
        ),
    )

    stage3_max_live_parameters: Size = Field(
        1_000_000_000, description="most elements of parameters that are gathered at any moment"
    )
    stage3_max_reuse_distance: Size = Field(
        1_000_000_000,
        description="keep parameters gathered if at most this many elements are gathered until their next use",
    )
    stage3_prefetch_bucket_size: Size | Auto = Field(
        500_000_000, description="most elements that are gathered ahead of their use"
    )
    stage3_param_persistence_threshold: Size | Auto = Field(
        100_000, description="parameters with fewer elements stay gathered"
    )
    stage3_model_persistence_threshold: Size = Field(
        2**63 - 1, description="most elements of all parameters that stay gathered because they are small"
    )
    stage3_gather_16bit_weights_on_model_save: bool | None = Field(
        None,
        description="save_16bit_model gathers the weights and writes complete tensors; null: true; false: it writes"
        " nothing and returns False",
    )
    stage3_module_granularity_threshold: Size = Field(
        0, description="gather modules with at most this many elements per layer as one unit"
    )
    stage3_use_all_reduce_for_fetch_params: bool = Field(False, description="gather parameters with all-reduce")
    stage3_allgather_sequential: bool = Field(False, description="run one gather at a time")

    zero_hpz_partition_size: Count = Field(
        1,
        description=(
            "stage 3: number of neighbouring ranks that share a second copy of the parameters, which"
            " backward gathers; 1: none"
        ),
    )
    zero_quantized_weights: bool = Field(False, description="stage 3: gather parameters as integers")
    zero_quantized_weights_bits: Literal[8, 4, 2] = Field(
        8, description="bits of these integers; for trained parameters 4 and 2 need zero_hpz_partition_size"
    )
    zero_quantized_nontrainable_weights: bool = Field(
        False, description="stage 3: gather frozen parameters only as integers"
    )
    zero_quantized_gradients: bool = Field(False, description="stages 1-3: reduce gradients as integers, in two hops")
    zero_quantized_gradients_bits: Literal[8, 4, 2] = Field(4, description="bits of these integers")
    zero_quantized_gradients_block_size: Annotated[int, Field(gt=0, multiple_of=4)] = Field(
        GRADIENT_BLOCK, description="elements of quantised gradients that share a scale of 4 bytes"
    )
    zero_quantized_error_feedback: bool = Field(
        False, description="add the error of quantised gradients to the gradients of the next reduction"
    )
    zeropp_loco_param: LoCo | None = Field(
        None, description="add a moving average of earlier errors to quantised gradients"
    )
    mics_shard_size: Annotated[int, Field(ge=-1)] = Field(
        -1,
        description=(
            "stages 1-3: number of neighbouring ranks that divide one copy of the states; -1: all ranks divide one copy"
        ),
    )
    mics_hierarchical_params_gather: bool = Field(
        False, description="stage 3: gather parameters between nodes first, then inside them"
    )

    memory_efficient_linear: bool = Field(True, description="DeepSpeed: do not keep gathered weights for backward")
    pipeline_loading_checkpoint: bool = Field(False, description="DeepSpeed: ranks load one after the other")
    override_module_apply: bool = Field(True, description="DeepSpeed: zero.Init replaces Module.apply")
    log_trace_cache_warnings: bool = Field(False, description="DeepSpeed: warn when the order of modules changes")
    enable_sanity_checks: bool = Field(False, description="DeepSpeed: raise for writes to partitioned parameters")
    leaf_module: LeafModules | None = Field(None, description="modules that are gathered as one unit")
    zenflow: dict[str, Any] | None = Field(
        None, description="DeepSpeed's ZenFlow: offload that updates important gradients first"
    )
    save_muon_momentum_buffer_in_memory: bool = Field(
        False, description="with offload to disk: optimizer states (Muon's momentum) stay in host memory"
    )

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, data: Any) -> Any:
        """`true` is stage 1; second names become first names."""
        if isinstance(data, bool):
            return {"stage": int(data)}
        if not isinstance(data, dict):
            return data
        for second, first in SECOND_NAMES.items():
            if second in data and first in data:
                raise ValueError(f"{second} and {first} are two names of one setting; give one")
        found = {SECOND_NAMES.get(key, key): value for key, value in data.items()}
        for old, new in READ_AS.items():
            if found.get(old) is True:
                meant = {"device": "cpu", "pin_memory": found.get("cpu_offload_use_pin_memory") is True}
                if found.get(new) not in (None, meant):
                    raise ValueError(f"{old} is the old name of {new} with device cpu; give one of the two")
                found[new] = meant
        return found

    def size(self, name: str) -> int:
        """A size with "auto" replaced by its default."""
        value = getattr(self, name)
        return type(self).model_fields[name].default if value == "auto" else value

    def check_available(self) -> None:
        """Refuse what does not exist yet.

        Raises:
            ZeroConfigError: "not available yet", with the setting's path.
        """
        for name, reason in NOT_YET.items():
            found = self._changed(name)
            if found is None or found[0] is None:
                continue
            path, value = f"{PATH}.{name}", found[0]
            raise ZeroConfigError(path, f"not available yet: {path} (got {value!r}); remove it: {reason}")

    @property
    def shard_ranks(self) -> int:
        """Ranks that divide a copy of the states; 0: all of them."""
        return max(self.mics_shard_size, 0)

    @property
    def near_ranks(self) -> int:
        """Ranks that have secondary shards; 0: none."""
        return self.zero_hpz_partition_size if self.zero_hpz_partition_size > 1 else 0

    @property
    def sends_differences(self) -> bool:
        """Whether parameters travel as differences to the second copy that ranks near by have."""
        return self.zero_quantized_weights and self.zero_quantized_weights_bits < 8 and self.near_ranks > 0

    def check_combinations(self, *, mesh: bool = False) -> None:
        """Refuse settings of ZeRO++ and hybrid sharding where they cannot work.

        Args:
            mesh: a device mesh says how many ranks divide a copy of the states.

        Raises:
            ZeroConfigError: names the setting and the reason.
        """
        for name, wrong, reason in _conflicts(self, mesh):
            if wrong:
                raise ZeroConfigError(f"{PATH}.{name}", f"got {getattr(self, name)!r}, but {reason}")

    def notices(self) -> tuple[str, ...]:
        """Settings that were changed and have no effect, or are old names, each with the reason."""
        return tuple(
            f"{PATH}.{name}{said}: {reason}"
            for table, said in ((NO_EFFECT, " has no effect"), (OLD_NAMES, ""))
            for name, reason in table.items()
            if self._changed(name) is not None
        )

    def _changed(self, name: str) -> tuple[Any] | None:
        """The value of a setting ("section.key" for one of a section) that was given and is not its default; of a
        section that is switched off, nothing was.
        """
        owner: Any = self
        *sections, key = name.split(".")
        for section in sections:
            owner = getattr(owner, section)
            if owner is None or getattr(owner, "device", None) == "none":
                return None
        value = getattr(owner, key)
        given = key in owner.model_fields_set and value != type(owner).model_fields[key].default
        return (value,) if given else None


def _conflicts(z: ZeroConfig, mesh: bool) -> list[tuple[str, bool, str]]:
    """(setting, whether it cannot work, why)."""
    below_3 = f"at stage {z.stage} every rank keeps all parameters, and none are gathered for a use; use stage 3"
    offload = z.offload_optimizer
    late = offload is not None and offload.device != "none" and offload.late_update_after is not None
    hybrid = z.mics_shard_size > 0 or mesh
    weights = z.zero_quantized_weights or z.zero_quantized_nontrainable_weights
    loco = z.zeropp_loco_param is not None
    return [
        (
            "offload_optimizer",
            late and offload is not None and offload.ratio != 1.0,
            "late_update_after needs the masters and optimizer states of all units in host memory or on disk; set ratio"
            " to 1",
        ),
        ("zero_hpz_partition_size", z.near_ranks > 0 and z.stage < 3, below_3),
        ("zero_quantized_weights", z.zero_quantized_weights and z.stage < 3, below_3),
        ("zero_quantized_nontrainable_weights", z.zero_quantized_nontrainable_weights and z.stage < 3, below_3),
        ("mics_hierarchical_params_gather", z.mics_hierarchical_params_gather and z.stage < 3, below_3),
        (
            "mics_shard_size",
            hybrid and z.stage == 0,
            "at stage 0 nothing is sharded over the ranks; use stage 1, 2 or 3",
        ),
        (
            "mics_shard_size",
            mesh and z.mics_shard_size > 0,
            "the mesh says how the ranks are divided; give one of them",
        ),
        (
            "zero_hpz_partition_size",
            z.near_ranks > 0 and hybrid,
            "hybrid sharding gathers parameters among few ranks already; give one of them",
        ),
        (
            "zero_quantized_gradients",
            z.zero_quantized_gradients and hybrid,
            "with hybrid sharding gradients are summed over copies too, which is not quantised; give one of them",
        ),
        (
            "zero_quantized_gradients",
            z.zero_quantized_gradients and z.stage == 0,
            "at stage 0 every rank needs all averaged gradients, and hops of a quantised reduction end in shards; use"
            " stage 1, 2 or 3",
        ),
        (
            "step_agreement",
            z.step_agreement == "norm" and z.stage == 0,
            "at stage 0 every rank has all gradients, and computes their norm alone; use stage 1, 2 or 3",
        ),
        ("zeropp_loco_param", loco and not z.zero_quantized_gradients, "it needs zero_quantized_gradients"),
        (
            "zeropp_loco_param",
            loco and z.zero_quantized_error_feedback,
            "zero_quantized_error_feedback keeps all errors of gradients already; give one of them",
        ),
        (
            "zeropp_loco_param",
            z.zeropp_loco_param is not None and z.zeropp_loco_param.err_beta >= 1.0,
            "with err_beta = 1 no error is ever learned; expected less than 1",
        ),
        (
            "zero_quantized_error_feedback",
            z.zero_quantized_error_feedback and not z.zero_quantized_gradients,
            "gradients are not quantised; set zero_quantized_gradients",
        ),
        (
            "zero_quantized_weights_bits",
            z.zero_quantized_weights_bits != 8 and not weights,
            "parameters are not quantised; set zero_quantized_weights",
        ),
        (
            "zero_quantized_weights_bits",
            z.zero_quantized_weights_bits == 2 and not z.zero_quantized_weights,
            "2 bits are for differences of parameters that are trained; set it to 8 or 4",
        ),
        (
            "zero_quantized_gradients_bits",
            z.zero_quantized_gradients_bits != 4 and not z.zero_quantized_gradients,
            "gradients are not quantised; set zero_quantized_gradients",
        ),
        (
            "zero_quantized_gradients_block_size",
            z.zero_quantized_gradients_block_size != GRADIENT_BLOCK and not z.zero_quantized_gradients,
            "gradients are not quantised; set zero_quantized_gradients",
        ),
        (
            "zero_quantized_gradients_bits",
            z.zero_quantized_gradients_bits == 2 and not z.zero_quantized_error_feedback and not loco,
            "2 bits lose too much of a gradient without error feedback; set zero_quantized_error_feedback",
        ),
        (
            "zero_quantized_weights_bits",
            z.zero_quantized_weights and z.zero_quantized_weights_bits < 8 and not z.sends_differences,
            "fewer than 8 bits lose too much of parameters that are trained, unless differences to a second copy are"
            " sent; set zero_hpz_partition_size",
        ),
    ]
