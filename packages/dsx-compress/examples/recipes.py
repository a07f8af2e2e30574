"""Three recipes on a small byte-level language model and real text, as a table of quality against size and time.

    python packages/dsx-compress/examples/recipes.py                      # some minutes on two cores
    python packages/dsx-compress/examples/recipes.py --steps 30 --width 32   # a look at what it does

* XTC: half of the layers, int8, ternary or binary weights, learnt from the full model.
* ZeroQuant: int8 and int4 after training, with layer-by-layer distillation.
* Pruning: half of the rows and of the heads, removed, after recovery.

The text is Python's standard library; the loss is the mean cross entropy of a byte on files that were held out.
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from dsx_compress import (
    DistillationLoss,
    PostTrainingConfig,
    Teacher,
    compression_scheduler,
    export_model,
    init_compression,
    is_compressed,
    quantize_post_training,
    redundancy_clean,
    student_initialization,
)
from torch import nn

CONTEXT, BATCH = 64, 16


class Block(nn.Module):
    """Attention with separate projections, as in BERT, and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.dense = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, length, width]."""
        h = self.norm1(x)
        q, k, v = (
            layer(h).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        x = x + self.dense(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Logits of the next byte."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [batch, length] to [batch, length, 256]."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out bytes: every tenth file is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [b"".join(f.read_bytes() for i, f in enumerate(files) if (i % 10 == 9) is held) for held in (False, True)]
    return tuple(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)  # pyright: ignore


def windows(data: torch.Tensor, seed: int, count: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets drawn with a seed."""
    starts = torch.randint(0, len(data) - CONTEXT - 1, (count,), generator=torch.Generator().manual_seed(seed))
    both = torch.stack([data[s : s + CONTEXT + 1] for s in starts.tolist()]).long()
    return both[:, :-1], both[:, 1:]


def task(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of a byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, data: torch.Tensor) -> float:
    """On the same 32 batches for every model."""
    was, _ = model.training, model.eval()
    losses = [task(model(x), y).item() for x, y in (windows(data, 10**6 + i) for i in range(32))]
    model.train(was)
    return sum(losses) / len(losses)


def train(model: nn.Module, data: torch.Tensor, steps: int, lr: float = 1e-3, scheduler: Any = None,
          distillation: DistillationLoss | None = None) -> nn.Module:  # fmt: skip
    """AdamW with a linear fall of the rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        x, y = windows(data, step)
        logits = model(x)
        loss = task(logits, y)
        if distillation is not None:
            loss = distillation(logits, loss, (x,))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model


def dense_size(model: nn.Module) -> int:
    """Bytes of all parameters in fp32."""
    return sum(4 * p.numel() for p in model.parameters())


def packed_size(model: nn.Module, config: Any = None) -> int:
    """Bytes of the exported file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        export_model(model, path, config)
        return path.stat().st_size


def speed(model: nn.Module, data: torch.Tensor) -> float:
    """Milliseconds of a forward pass of 16 windows after clean-up, the best of 10."""
    x, _ = windows(data, 0)
    if is_compressed(model):
        model = redundancy_clean(copy.deepcopy(model), {})
    model.eval()
    best = float("inf")
    with torch.no_grad():
        for _ in range(10):
            start = time.perf_counter()
            model(x)
            best = min(best, time.perf_counter() - start)
    return 1e3 * best


def quantize(bits: int, groups: int) -> dict[str, Any]:
    """All weights of the blocks."""
    return {"weight_quantization": {
        "shared_parameters": {"enabled": True, "quantize_groups": groups, "quantize_weight_in_forward": True},
        "different_groups": {"blocks": {"params": {"start_bits": bits, "target_bits": bits}, "modules": ["layers"]}},
    }}  # fmt: skip


def prune(ratio: float, heads: int, offset: int) -> dict[str, Any]:
    """Rows of the feed-forward networks and heads of the attention."""
    return {
        "row_pruning": {
            "shared_parameters": {"enabled": True, "schedule_offset": offset, "method": "topk"},
            "different_groups": {"rows": {
                "params": {"dense_ratio": ratio}, "modules": ["up"], "related_modules": [["down"]]}},
        },
        "head_pruning": {
            "shared_parameters": {"enabled": True, "schedule_offset": offset, "num_heads": heads},
            "different_groups": {"heads": {
                "params": {"dense_ratio": ratio}, "modules": ["dense"],
                "related_modules": [["query", "key", "value"]]}},
        },
    }  # fmt: skip


def student_of(teacher: nn.Module, build: Callable[[int], nn.Module], layers: int) -> nn.Module:
    """Half of the teacher's layers: every second one."""
    kept = list(range(1, layers, 2))
    return student_initialization(build(len(kept)), teacher, {"layer_reduction": {
        "enabled": True, "keep_number_layer": len(kept), "module_name_prefix": "layers", "teacher_layer": kept,
        "other_module_name": ["tokens", "positions", "norm", "head"]}})  # fmt: skip


def main() -> None:
    """Train the full model, apply each recipe, print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="of the full model; recipes take as many")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    options = parser.parse_args()
    train_text, held = text()

    def build(layers: int = options.layers) -> nn.Module:
        torch.manual_seed(0)
        return Model(options.width, layers, options.heads)

    print(
        "| model | held-out loss | against full | bytes | smaller | forward ms | seconds"
        " |\n|---|---|---|---|---|---|---|"
    )
    start = time.perf_counter()
    full = train(build(), train_text, options.steps)
    base, size = held_out_loss(full, held), dense_size(full)

    def row(name: str, model: nn.Module, bytes_: int, loss: float | None = None) -> None:
        nonlocal start
        loss = held_out_loss(model, held) if loss is None else loss
        print(f"| {name} | {loss:.4f} | {100 * (loss / base - 1):+.2f} % | {bytes_} | {size / bytes_:.1f}x "
              f"| {speed(model, held):.2f} | {time.perf_counter() - start:.0f} |", flush=True)  # fmt: skip
        start = time.perf_counter()

    row("full", full, size, base)
    for bits, name in ((8, "int8"), (2, "ternary"), (1, "binary")):
        student = student_of(full, build, options.layers)
        config = quantize(bits, groups=options.width)
        scheduler = compression_scheduler(init_compression(student, config), config)
        distillation = DistillationLoss(student, Teacher(copy.deepcopy(full)), temperature=1.0, alpha=0.9)
        train(student, train_text, options.steps, scheduler=scheduler, distillation=distillation)
        distillation.remove()
        row(f"XTC: half of the layers, {name}, distilled", student, packed_size(student, config))
    calibration = [windows(train_text, 10**5 + i)[0] for i in range(8)]
    for bits, steps in ((8, 0), (4, 0), (4, 100)):
        model = copy.deepcopy(full)
        how = PostTrainingConfig(
            bits=bits, group_size=min(64, options.width), blocks="layers" if steps else "", steps=steps
        )
        quantize_post_training(model, calibration, how)
        what = f" with {steps} steps for each block" if steps else ""
        row(f"ZeroQuant: int{bits}{what}", model, packed_size(model))
    config = prune(0.5, options.heads, offset=options.steps // 3)
    model = init_compression(copy.deepcopy(full), config)
    train(model, train_text, options.steps, scheduler=compression_scheduler(model, config))
    redundancy_clean(model, config, example=calibration[0])
    row("pruning: half of rows and heads, removed", model, dense_size(model))


if __name__ == "__main__":
    main()
