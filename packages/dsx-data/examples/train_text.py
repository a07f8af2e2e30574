"""Train a GPT or a BERT-like model on real text with each technique, and print what it saves.

    python train_text.py --model gpt                                  # some minutes on two cores
    python train_text.py --model bert --technique layer-drop
    python train_text.py --model gpt --layers 12 --steps 1200         # longer, as large as figures are taken

The text is the source of Python's standard library, as bytes. Techniques:

    none         plain training: what the others are compared with
    ltd          random-LTD: the middle layers see a random part of the tokens, less and less drop
    control      the same number of layer tokens as ltd, but the tokens are missing in all layers
    layer-drop   progressive layer dropping
    curriculum   short sequences first
    budget       lines of unequal length: bucketed batches by tokens, packed rows

Each line gives the loss on text that was not trained on, at full length and with all layers; the layer tokens and
seconds that were spent; and both at the first evaluation whose loss is at most the last loss of `none`. The table at
the end has the means over the seeds, and how many of them reached that loss.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from dsx_data import (
    CurriculumScheduler,
    LoaderOptions,
    PackingCollator,
    ProgressiveLayerDrop,
    RandomLTDScheduler,
    RepeatingLoader,
    TokenBudget,
    TrainingLoader,
    convert_to_layer_drop,
    convert_to_random_ltd,
    lr_factor,
    truncate_batch,
)
from dsx_data.routing import TokenDrop
from torch import nn
from torch.nn import functional as F

TECHNIQUES = ("none", "ltd", "control", "layer-drop", "curriculum", "budget")
VOCABULARY, MASK = 257, 256


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, tokens, width = hidden.shape
        q, k, v = self.qkv(self.norm1(hidden)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attention_mask, is_causal=self.causal and attention_mask is None
        )
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return hidden + self.down(F.gelu(self.up(self.norm2(hidden))))


class Model(nn.Module):
    """A byte-level language model: predicts the next byte (gpt) or the masked ones (bert)."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, options.width)
        self.place = nn.Embedding(options.length, options.width)
        causal = options.model == "gpt"
        self.layers = nn.ModuleList(Block(options.width, options.heads, causal) for _ in range(options.layers))
        self.norm, self.head = nn.LayerNorm(options.width), nn.Linear(options.width, VOCABULARY)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        hidden = self.embed(input_ids) + self.place(position_ids)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), labels.flatten())


def library_text(files: int) -> np.ndarray:
    """Bytes of so many source files of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    chosen = sorted(folder.glob("*.py"))[:files]
    return np.concatenate([np.frombuffer(path.read_bytes(), np.uint8) for path in chosen])


def prepared(rows: torch.Tensor, options: argparse.Namespace, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Arguments of the model from rows of `length` + 1 bytes."""
    positions = torch.arange(rows.shape[1] - 1).expand(len(rows), -1)
    if options.model == "gpt":
        return {"input_ids": rows[:, :-1], "labels": rows[:, 1:].clone(), "position_ids": positions}
    ids = rows[:, :-1]
    hidden = torch.rand(ids.shape, generator=generator) < 0.15
    return {
        "input_ids": ids.masked_fill(hidden, MASK), "labels": ids.masked_fill(~hidden, -100), "position_ids": positions,
    }  # fmt: skip


def without_tokens(batch: dict[str, torch.Tensor], kept: int) -> dict[str, torch.Tensor]:
    """The batch with a random part of its tokens, the same ones in all layers."""
    rows, tokens = batch["input_ids"].shape
    places = torch.rand(rows, tokens).topk(kept, dim=1).indices.sort(dim=1).values
    return {name: value.gather(1, places) for name, value in batch.items()}


