"""The pictures of guides that stand for a comparison or a schedule; `tools/pictures.py` writes and checks them.

Each is drawn from what dsx itself says: two plans beside each other, the bytes of a plan or of a compressed model, or
the numbers that a schedule gives step by step. Nothing is measured, so that any machine draws the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from curves import Curve, curve_picture

GPUS = 16  # two nodes of eight
MACHINE = "H100-SXM+ethernet-100"
BASE = {
    "train_micro_batch_size_per_gpu": 4096,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}


def blocks() -> Any:
    """A model of four blocks with the sizes of a small transformer's matrices."""
    from torch import nn

    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(2048), nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048))

    return nn.Sequential(*(block() for _ in range(4)))


def planned(**changed: Any) -> Any:
    """The plan of the model on two nodes, with `changed` in the configuration."""
    import torch
    from dsx.planning import plan

    batch = torch.zeros(4096, 2048)
    return plan(blocks, {**BASE, **changed}, world_size=GPUS, machine=MACHINE, batch=batch, changes=False)


def beside_each_other(title: str, plans: dict[str, Any]) -> str:
    """Computation, messages and waiting of several plans on one axis of time."""
    from dsx_monitor.picture import Lane, step_picture

    kinds = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "reduce", "all_to_all": "reduce"}
    lanes = []
    for name, plan in plans.items():
        for lane, said in (("compute", "compute"), ("communication", "messages"), ("waiting", "waits")):
            spans = [
                (kinds.get(what.split()[0], what if lane == "compute" else lane), what, start, end)
                for of, what, start, end in plan.timeline
                if of == lane
            ]
            lanes.append(Lane(f"{name}: {said}", spans))
    return step_picture(title, [], lanes)


def zero_plus_plus() -> str:
    """A step at stage 3 on two nodes, and the same with hpZ, qwZ and qgZ."""
    whole = {"stage": 3, "stage3_param_persistence_threshold": 0}
    short = {"zero_hpz_partition_size": 8, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    plans = {
        "stage 3": planned(zero_optimization=whole),
        "ZeRO++": planned(zero_optimization={**whole, **short}),
    }
    return beside_each_other("A planned step on two nodes with 100 Gbit/s between them", plans)


def one_bit() -> str:
    """A step at stage 0 on two nodes with AdamW, and a compressed one with 1-bit Adam."""
    one_bit = {"type": "OneBitAdam", "params": {"lr": 1e-4, "freeze_step": 100}}
    plans = {"AdamW": planned(), "1-bit": planned(optimizer=one_bit)}
    return beside_each_other("A planned step at stage 0 on two nodes with 100 Gbit/s between them", plans)


def states_of_matrices() -> str:
    """What a device holds at stage 3 with AdamW and with the rules that go by whole matrices."""
    from dsx_monitor.picture import Bar, step_picture

    bars = []
    for kind in ("AdamW", "Muon", "Dion", "Apollo"):
        chosen = {"type": kind, "params": {"lr": 1e-4}}
        found = planned(optimizer=chosen, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
        bars.append(Bar(kind, {name: size for name, size in found.state_bytes().items() if "buffers" not in name}))
    return step_picture(f"Planned bytes of a device at stage 3: 134 M parameters on {GPUS} devices", bars, [])


def compressed() -> str:
    """Bytes of a model's weights by technique, as `compression_report` and the removed rows have them."""
    import torch
    from dsx_compress import compression_report, compression_scheduler, init_compression, redundancy_clean
    from dsx_monitor.picture import Bar, step_picture
    from torch import nn

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))

    def section(name: str, params: dict[str, Any], shared: dict[str, Any], **group: Any) -> dict[str, Any]:
        groups = {"all": {"params": params, "modules": ["0", "2"], **group}}
        return {"compression_training": {name: {"shared_parameters": {"enabled": True, **shared},
                                                "different_groups": groups}}}  # fmt: skip

    def in_bits(bits: int) -> float:
        shared = {"schedule_offset": 0, "quantization_type": "symmetric"}
        params = {"start_bits": bits, "target_bits": bits, "quantization_period": 1}
        config = section("weight_quantization", params, shared)
        compression_scheduler(quantized := init_compression(model(), config), config).step()
        report = compression_report(quantized)
        return float(sum(row.bytes_after for row in report.rows))

    half = section("row_pruning", {"dense_ratio": 0.5}, {"schedule_offset": 0, "method": "topk"},
                   modules=["0"], related_modules=[["2"]])  # fmt: skip
    small = redundancy_clean(init_compression(model(), half), half)

    def dense(of: nn.Module) -> float:
        return float(sum(p.numel() * p.element_size() for p in of.parameters() if p.dim() > 1))

    sizes = {"fp32": dense(model()), "half of the rows": dense(small), "int8": in_bits(8), "int4": in_bits(4)}
    bars = [Bar(name, {"parameters": size}) for name, size in sizes.items()]
    return step_picture("Bytes of the weights of a model of two linear layers", bars, [])


