"""One BERT encoder layer, forward and backward: ours, Hugging Face's `BertLayer`, torch's `TransformerEncoderLayer`;
time and bytes kept.

    python packages/dsx-ops/bench/transformer.py [--batch 4] [--sequence 128] [--hidden 768] [--rounds 9]
        [--jobs dropped kept bytes] [--json FILE]

fp32, on the CPU or on the first GPU. Every round runs every contender once, in a new order; medians. "kept": without
dropout, "dropped": 0.1 in all three places. "bytes": what autograd keeps between forward and backward, parameters
apart.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable

import dsx_ops
import torch
from dsx_testkit.results import Table, add_json_option
from torch import Tensor, nn

Make = Callable[[float], nn.Module]


def contenders(hidden: int) -> dict[str, Make]:
    """Layers by name, each made with a dropout ratio; all post-LN with exact GELU."""
    heads, inner = hidden // 64, 4 * hidden

    def ours(**options: bool) -> Make:
        return lambda p: dsx_ops.TransformerLayer(
            dsx_ops.TransformerConfig(
                hidden_size=hidden, heads=heads, num_hidden_layers=12, attn_dropout_ratio=p, hidden_dropout_ratio=p,
                pre_layer_norm=False, gelu_approximate="none", **options,
            )
        )  # fmt: skip

    def torchs(p: float) -> nn.Module:
        return nn.TransformerEncoderLayer(hidden, heads, inner, p, activation="gelu", batch_first=True)

    saving = ("gelu_checkpoint", "attn_dropout_checkpoint", "normalize_invertible")
    found: dict[str, Make] = {
        "dsx TransformerLayer": ours(),
        "dsx TransformerLayer, all recomputed": ours(**dict.fromkeys(saving, True)),
        "torch TransformerEncoderLayer": torchs,
    }
    try:
        from transformers import BertConfig
        from transformers.models.bert.modeling_bert import BertLayer
    except ImportError as error:
        print(f"  (no Hugging Face peer: {error})")
        return found
    for attention in ("eager", "sdpa"):

        def bert(p: float, attention: str = attention) -> nn.Module:
            config = BertConfig(
                hidden_size=hidden, num_attention_heads=heads, intermediate_size=inner,
                hidden_dropout_prob=p, attention_probs_dropout_prob=p
            )  # fmt: skip
            config._attn_implementation = attention
            return BertLayer(config)

        found[f"Hugging Face BertLayer, {attention}"] = bert
    return found


def train_step(layer: nn.Module, x: Tensor) -> None:
    """Forward and backward; waits for the device."""
    y = layer(x)
    (y[0] if isinstance(y, tuple) else y).sum().backward()
    layer.zero_grad()
    if x.is_cuda:
        torch.cuda.synchronize()


def measure(layers: dict[str, nn.Module], x: Tensor, rounds: int) -> dict[str, float]:
    """Median seconds per layer over interleaved rounds."""
    for layer in layers.values():
        train_step(layer, x)
    times: dict[str, list[float]] = {name: [] for name in layers}
    shuffled = random.Random(0)
    for _ in range(rounds):
        for name in shuffled.sample(list(layers), len(layers)):
            start = time.perf_counter()
            train_step(layers[name], x)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def kept_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes of distinct storages that autograd keeps, parameters and the input apart."""
    own = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), x)}
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x)
    return sum(t.untyped_storage().nbytes() for address, t in storages.items() if address not in own)


def main() -> int:
    """Run the jobs and print one Markdown table each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--jobs", nargs="*", choices=["dropped", "kept", "bytes"], default=["dropped", "kept", "bytes"])
    add_json_option(parser)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (options.batch, options.sequence, options.hidden)
    x = torch.randn(shape, device=device, requires_grad=True)
    print(
        f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads, input {shape}, median of"
        f" {options.rounds}"
    )
    makers = contenders(options.hidden)
    for job in options.jobs:
        layers = {name: make(0.0 if job == "kept" else 0.1).to(device).train() for name, make in makers.items()}
        first = next(iter(layers))
        if job == "bytes":
            sizes = {name: kept_bytes(layer, x) for name, layer in layers.items()}
            title = {"layer, dropout 0.1": "", "MiB kept for backward": "{:.1f}", "against ours": "{:.2f}x"}
            table = Table(title, job)
            for name, size in sizes.items():
                table.add(name, size / 2**20, size / sizes[first])
            table.save(options.json)
            continue
        medians = measure(layers, x, options.rounds)
        title = f"layer, dropout {0.0 if job == 'kept' else 0.1}"
        table = Table({title: "", "ms, forward and backward": "{:.1f}", "against ours": "{:.2f}x"}, job)
        for name, took in medians.items():
            table.add(name, took * 1e3, took / medians[first])
        table.save(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
