"""What the examples share: real text, small language models, training, and tables of quality against size and time.

The text is Python's standard library, as bytes; every tenth file is held out. A model predicts the next byte ("gpt") or
the bytes that were masked ("bert"); its loss is the mean cross entropy of a byte on held-out text, the same batches for
every model.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from dsx_compress import DistillationLoss, compression_report, export_model, redundancy_clean, student_initialization
from dsx_compress.apply import is_compressed
from torch import nn

CONTEXT, BATCH, VOCABULARY, MASK = 64, 16, 257, 256


class Block(nn.Module):
    """Attention with separate projections, as in BERT, and a feed-forward network."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.dense = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, length, width]."""
        h = self.norm1(x)
        q, k, v = (
            layer(h).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.dense(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Logits of a byte at every place."""

    def __init__(self, width: int, layers: int, heads: int, kind: str = "gpt") -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Block(width, heads, kind == "gpt") for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [batch, length] to [batch, length, vocabulary]."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def task(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of a byte; targets of -100 do not count."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Text:
    """Training and held-out bytes, as windows drawn with a seed."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        for name, held in (("trained", False), ("held", True)):
            part = b"".join(f.read_bytes() for i, f in enumerate(files) if (i % 10 == 9) is held)
            setattr(self, name, torch.frombuffer(bytearray(part), dtype=torch.uint8))

    def windows(self, seed: int, *, held: bool = False, count: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets [count, CONTEXT]."""
        data = self.held if held else self.trained  # type: ignore[attr-defined]
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(0, len(data) - CONTEXT - 1, (count,), generator=generator)
        both = torch.stack([data[s : s + CONTEXT + 1] for s in starts.tolist()]).long()
        if self.kind == "gpt":
            return both[:, :-1], both[:, 1:]
        ids = both[:, :-1]
        hidden = torch.rand(ids.shape, generator=generator) < 0.15
        return ids.masked_fill(hidden, MASK), ids.masked_fill(~hidden, -100)


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Text) -> float:
    """On the same 32 batches for every model."""
    was, _ = model.training, model.eval()
    losses = [task(model(x), y).item() for x, y in (text.windows(10**6 + i, held=True) for i in range(32))]
    model.train(was)
    return sum(losses) / len(losses)


def train(model: nn.Module, text: Text, steps: int, *, seed: int, lr: float = 1e-3, scheduler: Any = None,
          distillation: DistillationLoss | None = None) -> nn.Module:  # fmt: skip
    """AdamW with a linear fall of the rate."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        x, y = text.windows(1000 * steps * seed + step)
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


def student_of(teacher: nn.Module, build: Callable[[int], nn.Module], kept: list[int]) -> nn.Module:
    """A student that begins with some of the teacher's layers."""
    return student_initialization(build(len(kept)), teacher, {"layer_reduction": {
        "enabled": True, "keep_number_layer": len(kept), "module_name_prefix": "layers", "teacher_layer": kept,
        "other_module_name": ["tokens", "positions", "norm", "head"]}})  # fmt: skip


def dense_size(model: nn.Module) -> int:
    """Bytes of all parameters in fp32."""
    return sum(4 * p.numel() for p in model.parameters())


def packed_size(model: nn.Module, config: Any = None) -> int:
    """Bytes of the exported file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        export_model(model, path, config)
        return path.stat().st_size


@torch.no_grad()
def milliseconds(models: list[nn.Module], text: Text, repeats: int = 15) -> list[float]:
    """Of a forward pass of 16 windows after clean-up, each model's best; the models take turns."""
    x, _ = text.windows(0)
    ready = [redundancy_clean(copy.deepcopy(model), {}) if is_compressed(model) else model for model in models]
    best = [float("inf")] * len(ready)
    for _ in range(repeats):
        for place, model in enumerate(ready):
            model.eval()
            start = time.perf_counter()
            model(x)
            best[place] = min(best[place], time.perf_counter() - start)
    return [1e3 * seconds for seconds in best]


@dataclass
class Table:
    """A row for each recipe and seed, printed as it is made, and the means over seeds with the goals.

    Attributes:
        goals: for a recipe, the greatest rise of the loss over the full model's in percent.
    """

    text: Text
    goals: dict[str, float]
    reports: Path | None = None
    _rows: dict[str, list[tuple[float, float, float, float]]] = field(default_factory=dict)

    def begin(self, full: nn.Module, seed: int) -> None:
        """Print the row of a full model; the following rows are compared with it."""
        self._full, self._seed = full, seed
        self._base, self._bytes, self._start = held_out_loss(full, self.text), dense_size(full), time.perf_counter()
        if not self._rows and not hasattr(self, "_header"):
            self._header = True
            print("| recipe | seed | held-out loss | against full | bytes | smaller | forward ms | faster | seconds |")
            print("|---|---|---|---|---|---|---|---|---|")
        print(f"| full | {seed} | {self._base:.4f} | | {self._bytes} | 1.0x | | 1.00x | |", flush=True)

    def add(self, recipe: str, model: nn.Module, size: int) -> None:
        """Print the row of a recipe's model."""
        loss, (old, new) = held_out_loss(model, self.text), milliseconds([self._full, model], self.text)
        rise, seconds = 100 * (loss / self._base - 1), time.perf_counter() - self._start
        self._rows.setdefault(recipe, []).append((rise, self._bytes / size, old / new, seconds))
        print(f"| {recipe} | {self._seed} | {loss:.4f} | {rise:+.2f} % | {size} | {self._bytes / size:.1f}x | {new:.2f}"
              f" | {old / new:.2f}x | {seconds:.0f} |", flush=True)  # fmt: skip
        self._start = time.perf_counter()

    def report(self, recipe: str, model: nn.Module) -> None:
        """Write what was compressed as text and as a picture, if a folder was asked for; before clean-up."""
        if self.reports is None:
            return
        self.reports.mkdir(parents=True, exist_ok=True)
        stem = self.reports / recipe.replace(" ", "_").replace(",", "").replace("+", "and")
        found = compression_report(model)
        stem.with_suffix(".txt").write_text(found.text() + "\n")
        found.write_svg(stem.with_suffix(".svg"))

    def finish(self) -> None:
        """Print the means over the seeds."""
        print("\n| recipe | seeds | against full, mean (least to greatest) | goal | smaller | faster |")
        print("|---|---|---|---|---|---|")
        for recipe, rows in self._rows.items():
            rises = [row[0] for row in rows]
            goal = f"<= {self.goals[recipe]:g} %" if recipe in self.goals else ""
            print(f"| {recipe} | {len(rows)} | {statistics.mean(rises):+.2f} % ({min(rises):+.2f} to {max(rises):+.2f})"
                  f" | {goal} | {statistics.mean(r[1] for r in rows):.1f}x"
                  f" | {statistics.mean(r[2] for r in rows):.2f}x |")  # fmt: skip


def arguments(description: str, **defaults: Any) -> argparse.Namespace:
    """The options of an example; `defaults` are numbers by name, and `model`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt", "bert"), default=defaults.pop("model", "gpt"))
    parser.add_argument("--report", type=Path, default=None, help="folder for reports and pictures of the models")
    parser.add_argument("--threads", type=int, default=2)
    for name, value in {"seeds": 3, "width": 128, "layers": 4, "heads": 4, **defaults}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    found = parser.parse_args()
    torch.set_num_threads(found.threads)
    return found


def builder(options: argparse.Namespace, seed: int) -> Callable[..., nn.Module]:
    """Builds models of so many layers with a seed's values."""

    def build(layers: int = options.layers) -> nn.Module:
        torch.manual_seed(seed)
        return Model(options.width, layers, options.heads, options.model)

    return build