def fine_tuning() -> str:
    """What a device holds at the peak of a step, when all weights of a Llama are tuned and with LoRA."""
    import transformers
    from dsx.planning import plan
    from dsx_monitor.picture import Bar, step_picture
    from torch import nn

    class LoRA(nn.Module):
        def __init__(self, frozen: nn.Linear, rank: int) -> None:
            super().__init__()
            self.frozen, self.down = frozen, nn.Linear(frozen.in_features, rank, bias=False)
            self.up = nn.Linear(rank, frozen.out_features, bias=False)

        def forward(self, x: Any) -> Any:
            return self.frozen(x) + self.up(self.down(x))

    def llama(rank: int = 0) -> nn.Module:
        sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16,
                 "num_key_value_heads": 4, "vocab_size": 32768, "use_cache": False}  # fmt: skip
        settings: Any = {**sizes, "attn_implementation": "sdpa"}
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
        if rank:
            model.requires_grad_(False)
            for layer in model.model.layers:
                layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj, rank)
                layer.self_attn.v_proj = LoRA(layer.self_attn.v_proj, rank)
        return model

    config = {**BASE, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    bars = []
    for name, model in (("all weights", llama), ("LoRA of rank 8", lambda: llama(8))):
        found = plan(model, config, world_size=2, machine="RTX-4090", sequence=512, changes=False)
        bars.append(Bar(name, found.peak_parts))
    return step_picture("Planned memory at the peak of a step: a Llama of 0.5 B parameters on two RTX 4090", bars, [])


def learning_rates() -> str:
    """The learning rates that the schedules give over a hundred updates."""
    import torch
    from dsx.lr_schedules import build_schedule

    peak, total = 1e-3, 100
    schedules = {
        "WarmupLR": {"warmup_max_lr": peak, "warmup_num_steps": 20},
        "WarmupDecayLR": {"warmup_max_lr": peak, "warmup_num_steps": 20, "total_num_steps": total},
        "WarmupCosineLR": {"total_num_steps": total, "warmup_num_steps": 20},
        "OneCycle": {"cycle_min_lr": peak / 10, "cycle_max_lr": peak, "cycle_first_step_size": 30,
                     "decay_lr_rate": 0.5, "decay_step_size": 10},
        "LRRangeTest": {"lr_range_test_min_lr": peak / 10, "lr_range_test_step_size": 10,
                        "lr_range_test_step_rate": 0.8},
    }  # fmt: skip
    curves = []
    for name, params in schedules.items():
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=peak)
        schedule = build_schedule(name, optimizer, params)
        points = []
        for update in range(total + 1):
            points.append((update, 1000 * optimizer.param_groups[0]["lr"]))
            schedule.step()
        curves.append(Curve(name, points))
    return curve_picture("The schedules", "updates", "learning rate x 1000", curves)


def tokens_of_data() -> str:
    """How many tokens of a sequence are used as training goes on, and how many layers are kept."""
    from dsx_data import CurriculumScheduler, ProgressiveLayerDrop, RandomLTDScheduler

    linear = {"total_curriculum_step": 60, "difficulty_step": 8}
    lengths = CurriculumScheduler({"min_difficulty": 64, "max_difficulty": 1024, "schedule_type": "fixed_linear",
                                   "schedule_config": linear})  # fmt: skip
    tokens = RandomLTDScheduler(
        {"total_layer_num": 12, "random_ltd_layer_id": list(range(1, 11)), "random_ltd_schedule": {
            "min_value": 128, "max_value": 1024, "schedule_config": {"require_steps": 80, "seq_per_step": 64}}}
    )  # fmt: skip
    layers = ProgressiveLayerDrop(theta=0.5, gamma=0.03)
    steps = range(1, 101)
    curves = [
        Curve("length of sequences (curriculum)", [(step, lengths.update_difficulty(step) / 10.24) for step in steps]),
        Curve("tokens of middle layers (random-LTD)", [(step, tokens.update_seq(step) / 10.24) for step in steps]),
        Curve("layers kept", [(step, 100 * (1 + layers.theta_at(step)) / 2) for step in steps]),
    ]
    return curve_picture("Work per sample, by technique", "updates", "% of the whole", curves)


def shares_of_a_batch() -> str:
    """Samples of an update that one process has, for each number of devices that divides the batch."""
    from dsx.elasticity import compute_elastic_config

    section = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "min_gpus": 1,
               "max_gpus": 64, "version": 0.1}  # fmt: skip
    batch, devices, *_ = compute_elastic_config({"elasticity": section})
    points = [(count, batch / count) for count in devices if count >= 4]
    curves = [Curve("numbers of devices on which this batch is trained", points, dots=True)]
    return curve_picture(f"An update of {batch} samples", "devices", "samples of one device", curves)


PICTURES: dict[str, Callable[[], str]] = {
    "between-nodes.svg": zero_plus_plus, "one-bit.svg": one_bit, "matrices.svg": states_of_matrices,
    "compressed.svg": compressed, "learning-rates.svg": learning_rates, "data.svg": tokens_of_data,
    "elastic-batch.svg": shares_of_a_batch, "fine-tune.svg": fine_tuning,
}  # fmt: skip
