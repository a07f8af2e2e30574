"""Models that others report to train with states in host memory and on disk: what `planner.py claims` goes over.

Layers and widths are those of the papers; the model is a gated decoder with as many parameters in each block (12 times
the square of its width).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CLAIMS", "Claim", "in_folder", "llama"]

HOST, DISK = {"device": "cpu", "pin_memory": True}, {"device": "nvme", "nvme_path": "/nvme"}


def llama(width: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    """A configuration of Llama's layout with eight key heads, or as many as there are."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 8 if heads % 8 == 0 else heads, "vocab_size": 128256, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }  # fmt: skip


def gpt(width: int, layers: int, heads: int) -> dict[str, Any]:
    """As many parameters in a block as GPT-2's layout has, and its vocabulary."""
    inner = -(-8 * width // 3 // 64) * 64
    return {**llama(width, inner, layers, heads), "num_key_value_heads": heads, "vocab_size": 50304}


@contextmanager
def in_folder(text: dict[str, Any]) -> Iterator[str]:
    """A folder with this configuration."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(text), encoding="utf-8")
        yield folder


@dataclass(frozen=True)
class Claim:
    """A model that somebody trains.

    Attributes:
        source: who says so.
        words: the claim.
        model: a configuration of Hugging Face's format.
        machine, devices: of the planner's table, and how many.
        micro: samples of a micro-batch.
        zero: the section `zero_optimization`.
        teraflops: published operations per second of a device, in 10^12; 0: none.
    """

    source: str
    words: str
    model: dict[str, Any]
    machine: str
    devices: int
    micro: int
    zero: dict[str, Any]
    teraflops: float = 0.0

    def planned(self) -> Any:
        """Its plan: recomputed blocks, 1024 tokens, fp16."""
        from dsx.planning import plan  # lazy import: a list of rows is read without the engine

        config = {
            "train_micro_batch_size_per_gpu": self.micro,
            "fp16": {"enabled": True},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
            "zero_optimization": self.zero,
        }
        with in_folder(self.model) as folder:
            return plan(
                folder, config, world_size=self.devices, machine=self.machine, sequence=1024, recompute=True,
                changes=False, alike=True,
            )  # fmt: skip


_OFFLOAD, _INFINITY = "ZeRO-Offload (arXiv 2101.06840)", "ZeRO-Infinity (arXiv 2104.07857)"
CLAIMS = (
    Claim(_OFFLOAD, "10B on one V100", gpt(4096, 50, 32), "V100-32", 1, 16,
          {"stage": 2, "offload_optimizer": HOST}, 40.0),
    Claim(_OFFLOAD, "13B on one V100", gpt(4096, 65, 32), "V100-32", 1, 4, {"stage": 2, "offload_optimizer": HOST}),
    Claim(_INFINITY, "1T on one DGX-2", gpt(25600, 128, 256), "V100-32", 16, 1,
          {"stage": 3, "offload_optimizer": DISK, "offload_param": DISK}),
)  # fmt: skip
