"""The matrix of programs that run on the simulated device, as data. `device_program.py` runs them.

A case is a body of the program and its settings. Every case must give the losses of the CPU and no report.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

MODES = ("eager", "random", "lazy", "slow-side", "slow-default")
"""All scheduling modes of the simulated device."""


@dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
        body: the function of `device_program.py` that runs it.
        worlds: on how many ranks it makes sense.
        tolerance: the largest difference of a loss from the CPU's.
        sample: on how many ranks it is in the ordinary suite, too.
        known: a defect that is known and not mended, for which the case fails; None: it must pass.
    """

    name: str
    body: str
    settings: dict[str, Any] = field(default_factory=dict)
    worlds: tuple[int, ...] = (1, 2)
    tolerance: float = 1e-4
    sample: tuple[int, ...] = ()
    known: str | None = None


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
PINNED = {"device": "cpu", "pin_memory": True}
PAGEABLE = {"device": "cpu"}
DISK = {"device": "nvme", "nvme_path": "DISK"}
"""The program puts its own folder in the place of the word DISK."""
DISK_PARAMETERS = {**DISK, "max_in_cpu": 0, "pin_memory": True}
WHOLE = {"stage3_param_persistence_threshold": 0}
"""No parameter stays whole on every rank."""
SMALL = {"stage3_prefetch_bucket_size": 20000, "stage3_max_live_parameters": 60000}
OFFLOADS: dict[str, dict[str, Any]] = {
    "device": {},
    "optimizer-host": {"offload_optimizer": PINNED},
    "optimizer-pageable": {"offload_optimizer": PAGEABLE},
    "parameters-host": {"offload_optimizer": PINNED, "offload_param": PINNED},
    "parameters-pageable": {"offload_optimizer": PAGEABLE, "offload_param": PAGEABLE},
    "disk": {"offload_optimizer": DISK, "offload_param": DISK_PARAMETERS},
}
SAMPLED = {
    "stage0-fp32-device": (1, 2),
    "stage1-fp32-device": (1, 2),
    "stage2-fp32-device": (1, 2),
    "stage3-fp32-device": (1, 2),
    "stage2-bf16-device": (1, 2),
    "stage3-fp16-device": (1, 2),
    "stage2-fp32-optimizer-host": (1, 2),
    "stage3-fp32-parameters-host": (2,),
    "stage3-bf16-parameters-host": (1,),
    "stage3-fp32-disk": (2,),
}


def engine_cases() -> list[Case]:
    """Stages x precisions x places."""
    found = []
    for stage, (precision, low), (place, offload) in itertools.product(range(4), PRECISIONS.items(), OFFLOADS.items()):
        if place != "device" and (stage == 0 or ("offload_param" in offload and stage < 3)):
            continue
        name = f"stage{stage}-{precision}-{place}"
        zero = {"stage": stage, **(WHOLE if stage == 3 else {}), **offload}
        tolerance = 1e-4 if precision == "fp32" else 3e-2
        found.append(
            Case(name, "engine", {"zero_optimization": zero, **low}, tolerance=tolerance, sample=SAMPLED.get(name, ()))
        )
    return found


def variant(name: str, zero: dict[str, Any], body: str = "engine", rest: Any = None, **more: Any) -> Case:
    """A case of the engine with a name of its own."""
    return Case(name, body, {"zero_optimization": zero, **(rest or {})}, **more)


