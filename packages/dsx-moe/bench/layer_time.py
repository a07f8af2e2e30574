"""Time of forward and backward of one layer: dsx-moe, a dense layer of equal active flops, DeepSpeed's MoE layer.

    python packages/dsx-moe/bench/layer_time.py [--precision bf16] [--tokens 4096 --hidden 512] [--json FILE]

The dense layer has k times the inner size of an expert, so that both need equally many flops per token. All layers run
in turns in one process of one thread, so that there is no transport. There is a table for fp32 and one for bf16 (all
weights and tokens), with medians, their ratios to the dense layer, and how many times as long DeepSpeed's layer takes;
rows that it beats come first. It is measured if DeepSpeed can be imported, with capacity factor 1, its default; dsx-moe
runs both with that and dropless.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import dsx_comm
import torch
from dsx_moe import MoE, PackedExperts
from dsx_testkit import benches
from dsx_testkit.benches import PRECISIONS, losers_first
from dsx_testkit.results import Table, add_json_option
from torch import nn

PEER = "DeepSpeed, capacity 1"
GOALS = {1: 1.08, 2: 1.10}
"""For each k: the largest ratio to the dense layer's time that a dropless layer may have."""


def feed_forward(hidden: int, inner: int) -> nn.Module:
    """The module that is the dense layer, and each expert."""
    return nn.Sequential(nn.Linear(hidden, inner), nn.GELU(), nn.Linear(inner, hidden))


def deepspeed_layer(args: argparse.Namespace, k: int) -> nn.Module | None:
    """DeepSpeed's layer; None where it is not installed."""
    try:
        deepspeed = benches.deepspeed()
        from deepspeed.moe.layer import MoE as DeepSpeedMoE  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        print(f"DeepSpeed is left out: {error}")
        return None
    deepspeed.init_distributed(dist_backend="gloo")
    layer = DeepSpeedMoE(args.hidden, feed_forward(args.hidden, 4 * args.hidden), args.experts, k=k)
    layer.set_deepspeed_parallelism()
    return layer


def layers_by_name(args: argparse.Namespace, k: int, dtype: torch.dtype) -> dict[str, nn.Module]:
    """All layers that are compared. Their output is a tensor, or begins with one."""
    hidden, inner = args.hidden, 4 * args.hidden
    torch.manual_seed(0)
    layers: dict[str, nn.Module] = {"dense": feed_forward(hidden, k * inner)}
    for name, options in {"dropless": {"drop_tokens": False}, "capacity 1": {}}.items():
        copies = MoE(hidden, lambda i: feed_forward(hidden, inner), args.experts, k=k, **options)
        packed = MoE(hidden, PackedExperts(args.experts, hidden, inner), args.experts, k=k, **options)
        layers |= {f"dsx-moe, {name}": copies, f"dsx-moe packed, {name}": packed}
    if (of_deepspeed := deepspeed_layer(args, k)) is not None:
        layers[PEER] = of_deepspeed
    return {name: layer.to(dtype) for name, layer in layers.items()}


def medians(args: argparse.Namespace, k: int, dtype: torch.dtype) -> dict[str, float]:
    """Seconds of forward and backward by layer."""
    layers = layers_by_name(args, k, dtype)
    x = torch.randn(1, args.tokens, args.hidden, dtype=dtype, requires_grad=True)
    times: dict[str, list[float]] = {name: [] for name in layers}
    for turn in range(args.repeats + 2):
        for name, layer in layers.items():
            began = time.perf_counter()
            out = layer(x)
            (out[0] if isinstance(out, tuple) else out).square().mean().backward()
            if turn >= 2:  # the first two turns warm up
                times[name].append(time.perf_counter() - began)
            layer.zero_grad()
            x.grad = None
    return {name: statistics.median(spent) for name, spent in times.items()}


def measured(args: argparse.Namespace, precision: str) -> Table:
    """The table of a precision."""
    table = Table(
        {"k": "", "layer": "", "median ms": "{:.1f}", "/ dense": "{:.3f}", "DeepSpeed takes": "{:.2f}x"},
        "" if precision == "fp32" else precision,
    )
    for k, most in GOALS.items():
        found = medians(args, k, torch.float32 if precision == "fp32" else torch.bfloat16)
        dense, peer = found["dense"], found.get(PEER)
        rows = [
            (k, name, spent * 1e3, spent / dense, peer / spent if peer and name.startswith("dsx") else None)
            for name, spent in found.items()
        ]
        for row in losers_first(rows, 4):
            table.add(*row)
        for name in (name for name in found if name.startswith("dsx-moe") and name.endswith("dropless")):
            ratio = found[name] / dense
            text = f"{precision}: {name}, k = {k}, at most {most} of dense"
            table.goal(text, f"{ratio:.3f}", met=ratio <= most)
        if peer:
            ratio = peer / found["dsx-moe, capacity 1"]
            table.goal(f"{precision}: k = {k}: at least 1.3x DeepSpeed's layer", f"{ratio:.2f}x", met=ratio >= 1.3)
    return table


def main() -> None:
    """Measure k = 1 and k = 2 in each precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"tokens": 4096, "hidden": 512, "experts": 8, "repeats": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--precision", choices=PRECISIONS, help="default: both")
    add_json_option(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29581")
    dsx_comm.init_distributed(dist_backend="gloo")
    for precision in [args.precision] if args.precision else PRECISIONS:
        measured(args, precision).save(args.json)


if __name__ == "__main__":
    main()
