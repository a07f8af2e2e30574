"""Find a function's definition in a long text: an encoder with dense and one with block-sparse attention.

    python packages/dsx-sparse-attn/examples/long_context.py [--length 2048] [--steps 1200] [--tests 300] [--out FOLDER]

The text is real: functions of the Python installation this runs in, concatenated. The question stands in front: the
name of one of them; the answer is the position of its `def` (calls of the function are lures). Both encoders start from
the same weights and see the same batches; they differ in what a token may attend to: everything, or its neighbourhood,
the question, and some random blocks (BigBird). Written: a table of loss, accuracy on texts of functions not trained on
(with the standard error of such a share), CPU time per step and peak memory of a step (Markdown), and a plot of loss
over time (SVG). CPU only, no downloads; nine minutes with one thread.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from dsx_sparse_attn import BigBirdSparsityConfig, block_sparse_attention
from torch import Tensor

VOCABULARY, QUESTION, BLOCK = 8192, 16, 64
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def token(word: str) -> int:
    """A word's number: a hash, stable over runs."""
    return 2 + zlib.crc32(word.encode()) % (VOCABULARY - 2)


DEF = token("def")


def functions(folder: Path, limit: int) -> list[tuple[int, list[int]]]:
    """(name, tokens) of top-level functions whose name's token is unique among them."""
    found: dict[int, list[int]] = {}
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        for source in re.findall(r"^def \w+\(.*?(?=^\S|\Z)", text, re.M | re.S):
            tokens = [token(w) for w in re.findall(r"\w+|[^\w\s]", source)]
            if 30 <= len(tokens) <= 400:
                found.setdefault(tokens[1], tokens)
    return list(found.items())[:limit]


