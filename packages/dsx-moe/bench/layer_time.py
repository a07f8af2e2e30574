"""Time of forward and backward of one layer: dsx-moe, a dense layer of equal active flops, DeepSpeed's MoE layer.

    python packages/dsx-moe/bench/layer_time.py [--tokens 4096 --hidden 512 --experts 8 --repeats 15 --json FILE]

The dense layer has k times the inner size of an expert, so that both need equally many flops per token. All layers run
in turns in one process. The table has medians and their ratios to the dense layer. DeepSpeed's layer is measured if
DeepSpeed can be imported. It runs with capacity factor 1, its default; dsx-moe runs both with that and dropless.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import dsx_comm
import torch
from dsx_moe import MoE, PackedExperts
from dsx_testkit import benches
from dsx_testkit.results import Table, add_json_option
from torch import nn

GOALS = {1: 1.08, 2: 1.10}
"""For each k: the largest ratio to the dense layer's time that a dropless layer may have."""


def feed_forward(hidden: int, inner: int) -> nn.Module:
    """The module that is the dense layer, and each expert."""
    return nn.Sequential(nn.Linear(hidden, inner), nn.GELU(), nn.Linear(inner, hidden))


def deepspeed_layer(args: argparse.Namespace, k: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
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
    return lambda x: layer(x)[0]


def layers_by_name(args: argparse.Namespace, k: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """All layers that are compared."""
    hidden, inner = args.hidden, 4 * args.hidden
    torch.manual_seed(0)
    layers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"dense": feed_forward(hidden, k * inner)}
    for name, options in {"dropless": {"drop_tokens": False}, "capacity 1": {}}.items():
        copies = MoE(hidden, lambda i: feed_forward(hidden, inner), args.experts, k=k, **options)
        packed = MoE(hidden, PackedExperts(args.experts, hidden, inner), args.experts, k=k, **options)
        layers[f"dsx-moe, {name}"] = lambda x, layer=copies: layer(x).output
        layers[f"dsx-moe packed, {name}"] = lambda x, layer=packed: layer(x).output
    of_deepspeed = deepspeed_layer(args, k)
    if of_deepspeed is not None:
        layers["DeepSpeed, capacity 1"] = of_deepspeed
    return layers


def main() -> None:
    """Measure k = 1 and k = 2 and print a table."""
    parser = argparse.ArgumentParser()
    for name, value in {"tokens": 4096, "hidden": 512, "experts": 8, "repeats": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    add_json_option(parser)
    args = parser.parse_args()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29581")
    dsx_comm.init_distributed(dist_backend="gloo")
    table = Table({"k": "", "layer": "", "median ms": "{:.1f}", "/ dense": "{:.3f}"})
    for k in (1, 2):
        layers = layers_by_name(args, k)
        x = torch.randn(1, args.tokens, args.hidden, requires_grad=True)
        times: dict[str, list[float]] = {name: [] for name in layers}
        for turn in range(args.repeats + 2):
            for name, layer in layers.items():
                began = time.perf_counter()
                layer(x).square().mean().backward()
                if turn >= 2:  # the first two turns warm up
                    times[name].append(time.perf_counter() - began)
        dense = statistics.median(times["dense"])
        for name, spent in times.items():
            table.add(k, name, statistics.median(spent) * 1e3, statistics.median(spent) / dense)
        most = GOALS[k]
        for name in (name for name in times if name.startswith("dsx-moe") and name.endswith("dropless")):
            ratio = statistics.median(times[name]) / dense
            table.goal(f"{name}, k = {k}, at most {most} of dense", f"{ratio:.3f}", met=ratio <= most)
        if "DeepSpeed, capacity 1" in times:
            ratio = statistics.median(times["DeepSpeed, capacity 1"]) / statistics.median(times["dsx-moe, capacity 1"])
            table.goal(f"k = {k}: at least 1.5x DeepSpeed's layer", f"{ratio:.2f}x", met=ratio >= 1.5)
    table.save(args.json)


if __name__ == "__main__":
    main()
