"""How much states in few bits cost in loss: a byte-level language model on the standard library's sources, trained
with both.

    python packages/dsx-ops/bench/loss_gap.py [--optimizer Adam4bit] [--steps 600] [--seeds 2] [--json FILE]

Same model, data and seeds for torch's AdamW and for the optimizer; the validation losses at the end are compared (goal:
at most 0.3 % apart).
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path

import dsx_ops
import torch
from dsx_testkit.results import Table, add_json_option
from torch import Tensor, nn

CONTEXT, WIDTH, LAYERS = 64, 96, 2
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam8bit": dsx_ops.Adam8bit,
    "Adam4bit": dsx_ops.Adam4bit,
    "bf16 states": partial(dsx_ops.FusedAdam, state_dtype=torch.bfloat16, stochastic_rounding=True),
    "bf16 states, to nearest": partial(dsx_ops.FusedAdam, state_dtype=torch.bfloat16),
}


class Model(nn.Module):
    """Two causal transformer layers over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy of predicting y from x, both [batch, context]."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        hidden = self.layers(self.tokens(x) + self.places.weight, mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def corpus() -> Tensor:
    """Two million bytes of Python sources."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(p.read_bytes() for p in sorted(folder.glob("*.py")))[:2_000_000]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch(data: Tensor, generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    """Random stretches of the data, and the same one byte later."""
    starts = torch.randint(len(data) - CONTEXT - 1, (size, 1), generator=generator)
    at = starts + torch.arange(CONTEXT)
    return data[at], data[at + 1]


def train(make: Callable[..., torch.optim.Optimizer], data: Tensor, steps: int, seed: int) -> float:
    """Validation loss after `steps` steps."""
    torch.manual_seed(seed)
    model, generator = Model(), torch.Generator().manual_seed(seed)
    optimizer = make(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, cycle_momentum=False)
    split = len(data) * 9 // 10
    for _ in range(steps):
        optimizer.zero_grad()
        model(*batch(data[:split], generator, 16)).backward()
        optimizer.step()
        schedule.step()
    fixed = torch.Generator().manual_seed(1234)
    with torch.no_grad():
        return sum(model(*batch(data[split:], fixed, 64)).item() for _ in range(8)) / 8


def main() -> int:
    """Print the losses and the gap."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="Adam8bit")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=2)
    add_json_option(parser)
    options = parser.parse_args()
    data, gaps = corpus(), []
    table = Table({"seed": "", "AdamW": "{:.4f}", options.optimizer: "{:.4f}", "gap": "{:+.2f} %"})
    for seed in range(options.seeds):
        exact = train(torch.optim.AdamW, data, options.steps, seed)
        coarse = train(OPTIMIZERS[options.optimizer], data, options.steps, seed)
        gaps.append(coarse / exact - 1)
        table.add(seed, exact, coarse, 100 * gaps[-1])
    mean = sum(gaps) / len(gaps)
    table.goal("a mean gap of at most +0.30 %", f"{mean:+.2%}", met=mean <= 0.003)
    table.save(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