def batches(pool: list[tuple[int, list[int]]], length: int, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """ids [batch, length] and the position of the answer [batch], forever."""
    rng = random.Random(seed)
    while True:
        ids, answers = torch.zeros(batch, length, dtype=torch.long), torch.zeros(batch, dtype=torch.long)
        for row in range(batch):
            text, starts = [1] * QUESTION, []
            while len(text) < length:
                name, tokens = rng.choice(pool)
                if all(name != other for other, _ in starts) and len(text) + len(tokens) <= length:
                    starts.append((name, len(text)))
                    text += tokens
                elif len(text) + len(tokens) > length:
                    text += [0] * (length - len(text))
            wanted, answers[row] = rng.choice(starts)
            text[:QUESTION] = [wanted] * QUESTION
            ids[row] = torch.tensor(text)
        yield ids, answers


class Layer(nn.Module):
    """Pre-norm attention and a small MLP."""

    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width]."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """Tokens and the two before each, layers, and for every position how well it answers the question."""

    def __init__(self, attend: Attend, width: int = 128, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.near = nn.Conv1d(width, width, 3, padding=1)  # word order within a neighbourhood
        self.layers = nn.ModuleList(Layer(width, heads, attend) for _ in range(layers))
        self.norm, self.asked = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [batch, length] -> scores [batch, length]; the question's own positions cannot be the answer."""
        x = self.tokens(ids)
        x = x + self.near(x.transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        question = self.asked(x[:, :QUESTION].mean(1))
        scores = (x @ question.unsqueeze(-1)).squeeze(-1) / x.shape[-1] ** 0.5
        return scores.masked_fill(torch.arange(ids.shape[1]) < QUESTION, float("-inf")).masked_fill(
            ids != DEF, float("-inf")
        )


@dataclass
class Contender:
    """One encoder in training."""

    name: str
    model: Encoder
    optimizer: torch.optim.Optimizer
    seconds: float = 0.0
    curve: list[tuple[float, float]] = field(default_factory=list)  # (seconds so far, loss)
    peak: int = 0
    accuracy: float = 0.0
    doubt: float = 0.0  # standard error of `accuracy`

    def step(self, ids: Tensor, answers: Tensor, rate: float = 1e-3) -> None:
        """One training step, timed in CPU seconds: what else runs on the machine does not count."""
        start = time.process_time()
        self.optimizer.param_groups[0]["lr"] = rate
        loss = F.cross_entropy(self.model(ids), answers)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seconds += time.process_time() - start
        self.curve.append((self.seconds, loss.item()))

    @torch.no_grad()
    def judge(self, tests: list[tuple[Tensor, Tensor]]) -> None:
        """Share of right answers."""
        right = torch.cat([(self.model(ids).argmax(-1) == answers).float() for ids, answers in tests])
        self.accuracy = right.mean().item()
        self.doubt = (self.accuracy * (1 - self.accuracy) / right.numel()) ** 0.5


def memory(run: Callable[[], object]) -> int:
    """Bytes at the highest point of `run` beyond those before it, as the system counts them (0 where it does not)."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        return 0

    def read(key: str) -> int:
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith(key))

    before = read("VmRSS")
    clear.write_text("5")
    run()
    return max(0, read("VmHWM") - before)


def plot(contenders: list[Contender], path: Path) -> None:
    """Loss over training seconds as SVG."""
    width, height, pad = 640, 320, 40
    longest = max(c.seconds for c in contenders)
    highest = max(loss for c in contenders for _, loss in c.curve)
    title = f"loss (0 to {highest:.1f}) over CPU seconds of training (0 to {longest:.0f})"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{pad}" y="20">{title}</text>',
    ]
    for n, (c, colour) in enumerate(zip(contenders, ("#b5532a", "#26547c"))):
        smooth = [
            sum(v for _, v in c.curve[max(0, i - 9) : i + 1]) / len(c.curve[max(0, i - 9) : i + 1])
            for i in range(len(c.curve))
        ]
        points = " ".join(
            f"{pad + (width - 2 * pad) * s / longest:.1f},{height - pad - (height - 2 * pad) * v / highest:.1f}"
            for (s, _), v in zip(c.curve, smooth)
        )
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines.append(f'<text x="{width - 130}" y="{40 + 18 * n}" fill="{colour}">{c.name}</text>')
    path.write_text("\n".join([*lines, "</svg>", ""]))


def contenders(length: int) -> list[Contender]:
    """Dense and sparse, from the same weights."""
    random.seed(0)
    layout = BigBirdSparsityConfig(4, block=BLOCK).make_layout(length)
    kinds: dict[str, Attend] = {
        "dense": F.scaled_dot_product_attention,
        f"sparse ({100 * layout.density:.1f} %)": lambda q, k, v: block_sparse_attention(q, k, v, layout),
    }
    made = []
    for name, attend in kinds.items():
        torch.manual_seed(0)
        model = Encoder(attend)
        made.append(Contender(name, model, torch.optim.AdamW(model.parameters(), lr=1e-3)))
    return made


def learning_rate(step: int, steps: int) -> float:
    """1e-3 after a twentieth of the steps, then down to a twentieth of it along a cosine."""
    warm = max(1, steps // 20)
    if step < warm:
        return 1e-3 * (step + 1) / warm
    return 1e-3 * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))))


def main(argv: list[str] | None = None) -> list[Contender]:
    """Train both, write table and plot; returns them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tests", type=int, default=300, help="texts to judge by")
    parser.add_argument("--out", default="long_context", help="folder for table and plot")
    arguments = parser.parse_args(argv)
    pool = functions(Path(sysconfig.get_paths()["stdlib"]), 2000)
    random.Random(0).shuffle(pool)
    cut = len(pool) * 4 // 5
    train = batches(pool[:cut], arguments.length, arguments.batch, seed=1)
    held_out = batches(pool[cut:], arguments.length, arguments.batch, seed=2)
    pair = contenders(arguments.length)
    ids, answers = next(train)
    for c in pair:
        c.step(ids, answers)
        c.peak = memory(lambda: c.step(ids, answers))  # noqa: B023
        c.seconds, c.curve = 0.0, []
    for step in range(arguments.steps):
        ids, answers = next(train)
        rate = learning_rate(step, arguments.steps)
        for c in pair if step % 2 else reversed(pair):
            c.step(ids, answers, rate)
        if (step + 1) % 25 == 0:
            print(
                f"step {step + 1}: " + ", ".join(f"{c.name} {c.curve[-1][1]:.3f} ({c.seconds:.0f} s)" for c in pair),
                flush=True,
            )
    tests = [next(held_out) for _ in range(max(1, arguments.tests // arguments.batch))]
    lines = [
        "| attention | last 100 losses | right answers, unseen functions | CPU ms per step | "
        "peak memory of a step, MiB |",
        "|---|---|---|---|---|",
    ]
    for c in pair:
        c.judge(tests)
        last = [v for _, v in c.curve[-100:]]
        lines.append(
            f"| {c.name} | {sum(last) / len(last):.3f} | {100 * c.accuracy:.1f} +- {100 * c.doubt:.1f} % | "
            f"{1e3 * c.seconds / len(c.curve):.0f} | {c.peak / 2**20:.0f} |"
        )
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    table = (
        f"{arguments.length} tokens, {arguments.steps} steps, {torch.get_num_threads()} threads\n\n"
        + "\n".join(lines)
        + "\n"
    )
    (folder / "table.md").write_text(table)
    plot(pair, folder / "loss.svg")
    print(table)
    return pair


if __name__ == "__main__":
    main()