SLOTS = {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 3}
BY_NORM = {"step_agreement": "norm"}
SMALL_BUCKETS = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 500, "overlap_comm": True}}
ZERO_1 = {"zero_optimization": {"stage": 1}}
ON_HOST = {"stage": 3, **WHOLE, **OFFLOADS["parameters-host"]}
SPECULATED = {"stage": 2, "reduce_bucket_size": 20000, "offload_optimizer": PINNED}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3, "ns_dtype": "float32"}}}
"""In bfloat16, the default on a device, it would not be the CPU's."""
CLIPPED_MUON = {
    "optimizer": {"type": "Muon", "params": {"lr": 1e-3, "ns_dtype": "float32", "qk_clip": {"threshold": 0.05}}}
}
"""Logits are clipped in every step."""
DION = {"optimizer": {"type": "Dion", "params": {"lr": 1e-3}}}
APOLLO = {"optimizer": {"type": "Apollo", "params": {"lr": 1e-3, "update_proj_gap": 2}}}
FOUR_BITS = {"optimizer": {"type": "AdamW4bit", "params": {"lr": 1e-3}}}
EIGHT_BITS = {"optimizer": {"type": "AdamW8bit", "params": {"lr": 1e-3}}}
BF16_STATES = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "state_dtype": "bf16", "stochastic_rounding": True}}
}
NEVER_CLIPPED = {"gradient_clipping": 1e3, "gradient_accumulation_steps": 4}
VARIANTS = [
    variant("persistent", {"stage": 3}),
    variant("small-buckets", {"stage": 2, "reduce_bucket_size": 20000, "overlap_comm": True}, sample=(2,)),
    variant("little-live", {"stage": 3, **WHOLE, **SMALL}, sample=(2,)),
    variant("no-accumulation", {"stage": 3, **WHOLE}, rest={"gradient_accumulation_steps": 1}),
    variant("accumulation-on-host", ON_HOST, rest={"gradient_accumulation_steps": 4}, sample=(1, 2)),
    variant(
        "accumulation-pageable",
        {"stage": 3, **WHOLE, **OFFLOADS["parameters-pageable"]},
        rest={"gradient_accumulation_steps": 4},
        sample=(1, 2),
    ),
    variant(
        "accumulation-pageable-of-8",
        {"stage": 3, **WHOLE, **OFFLOADS["parameters-pageable"]},
        rest={"gradient_accumulation_steps": 8},
        sample=(1,),
    ),
    variant(
        "accumulation-pageable-stage-2",
        {"stage": 2, "reduce_bucket_size": 20000, **OFFLOADS["optimizer-pageable"]},
        rest={"gradient_accumulation_steps": 4, **PRECISIONS["bf16"]},
        tolerance=3e-2,
        sample=(2,),
    ),
    variant(
        "accumulation-on-host-stage-1",
        {"stage": 1, "reduce_bucket_size": 20000, **OFFLOADS["optimizer-host"]},
        rest={"gradient_accumulation_steps": 4},
        sample=(1, 2),
    ),
    variant(
        "accumulation-pageable-stage-1",
        {"stage": 1, "reduce_bucket_size": 20000, **OFFLOADS["optimizer-pageable"]},
        rest={"gradient_accumulation_steps": 8, **PRECISIONS["bf16"]},
        tolerance=3e-2,
        sample=(1, 2),
    ),
    variant(
        "accumulation-with-parameters-on-disk",
        {"stage": 3, **WHOLE, "offload_optimizer": PINNED, "offload_param": DISK_PARAMETERS},
        rest={"gradient_accumulation_steps": 4},
        sample=(1,),
    ),
    variant(
        "accumulation-on-disk",
        {"stage": 3, **WHOLE, **OFFLOADS["disk"]},
        rest={"gradient_accumulation_steps": 4},
        sample=(1,),
    ),
    variant(
        "agreed-by-the-norm-in-fp16",
        {"stage": 3, **WHOLE, "step_agreement": "norm"},
        rest=PRECISIONS["fp16"],
        worlds=(2,),
        tolerance=3e-2,
        sample=(2,),
    ),
    variant("hybrid", {"stage": 3, **WHOLE, "zero_hpz_partition_size": 2}, worlds=(2, 4)),
    variant(
        "quantised",
        {"stage": 3, **WHOLE, "zero_quantized_weights": True, "zero_quantized_gradients": True},
        worlds=(2,),
        tolerance=1e-2,
        sample=(2,),
    ),
    variant("hybrid-of-four", {"stage": 3, **WHOLE, "zero_hpz_partition_size": 2}, worlds=(4,)),
    variant("early-host-step", {"stage": 2, "offload_optimizer": PINNED}, rest={"gradient_clipping": 0.0}),
    variant("speculative-host-step", SPECULATED, rest=NEVER_CLIPPED, sample=(1, 2)),
    variant("speculative-host-step-bf16", SPECULATED, rest={**NEVER_CLIPPED, **PRECISIONS["bf16"]}, tolerance=3e-2),
    variant("speculative-parameters-on-host", ON_HOST, rest=NEVER_CLIPPED),
    variant("speculative-on-disk", {"stage": 3, **WHOLE, **OFFLOADS["disk"]}, rest=NEVER_CLIPPED),
    variant("hidden-host-step", {**SPECULATED, "reduce_bucket_size": 1056}, body="hidden_host_step", sample=(1,)),
    variant("undone-host-step", SPECULATED, body="clipped_at_times", sample=(1,)),
    variant("undone-on-disk", {"stage": 3, **WHOLE, **OFFLOADS["disk"]}, body="clipped_at_times"),
    variant("late-host-step", {"stage": 2, "offload_optimizer": {**PINNED, "late_update_after": 1}}),
    variant(
        "late-on-disk",
        {
            "stage": 3,
            **WHOLE,
            "offload_optimizer": {**OFFLOADS["disk"]["offload_optimizer"], "late_update_after": 1},
            "offload_param": OFFLOADS["disk"]["offload_param"],
        },
        sample=(1,),
    ),
    variant("partial-host-step", {"stage": 3, **WHOLE, "offload_optimizer": {**PINNED, "ratio": 0.5}}),
    variant("saved", {"stage": 3, **WHOLE}, body="saved", sample=(2,)),
    variant("saved-from-host", ON_HOST, body="saved"),
    variant("saved-at-stage-2", {"stage": 2, "offload_optimizer": PINNED}, body="saved"),
    variant("saved-behind", {"stage": 3, **WHOLE}, "saved", {"checkpoint": {"asynchronous": True}}, sample=(2,)),
    variant("saved-behind-at-stage-2", {"stage": 2}, "saved", {"checkpoint": {"asynchronous": True}}),
    variant("states-moved-out", {"stage": 3, **WHOLE}, body="states_moved_out", sample=(2,)),
    variant("states-moved-out-stage-2", {"stage": 2}, body="states_moved_out"),
    variant("states-moved-out-aside", {"stage": 2}, "states_moved_out", {"aside": True}, sample=(1,)),
    variant("states-moved-out-in-bf16", {"stage": 3, **WHOLE}, "states_moved_out", PRECISIONS["bf16"], tolerance=3e-2),
    variant("pushed-asleep", {"stage": 3, **WHOLE, **SMALL}, body="pushed_asleep", sample=(2,)),
    variant("pushed-asleep-stage-2", {"stage": 2}, body="pushed_asleep"),
    variant("evaluated-between", {"stage": 3, **WHOLE, **SMALL}, body="evaluated_between", sample=(2,)),
    variant("evaluated-between-on-host", ON_HOST, body="evaluated_between"),
    variant("evaluated-between-stage-2", {"stage": 2}, "evaluated_between", PRECISIONS["bf16"], tolerance=3e-2),
    variant("preempted", {"stage": 3, **WHOLE}, body="preempted"),
    variant("preempted-on-host", ON_HOST, body="preempted"),
    variant("preempted-at-stage-2", {"stage": 2}, "preempted", {"checkpoint": {"asynchronous": True}}),
    variant("activations-on-host", {"stage": 3, **WHOLE}, body="activations_on_host", sample=(2,)),
    variant("activations-on-host-offloaded", ON_HOST, body="activations_on_host"),
    variant("activations-on-host-stage-2", {"stage": 2}, "activations_on_host", PRECISIONS["fp16"], tolerance=3e-2),
    variant("four-bits", {"stage": 2}, rest=FOUR_BITS, sample=(2,)),
    variant("eight-bits", {"stage": 3, **WHOLE}, rest=EIGHT_BITS, tolerance=1e-3, sample=(2,)),
    variant("four-bits-on-host", ON_HOST, rest={**FOUR_BITS, "gradient_clipping": 0.1}),
    variant("bf16-states", {"stage": 3, **WHOLE}, rest={**BF16_STATES, "gradient_clipping": 0.1}),
    variant("muon", {"stage": 2}, rest=MUON, sample=(2,)),
    variant("muon-at-stage-3", {"stage": 3, **WHOLE}, rest={**MUON, "gradient_clipping": 0.1}, worlds=(1, 2, 4)),
    variant("muon-with-clipped-logits", {"stage": 3, **WHOLE}, rest=CLIPPED_MUON, sample=(2,)),
    variant("dion", {"stage": 3, **WHOLE}, rest=DION, sample=(2,)),
    variant("dion-on-host", ON_HOST, rest=DION),
    variant("apollo", {"stage": 2}, rest=APOLLO, sample=(2,)),
    variant("muon-on-host", ON_HOST, rest=MUON, sample=(2,)),
    variant("muon-on-disk", {"stage": 3, **WHOLE, **OFFLOADS["disk"]}, rest=MUON),
    variant("muon-over-slices", {"stage": 2}, "slices_and_shards", rest=MUON, worlds=(2, 4)),
    variant("dion-over-slices", {"stage": 3, **WHOLE}, "slices_and_shards", rest=DION, worlds=(2, 4), sample=(2,)),
    variant("apollo-over-slices", {"stage": 2}, "slices_and_shards", rest=APOLLO, worlds=(2, 4)),
    Case("staged-with-clipped-logits", "staged", CLIPPED_MUON, worlds=(2,), sample=(2,)),
    Case("sent", "sent", {"stage": 3, **WHOLE}, sample=(2,)),
    Case("sent-on-host", "sent", ON_HOST, worlds=(2,)),
    Case("sent-at-stage-2", "sent", {"stage": 2}),
    Case("codes", "codes", {"stage": 3, **WHOLE}, sample=(2,)),
    Case("codes-on-host", "codes", ON_HOST),
    Case("codes-at-stage-2", "codes", {"stage": 2}),
    variant("muon-in-bf16", {"stage": 3, **WHOLE}, rest={**MUON, **PRECISIONS["bf16"]}, tolerance=3e-2),
    variant(
        "one-bit-adam",
        {"stage": 0},
        rest={"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 2}}},
        worlds=(2,),
        sample=(2,),
        tolerance=2e-2,
    ),
    variant(
        "zero-one-adam",
        {"stage": 0},
        rest={
            "optimizer": {"type": "ZeroOneAdam", "params": {"lr": 1e-3, "var_freeze_step": 4, "var_update_scaler": 1}}
        },
        worlds=(2,),
        tolerance=2e-2,
    ),
    variant(
        "one-bit-lamb",
        {"stage": 0},
        rest={"optimizer": {"type": "OneBitLamb", "params": {"lr": 1e-3, "freeze_step": 2}}},
        worlds=(2,),
        tolerance=2e-2,
    ),
    variant(
        "quantised-with-feedback",
        {
            "stage": 3,
            **WHOLE,
            "zero_quantized_weights": True,
            "zero_quantized_gradients": True,
            "zero_quantized_gradients_bits": 2,
            "zero_quantized_error_feedback": True,
        },
        worlds=(2, 4),
        tolerance=5e-2,
    ),
    Case("compressed", "compressed", {"devices_per_node": 2}, worlds=(2, 4), tolerance=1e-3),
    Case("copies-let-go", "let_go", {"what": "copies"}, worlds=(1,)),
    Case("steps-let-go", "let_go", {"what": "steps"}, worlds=(2,)),
    Case("hops-let-go", "let_go", {"what": "hops"}, worlds=(2,)),
    Case("own-loop", "own_loop", {"stage": 3, **WHOLE}, sample=(2,)),
    Case("own-loop-on-host", "own_loop", ON_HOST),
    Case("own-loop-stage-2", "own_loop", {"stage": 2}),
    Case("second-device", "own_loop", {"stage": 3, **WHOLE, "device": 1}, worlds=(1,), sample=(1,)),
    Case("second-device-on-host", "own_loop", {**ON_HOST, "device": 1}, worlds=(1,), sample=(1,)),
    Case("second-device-stage-2", "own_loop", {"stage": 2, "device": 1}, worlds=(1,)),
    Case("second-device-from-host", "own_loop", {"stage": 1, "offload_optimizer": PINNED, "device": 1}, worlds=(1,)),
    Case("pipeline-1f1b", "pipeline", {"schedule": "1f1b"}, worlds=(2, 4), sample=(2,)),
    Case("pipeline-zero-bubble", "pipeline", {"schedule": "zb-h1"}, worlds=(2,), sample=(2,)),
    Case("pipeline-1f1b-of-8", "pipeline", {"schedule": "1f1b", "micro_batches": 8}, worlds=(2,), sample=(2,)),
    Case("pipeline-zero-bubble-of-8", "pipeline", {"schedule": "zb-h1", "micro_batches": 8}, worlds=(2,), sample=(2,)),
    Case("staged-1f1b", "staged", {}, worlds=(2, 4), sample=(2,)),
    Case("staged-1f1b-of-8", "staged", {"micro_batches": 8}, worlds=(2,), sample=(2,)),
    Case("staged-zero-bubble", "staged", {"schedule": "zb-h1", **ZERO_1}, worlds=(2, 4), sample=(2,)),
    Case("staged-zb-v", "staged", {"schedule": "zbv"}, worlds=(2, 4)),
    Case("staged-gpipe", "staged", {"schedule": "gpipe", **ZERO_1}, worlds=(2, 4)),
    Case("staged-interleaved", "staged", {"schedule": "interleaved", **ZERO_1}, worlds=(2, 4), sample=(2,)),
    Case("staged-tied", "staged", {"tied": True, **ZERO_1}, worlds=(2, 4), sample=(2,)),
    Case("staged-tied-zero-bubble", "staged", {"tied": True, "schedule": "zb-h1"}, worlds=(2, 4)),
    Case("staged-experts", "staged", {"ep_size": 1, **ZERO_1}, worlds=(2,), sample=(2,)),
    Case("staged-experts-of-two", "staged", {"ep_size": 2, **ZERO_1}, worlds=(4,)),
    Case("staged-bf16", "staged", {"tied": True, **ZERO_1, **PRECISIONS["bf16"]}, worlds=(2, 4), tolerance=3e-2),
    Case("staged-stage-3", "staged", {"zero_optimization": {"stage": 3, **WHOLE}}, worlds=(2, 4)),
    Case("pipeline-gpipe", "pipeline", {"schedule": "gpipe"}, worlds=(2,)),
    Case("experts-dropless", "experts", {"drop_tokens": False}, worlds=(2, 4), sample=(2,)),
    Case("experts-with-capacity", "experts", {"drop_tokens": True}, worlds=(2, 4), sample=(2,)),
    Case("experts-two-hops", "experts", {"drop_tokens": True, "devices_per_node": 2}, worlds=(4,)),
    Case(
        "experts-small-buckets",
        "experts",
        {"drop_tokens": False, "zero_optimization": {"stage": 2, "reduce_bucket_size": 100}},
        worlds=(2,),
    ),
    Case("experts-overlapped", "experts", {"drop_tokens": True, "overlap_chunks": 2}, worlds=(2,)),
    Case("sequences-by-heads", "cut_sequences", {"sequence_parallel": {"overlap": 2}}, worlds=(2, 4), sample=(2,)),
    Case("sequences-in-a-ring", "cut_sequences", {"sequence_parallel": {"team": 1}}, worlds=(2, 4), sample=(2,)),
    Case(
        "sequences-with-attention-on-host",
        "cut_sequences",
        {"sequence_parallel": {"host_chunks": 3}, "zero_optimization": {"stage": 3, **WHOLE}},
        worlds=(1, 2),
        sample=(2,),
    ),
    Case("sequences-in-host-chunks", "cut_sequences", {"chunks": 4, **ZERO_1}, sample=(1, 2)),
    Case("experts-many-layers", "experts", {"many": True, **SMALL_BUCKETS}, worlds=(2, 4)),
    Case(
        "experts-at-stage-3",
        "experts",
        {"many": True, "zero_optimization": {"stage": 3, **WHOLE}},
        worlds=(2, 4),
        sample=(2,),
    ),
    Case("tensor-slices", "tensor_slices", {}, worlds=(2, 4), sample=(2,)),
    variant("slices-under-stage-2", {"stage": 2, "reduce_bucket_size": 500}, "slices_and_shards", worlds=(2, 4)),
    variant("slices-under-stage-3", {"stage": 3, **WHOLE}, "slices_and_shards", worlds=(2, 4)),
    variant("agreed-by-the-norm", {"stage": 2, "reduce_bucket_size": 20000, **BY_NORM}, worlds=(2, 4)),
    variant(
        "agreed-by-the-norm-at-stage-3",
        {"stage": 3, **WHOLE, **BY_NORM},
        rest=PRECISIONS["fp16"],
        worlds=(2, 4),
        tolerance=3e-2,
    ),
    Case("activations-alone", "activations_alone", {"kept": {"checkpoint_in_cpu": True}}, sample=(1,)),
    Case("activations-by-budget", "activations_alone", {"kept": {"checkpoint_in_cpu": True}, "budget": 0.3}),
    Case("activation-boundary", "activation_boundary", worlds=(1,), sample=(1,)),
    Case("activations-in-slots", "activations_alone", {"kept": SLOTS}, sample=(1,)),
    Case("activations-in-host-slots", "activations_alone", {"kept": {**SLOTS, "checkpoint_in_cpu": True}}),
    Case(
        "activations-under-ddp",
        "activations_alone",
        {"kept": {"checkpoint_in_cpu": True}, "wrapper": "ddp", "pieces": True},
        worlds=(2,),
        sample=(2,),
    ),
    Case(
        "activations-under-fsdp",
        "activations_alone",
        {"kept": {"checkpoint_in_cpu": True}, "wrapper": "fsdp", "budget": 0.3},
        worlds=(2,),
        sample=(2,),
    ),
    variant("sparse-gradients", {"stage": 0}, "sparse_embeddings", {"sparse_gradients": True}, sample=(2,)),
]

CASES = {case.name: case for case in [*engine_cases(), *VARIANTS]}
WORLDS = (1, 2, 4)
SAMPLE = {world: tuple(c.name for c in CASES.values() if world in c.sample) for world in WORLDS}
"""By the number of ranks: the cases in the ordinary suite."""

ALSO_ON_FOUR = (
    *(f"stage{stage}-fp32-device" for stage in range(4)),
    *("stage2-fp32-optimizer-host", "stage3-fp32-parameters-host", "little-live", "small-buckets", "quantised"),
    "experts-small-buckets",
)
ONE_AT_A_TIME = {
    world: tuple(c.name for c in CASES.values() if world in c.worlds or (world == 4 and c.name in ALSO_ON_FOUR))
    for world in WORLDS
}
"""By the number of ranks: the cases that run on a device which does one collective at a time."""
ONE_AT_A_TIME_SAMPLE = {1: (), 2: ("little-live", "quantised", "experts-at-stage-3"), 4: ()}
"""Those of them in the ordinary suite, where the same cases are sampled."""


def dealt(number: int) -> str:
    """The mode of case `number` of a process that deals the modes out. Planted races have one that does not change."""
    return MODES[1 + number % 4]
