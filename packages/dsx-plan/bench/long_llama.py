"""How long a sequence of Llama 8B fits on devices of 80 GB: ALST's table by exact accounting, without a device.

    python packages/dsx-plan/bench/long_llama.py [--small] [--rows 0 3] [--json FILE]

The lengths are those that ALST reports for H100 of 80 GB: 500,000 tokens on one device, 3.7 million on 8, 15 million on
32 (Bekman and others, "Arctic Long Sequence Training", 2025). Each row is a plan: the engine is built and trained on
tensors without contents, among ranks that are not there, and its bytes are counted. The model is Hugging Face's Llama:
layers are recomputed and their inputs wait in host memory; norms and MLPs run on one tile of the tokens after the
other; the loss never has all logits; parameters and states are sharded and wait in host memory. Rows "in chunks" are a
quarter longer, and compute one chunk of a layer at a time, whose queries, keys and values wait in host memory too
(`run_in_host_chunks`).

A row fits if the most bytes in use fit beside the reserve of a plan. An allocator with segments of a fixed size holds
more, which stands beside it; ALST runs with expandable segments, and so should such a job. Minutes for a row. `--small`
plans two small layers. Left out: how long a step takes, which at such lengths is attention's.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import dsx_activations
import torch
from dsx_plan import Machine, Plan, plan
from dsx_plan.answer import RESERVE
from dsx_testkit.results import Table, add_json_option
from torch import nn

__all__ = ["ROWS", "Row", "planned"]

TILE, PIECE = 32768, 4096
"""Tokens of a tile of a norm or an MLP, and of a piece of the loss."""
CHUNKS = 16
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A length on a number of devices.

    Attributes:
        devices: all of them share each sequence.
        length: tokens.
        chunked: chunks of a layer wait in host memory.
    """

    devices: int
    length: int
    chunked: bool = False

    def longer(self) -> Row:
        """A quarter more tokens, with chunks in host memory."""
        step = 2 * self.devices
        return replace(self, length=int(1.25 * self.length) // step * step, chunked=True)


ALST = (Row(1, 500_000), Row(8, 3_700_000), Row(32, 15_000_000))
ROWS = (*ALST, *(row.longer() for row in ALST))


class Tiled(nn.Module):
    """A module that treats each token by itself, on one tile of the tokens after the other."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) to the same."""
        return dsx_activations.run_in_tiles(self.inner, x, tiles=-(-x.shape[-2] // TILE))


class Project(nn.Module):
    """What a layer does before its attention."""

    def __init__(self, layer: Any, rotary: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention, self.rotary = layer.input_layernorm, layer.self_attn, rotary

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        x, a = self.norm(x), self.attention
        q, k, v = (p(x).unflatten(-1, (-1, a.head_dim)).transpose(1, 2) for p in (a.q_proj, a.k_proj, a.v_proj))
        return (*apply_rotary_pos_emb(q, k, *self.rotary(x, positions)), v)


class Finish(nn.Module):
    """What a layer does behind its attention."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.out, self.norm, self.mlp = layer.self_attn.o_proj, layer.post_attention_layernorm, Tiled(layer.mlp)

    def forward(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm(x))


class ChunkedLayer(nn.Module):
    """A layer of which one chunk of the sequence is computed at a time."""

    def __init__(self, layer: Any, rotary: nn.Module, length: int) -> None:
        super().__init__()
        self.project, self.finish, self.length = Project(layer, rotary), Finish(layer), length

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return dsx_activations.run_in_host_chunks(
            self.project, self.finish, x, None, chunks=CHUNKS, causal=True, length=self.length
        )


class LongLlama(nn.Module):
    """Hugging Face's Llama with what long sequences need. Its forward gives the loss."""

    def __init__(self, sizes: dict[str, Any], row: Row) -> None:
        super().__init__()
        import transformers

        config = transformers.LlamaConfig(**sizes, max_position_embeddings=row.length, use_cache=False)
        config._attn_implementation = "sdpa"
        self.llama = transformers.LlamaForCausalLM(config)
        layers, rotary = self.llama.model.layers, self.llama.model.rotary_emb
        for number, layer in enumerate(layers):
            if row.chunked:
                layers[number] = ChunkedLayer(layer, rotary, row.length)
            else:
                for name in ("mlp", "input_layernorm", "post_attention_layernorm"):
                    setattr(layer, name, Tiled(getattr(layer, name)))
        setattr(self.llama.model, "norm", Tiled(self.llama.model.norm))  # noqa: B010
        self._recomputes = not row.chunked  # chunks are recomputed by themselves

    def gradient_checkpointing_enable(self) -> None:
        if self._recomputes:
            self.llama.gradient_checkpointing_enable()
            self.llama._set_gradient_checkpointing(True, dsx_activations.checkpoint)

    def forward(self, input_ids: torch.Tensor, shift_labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        hidden = self.llama.model(input_ids=input_ids).last_hidden_state
        return dsx_activations.linear_cross_entropy(
            hidden.flatten(0, 1), self.llama.lm_head.weight, shift_labels.flatten(), chunk=PIECE
        )


def planned(row: Row, machine: Any = "H100-SXM", sizes: dict[str, Any] = LLAMA_8B, **changes: Any) -> Plan:
    """The plan of a row."""
    host = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {"stage": 3, "offload_optimizer": host, "offload_param": host},
        "activation_checkpointing": {"cpu_checkpointing": True},
        **changes,
    }
    if row.devices > 1:
        config["sequence_parallel_size"] = row.devices
        if row.chunked:
            config["sequence_parallel"] = {"convert": False}  # its layers exchange heads by themselves
    tokens = torch.zeros(1, row.length, dtype=torch.int64, device="meta")
    return plan(
        lambda: LongLlama(sizes, row), config, world_size=row.devices, machine=Machine.of(machine), recompute=True,
        batch={"input_ids": tokens, "shift_labels": tokens}, changes=False,
    )  # fmt: skip


SMALL = {**LLAMA_8B, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}


def main() -> None:
    """Plan the rows and print their table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="two small layers, only to see that it runs")
    parser.add_argument("--rows", type=int, nargs="+", default=list(range(len(ROWS))), help="numbers of rows, from 0")
    add_json_option(parser)
    options = parser.parse_args()
    room = int(Machine.of("H100-SXM").memory_bytes * RESERVE)
    gigabytes = {"device GB": "{:.1f}", "held in segments GB": "{:.1f}", "host GB a rank": "{:.0f}"}
    table = Table({"devices": "", "tokens": "{:,}", "chunks on the host": "", **gigabytes, "fits": ""})
    all_fit = True
    for row in [ROWS[number] for number in options.rows]:
        found = planned(row, sizes=SMALL if options.small else LLAMA_8B)
        fits = found.peak_bytes <= room
        all_fit = all_fit and fits
        held = found.peak_bytes + found.fragmentation_bytes
        table.add(
            row.devices, row.length, "yes" if row.chunked else "no", found.peak_bytes / 1e9, held / 1e9,
            found.peak.get("host", 0) / 1e9, "yes" if fits else "no",
        )  # fmt: skip
    table.goal(f"every row fits into {room / 1e9:.1f} GB", "all" if all_fit else "not all", met=all_fit)
    table.save(options.json)


if __name__ == "__main__":
    main()
