"""Published rows of jobs with more than data parallelism, or with FP8 or compiled blocks: what `planner.py layouts` and
`planner.py stages` go over.

One constant was chosen with one of them in sight, which says so (`fits`); all others are held back. `assumed` names
what the source leaves open. A rate is tokens per second of one device. A peak is what the source says of a device's
memory, in GiB; 0: it says nothing.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _published_rows import some_again
from torch import nn

__all__ = ["LAYOUTS", "Layout", "family", "planned"]

TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_H200 = "torchtitan, benchmarks/llama3_8b_h200_2025-06_torchtitan.md"
BRIDGE = "Megatron-Bridge, docs/performance-summary-archive.md"
AUTOMODEL = "NeMo AutoModel, docs/performance-summary.md"
LLAMA_3 = "Llama 3 (arXiv 2407.21783)"
MEGASCALE = "MegaScale (arXiv 2402.15627)"


@dataclass(frozen=True)
class Layout:
    """A published job.

    Attributes:
        source: who published it, and in which file.
        model: a key of `CONFIGS`.
        machine: of the planner's table.
        length: tokens of a sample.
        devices: in all.
        micro, samples: of a micro-batch, and of a step over all devices.
        rate: published tokens per second of a device.
        peak: published GiB of a device; 0: none.
        tensor, pipe, chunks, sequence, expert: ranks of each axis; stages of a rank.
        stage: of ZeRO.
        recomputes: False, True, or "some" (torchtitan's selective mode).
        fused: blocks are compiled, or made of fused kernels.
        fp8: products of blocks in FP8.
        attention: its kernels; Transformer Engine has those of cuDNN, which `dsx plan` calls flash3.
        fits: `dsx_plan.devices.FASTER_ATTENTION` was chosen with it in sight.
        assumed: settings that the source leaves open.
    """

    source: str
    model: str
    machine: str
    length: int
    devices: int
    micro: int
    samples: int
    rate: float
    peak: float = 0.0
    tensor: int = 1
    pipe: int = 1
    chunks: int = 1
    sequence: int = 1
    expert: int = 0
    stage: int = 3
    recomputes: bool | str = False
    fused: bool = True
    fp8: bool = False
    attention: str = "flash2"
    fits: bool = False
    assumed: str = ""

    @property
    def quick(self) -> bool:
        """Whether a plan of it takes seconds."""
        return self.model == "llama-3-8b" and bool(self.peak)

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.devices // (self.tensor * self.pipe * self.sequence)

    @property
    def words(self) -> str:
        """The layout, for a table."""
        axes = {"TP": self.tensor, "PP": self.pipe, "VP": self.chunks, "CP": self.sequence, "EP": self.expert}
        found = [f"{name} {size}" for name, size in axes.items() if size > 1]
        found += ["FP8"] if self.fp8 else []
        return ", ".join([*found, "fused" if self.fused else "eager"])


def _llama(width: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
    }  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3-8b": _llama(4096, 14336, 32, 32),
    "llama-3-70b": _llama(8192, 28672, 80, 64),
    "llama-3-405b": _llama(16384, 53248, 126, 128),
    "gpt-175b": {**_llama(12288, 32768, 96, 128), "vocab_size": 64000, "num_key_value_heads": 128},
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 129280,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
    "qwen3-235b-a22b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
        "max_position_embeddings": 40960, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
        "max_position_embeddings": 40960, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Configurations as they lie beside the weights of these models."""

_H100 = "H100-SXM-96"  # torchtitan's: 96 GB of HBM2e, limited to 500 W
_TITAN = {"source": TITAN, "machine": _H100}
_EIGHT = {**_TITAN, "model": "llama-3-8b", "length": 8192, "micro": 2, "recomputes": "some"}
_LONG = {**_TITAN, "model": "llama-3-8b", "devices": 8, "micro": 1, "recomputes": True, "fp8": True}
_BRIDGE = {"source": BRIDGE, "micro": 1, "length": 8192, "fp8": True, "stage": 1, "attention": "flash3"}

_MOE = {"source": BRIDGE, "micro": 1, "length": 4096, "stage": 1, "attention": "flash3", "recomputes": True}

LAYOUTS = (
    Layout(**_EIGHT, devices=8, samples=16, rate=5762, peak=82.4, fused=False),
    Layout(**_EIGHT, devices=8, samples=16, rate=6667, peak=77.0),
    Layout(**_EIGHT, devices=8, samples=16, rate=8532, peak=76.8, fp8=True),
    Layout(**_EIGHT, devices=128, samples=256, rate=5605, peak=67.0, fused=False),
    Layout(**_EIGHT, devices=128, samples=256, rate=6514, peak=62.0),
    Layout(**_EIGHT, devices=128, samples=256, rate=8380, peak=61.8, fp8=True),
    Layout(**_LONG, length=32768, samples=8, rate=3890, peak=83.9),
    Layout(**_LONG, length=65536, samples=4, rate=2540, peak=84.2, sequence=2),
    Layout(**_LONG, length=131072, samples=2, rate=1071, peak=84.0, sequence=4),
    Layout(**_LONG, length=262144, samples=1, rate=548, peak=84.5, sequence=8),
    Layout(**_TITAN, model="llama-3-70b", length=8192, devices=256, micro=16, samples=512, rate=829, peak=71.9,
           tensor=8, recomputes=True, fp8=True),
    Layout(**_TITAN, model="llama-3-405b", length=8192, devices=512, micro=1, samples=256, rate=100, peak=82.5,
           tensor=8, pipe=8, recomputes=True, fp8=True, stage=2, assumed="micro-batches of 1, states sharded"),
    Layout(TITAN_H200, "llama-3-8b", "H200-SXM", 8192, 32, 2, 64, 10938, 47.96, recomputes="some", fp8=True),
    Layout(TITAN_H200, "llama-3-8b", "H200-SXM", 8192, 64, 2, 128, 10753, 46.97, recomputes="some", fp8=True),
    Layout(**{**_BRIDGE, "stage": 3}, model="llama-3-8b", machine="H100-SXM", devices=8, samples=128, rate=14451,
           fits=True),
    Layout(**_BRIDGE, model="llama-3-70b", machine="H100-SXM", devices=64, samples=128, rate=1602, tensor=4, pipe=8,
           chunks=5),
    Layout(**_BRIDGE, model="llama-3-405b", machine="H100-SXM", devices=1024, samples=512, rate=292, tensor=8, pipe=8,
           chunks=8, sequence=2),
    Layout(**{**_BRIDGE, "micro": 2}, model="llama-3-8b", machine="B200", devices=8, samples=128, rate=30624),
    Layout(**{**_BRIDGE, "micro": 2}, model="llama-3-8b", machine="GB200", devices=8, samples=128, rate=31508),
    Layout(**{**_BRIDGE, "micro": 2}, model="llama-3-8b", machine="GB300", devices=8, samples=128, rate=37556),
    Layout(**{**_BRIDGE, "micro": 2, "stage": 3}, model="llama-3-70b", machine="GB200", devices=64, samples=256,
           rate=4312),
    Layout(AUTOMODEL, "qwen3-30b-a3b", "H100-SXM", 4096, 8, 4, 512, 12040, expert=8, attention="flash3",
           assumed="no recomputation"),
    Layout(**_MOE, model="deepseek-v3", machine="GB200", devices=256, samples=4096, rate=3139, pipe=4, chunks=4,
           expert=64, assumed="recomputed blocks"),
    Layout(**{**_MOE, "fp8": True}, model="deepseek-v3", machine="H100-SXM", devices=1024, samples=8192, rate=1297,
           tensor=2, pipe=8, chunks=4, expert=64, assumed="recomputed blocks"),
    Layout(**_MOE, model="qwen3-235b-a22b", machine="GB200", devices=256, samples=8192, rate=4916, pipe=8, chunks=3,
           expert=32, assumed="recomputed blocks"),
    Layout(LLAMA_3, "llama-3-405b", "H100-SXM", 8192, 8192, 1, 2048, 170, tensor=8, pipe=16, stage=2,
           attention="flash3", assumed="rate from an MFU of 43 %; 1f1b, no recomputation"),
    Layout(MEGASCALE, "gpt-175b", "A100-80", 2048, 12288, 1, 6144, 161, tensor=8, pipe=8, chunks=6, stage=1,
           assumed="a gated decoder of the same size; full attention"),
)  # fmt: skip


def family(row: Layout) -> str:
    """The rows that are held back or fitted together: one model of one source."""
    return f"{row.source.partition(',')[0]} {row.model}"


def settings(row: Layout) -> dict[str, Any]:
    """The configuration of a row."""
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": row.micro,
        "gradient_accumulation_steps": row.samples // (row.micro * row.data),
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": row.stage},
        "compile": {"enabled": row.fused},
    }
    if row.sequence > 1:
        found["sequence_parallel_size"] = row.sequence
    if row.tensor > 1:
        found["tensor_parallel"] = {"autotp_size": row.tensor, "sequence_parallel": True}
    if row.pipe > 1:
        found["pipeline"] = {"stages": row.pipe}
        if row.chunks > 1:
            found["pipeline"] |= {"schedule": "interleaved", "chunks": row.chunks}
    if row.expert:
        found["expert_parallel"] = {"enabled": True, "autoep_size": row.expert}
    return found


def _selective(folder: str) -> Callable[[], nn.Module]:
    from dsx_plan.models import model_maker  # lazy import: only some rows need it

    def make() -> nn.Module:
        model: Any = model_maker(folder)()
        for layer in model.model.layers:
            layer.forward = some_again(layer.forward)
        return model

    return make


def planned(row: Layout) -> Any:
    """The plan of a row, as `dsx plan FOLDER` makes it."""
    from dsx.planning import plan  # lazy import: a list of rows is read without the engine

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIGS[row.model]), encoding="utf-8")
        return plan(
            _selective(folder) if row.recomputes == "some" else folder, settings(row), world_size=row.devices,
            machine=row.machine, sequence=row.length, recompute=row.recomputes is True, fp8=row.fp8,
            attention=row.attention, changes=False, sliced_loss=row.tensor > 1,
        )  # fmt: skip