@torch.no_grad()
def evaluate(model: Model, rows: torch.Tensor, options: argparse.Namespace) -> float:
    """Mean loss on `rows` at full length and with all layers."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    losses = [float(model(**prepared(part, options, generator))) for part in rows.split(options.batch)]
    model.train()
    return sum(losses) / len(losses)


def lines_loader(text: np.ndarray, options: argparse.Namespace, seed: int) -> TrainingLoader:
    """Batches of whole lines by a budget of tokens, packed into rows."""
    lines = [line[: options.length] for line in np.split(text, np.flatnonzero(text == 10) + 1) if len(line) > 4]
    budget = TokenBudget(
        np.array([len(line) for line in lines]), options.batch * options.length * 9 // 10, order="bucketed"
    )
    packer = PackingCollator(options.length)
    return TrainingLoader(
        lines, LoaderOptions(1, seed=seed, collate_fn=lambda found: (len(found), packer(found)), budget=budget)
    )


def train(technique: str, options: argparse.Namespace, seed: int) -> list[tuple[float, int, float]]:
    """Train; loss, layer tokens and seconds so far at every evaluation."""
    torch.manual_seed(seed)
    text = torch.from_numpy(library_text(options.files).astype(np.int64))
    width = options.length + 1
    rows = text[: len(text) // width * width].view(-1, width)
    held_out, rows = rows[:: len(rows) // 64][:64], rows[torch.arange(len(rows)) % (len(rows) // 64) != 0]
    model = Model(options).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    middle = list(range(1, options.layers - 1))
    schedule = RandomLTDScheduler({
        "total_layer_num": options.layers, "random_ltd_layer_id": middle, "random_ltd_schedule": {
            "min_value": options.length // 4, "max_value": options.length,
            "schedule_config": {"require_steps": max(1, options.steps * 3 // 4), "seq_per_step": 8}},
    }, global_batch_size=options.batch)  # fmt: skip
    lengths = CurriculumScheduler({
        "min_difficulty": options.length // 8, "max_difficulty": options.length, "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": max(1, options.steps // 2), "difficulty_step": 8}})  # fmt: skip
    drop = None
    if technique == "ltd":
        convert_to_random_ltd(model, Block, config=TokenDrop(schedule))
    if technique == "layer-drop":
        drop = convert_to_layer_drop(model, Block, schedule=ProgressiveLayerDrop(0.5, 10 / options.steps), seed=seed)
    packed = technique == "budget"
    if packed:
        loader = RepeatingLoader(lines_loader(text.numpy().astype(np.uint8), options, seed))
    else:
        loader = RepeatingLoader(TrainingLoader(rows, LoaderOptions(options.batch, seed=seed, drop_last=True)))
    generator = torch.Generator().manual_seed(seed)
    spent, seconds, history, base = 0, 0.0, [], 0
    for step in range(options.steps):
        began, factor = time.perf_counter(), 1.0
        if packed:
            samples, batch = next(loader)
            batch.pop("segment_ids")
            batch["labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)  # this model does not shift
            base = base or samples
            factor = lr_factor(samples, base, "sqrt")
        else:
            batch = prepared(next(loader), options, generator)
        if technique == "curriculum":
            _, batch = truncate_batch((), batch, lengths.update_difficulty(step + 1))
        tokens = batch["input_ids"].numel()
        layer_tokens = tokens * options.layers
        if technique in ("ltd", "control"):
            layer_tokens = schedule.layer_tokens(schedule.current_seq)
        if technique == "control":
            batch = without_tokens(batch, layer_tokens // (options.layers * options.batch))
        if drop is not None:
            layer_tokens = tokens * sum(drop.keeps(number) for number in range(options.layers))
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= factor
        model(**batch).backward()
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
        optimizer.zero_grad()
        warm_up.step()
        schedule.update_seq(step + 1)
        if drop is not None:
            drop.update_state(step + 1)
        spent, seconds = spent + layer_tokens, seconds + time.perf_counter() - began
        if (step + 1) % options.every == 0:
            history.append((evaluate(model, held_out, options), spent, seconds))
    return history


Run = tuple[float, float, float, tuple[float, float] | None]
"""Of a technique and seed: change of the loss, layer tokens and seconds saved, and the ratios at equal loss."""

GOALS = {"ltd": ">= 1.5x layer tokens", "layer-drop": ">= 1.5x seconds"}


def summary(runs: dict[str, list[Run]]) -> None:
    """Print the means over the seeds; ratios at equal loss from the least to the greatest."""
    print("\n| technique | seeds | loss against none | layer tokens saved | time saved | reached it"
          " | fewer layer tokens at equal loss | fewer seconds | goal |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for name, found in runs.items():
        ratios = [run[3] for run in found if run[3] is not None]
        spread = [f"{statistics.mean(column):.2f}x ({min(column):.2f} to {max(column):.2f})" for column in zip(*ratios)]
        means = [statistics.mean(column) for column in zip(*(run[:3] for run in found))]
        print(f"| {name} | {len(found)} | {means[0]:+.2%} | {means[1]:.1%} | {means[2]:.1%} | {len(ratios)} of"
              f" {len(found)} | {spread[0] if spread else '-'} | {spread[1] if spread else '-'}"
              f" | {GOALS.get(name, '')} |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt", "bert"), default="gpt")
    parser.add_argument("--technique", choices=("all", *TECHNIQUES), default="all")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations")
    parser.add_argument("--files", type=int, default=60, help="source files of the standard library")
    parser.add_argument("--lr", type=float, default=2e-3)
    options = parser.parse_args()
    if options.steps < options.every:
        parser.error(f"--steps: got {options.steps}, expected at least --every, {options.every}")
    torch.set_num_threads(options.threads)
    chosen = TECHNIQUES if options.technique == "all" else tuple(dict.fromkeys(("none", options.technique)))
    if options.model == "bert":  # packed rows are built for models that predict the next token
        chosen = tuple(name for name in chosen if name != "budget")
    names = f"{'technique':<12}{'seed':>5}{'loss':>9}{'layer tokens':>15}{'seconds':>9}"
    print(f"{names}{'tokens saved':>14}{'time saved':>12}   at the loss of none")
    runs: dict[str, list[Run]] = {name: [] for name in chosen}
    for seed in range(options.seeds):
        target = whole = None
        for technique in chosen:
            history = train(technique, options, seed)
            loss, tokens, seconds = history[-1]
            if target is None or whole is None:
                target, whole = loss, history[-1]
            reached = next((entry for entry in history if entry[0] <= target), None)
            at = "not reached"
            ratios = None if reached is None else (whole[1] / reached[1], whole[2] / reached[2])
            if ratios is not None:
                at = f"{ratios[0]:.2f}x fewer layer tokens, {ratios[1]:.2f}x fewer seconds"
            runs[technique].append((loss / target - 1, 1 - tokens / whole[1], 1 - seconds / whole[2], ratios))
            print(f"{technique:<12}{seed:>5}{loss:>9.4f}{tokens:>15,}{seconds:>9.1f}{1 - tokens / whole[1]:>14.1%}"
                  f"{1 - seconds / whole[2]:>12.1%}   {at}", flush=True)  # fmt: skip
    summary(runs)


if __name__ == "__main__":
    main()
