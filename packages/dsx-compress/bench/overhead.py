"""What fake quantisation costs in a training step: parametrised weights beside replaced layers.

    python packages/dsx-compress/bench/overhead.py [--width 512] [--rounds 15] [--threads 2] [--json FILE]

"replaced" is the idea of DeepSpeed's compression library: a layer class of its own whose forward quantises its weight.
With `deepspeed==0.19.6` installed its own `LinearLayer_Compress` is measured as well. Goal: <= 1.10x of the plain step.
Rounds are interleaved; medians.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from dsx_compress import compression_scheduler, init_compression
from dsx_testkit.results import Table, add_json_option
from torch import nn


class Block(nn.Module):
    """A feed-forward network with attention's four projections in front."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 8, batch_first=True)
        self.mix, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, length, width]."""
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.mix(x))))


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        scale = 2 * x.abs().max() / 256
        return (x / scale).round().clamp(-128, 127) * scale

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class ReplacedLinear(nn.Linear):
    """Quantises its weight in forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As `nn.Linear`."""
        return F.linear(input, _Rounded.apply(self.weight), self.bias)  # pyright: ignore


def replaced(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """Every plain linear layer replaced."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, make(child))
    return model


def own(layer: nn.Linear) -> nn.Module:
    """A `ReplacedLinear` with the same parameters."""
    new = ReplacedLinear(layer.in_features, layer.out_features)
    new.weight, new.bias = layer.weight, layer.bias
    return new


def deepspeed_layer() -> Callable[[nn.Linear], nn.Module] | None:
    """DeepSpeed's own layer, where it is installed."""
    try:
        from deepspeed.compression.basic_layer import LinearLayer_Compress  # pyright: ignore
    except ImportError:
        return None

    def make(layer: nn.Linear) -> nn.Module:
        new = LinearLayer_Compress(layer.in_features, layer.out_features, bias=True)
        new.weight, new.bias = layer.weight, layer.bias
        new.enable_weight_quantization(8, 8, 1, True, "symmetric", 1)
        new.weight_quantization_enabled = True
        return new

    return make


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block(options.width) for _ in range(4)))
    config = {"weight_quantization": {
        "shared_parameters": {"enabled": True, "quantize_weight_in_forward": True},
        "different_groups": {"g": {"modules": ["mix", "up", "down"]}}}}  # fmt: skip
    parametrised = init_compression(copy.deepcopy(plain), config)
    compression_scheduler(parametrised, config)
    systems = {"plain": plain, "dsx-compress": parametrised, "replaced": replaced(copy.deepcopy(plain), own)}
    if (make := deepspeed_layer()) is not None:
        systems["DeepSpeed"] = replaced(copy.deepcopy(plain), make)
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-4) for name, model in systems.items()}
    x = torch.randn(options.batch, options.length, options.width)
    times: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(options.rounds + 2):
        for name, model in systems.items():
            start = time.perf_counter()
            optimizers[name].zero_grad()
            model(x).square().mean().backward()
            optimizers[name].step()
            times[name].append(time.perf_counter() - start)
    table = Table({"system": "", "ms per step": "{:.1f}", "against plain": "{:.3f}x"})
    ratios = {}
    for name, measured in times.items():
        ratios[name] = median(b / a for a, b in zip(times["plain"][2:], measured[2:]))
        table.add(name, 1e3 * median(measured[2:]), ratios[name])
    ours = ratios["dsx-compress"]
    table.goal("dsx-compress at most 1.10x of the plain step", f"{ours:.3f}x", met=ours <= 1.10)
    table.save(options.json)


if __name__ == "__main__":
    main()
