"""A small byte-level GPT and the text it learns from. Plain PyTorch: nothing in this file knows about dsx.

The model is a decoder of pre-norm blocks with rotary positions and one embedding table that serves input and output.
A byte is a token, so the vocabulary is 256 and the loss divided by ln 2 is bits per byte.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY = 256


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; the defaults have 1.4 million parameters."""

    layers: int = 3
    width: int = 192
    heads: int = 6
    context: int = 128


class Attention(nn.Module):
    """Causal self-attention. B: batch, T: positions, H: heads, E: size of a head, D = H * E: width."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x_BTD.shape
        qkv = self.qkv(x_BTD).view(batch, length, 3, self.heads, width // self.heads)
        q_BHTE, k_BHTE, v_BHTE = qkv.permute(2, 0, 3, 1, 4)
        y_BHTE = F.scaled_dot_product_attention(
            rotate(q_BHTE, cos, sin), rotate(k_BHTE, cos, sin), v_BHTE, is_causal=True
        )
        return self.out(y_BHTE.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then a feed-forward layer; each adds to the stream. dsx gathers and reduces one block at a time."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feed = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD), cos, sin)
        return x_BTD + self.feed(self.norm2(x_BTD))


class GPT(nn.Module):
    """`model(tokens, targets)` is the mean cross entropy in nats; `model(tokens)` are the logits (B, T, 256)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        cos, sin = rotations(config.context, config.width // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # what ends in the stream starts smaller the more layers add to it
                deep = name.endswith(("out.weight", "feed.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5 if deep else 0.02)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        length = tokens_BT.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos, sin)
        logits = self.head(self.norm(x_BTD))
        return logits if targets_BT is None else F.cross_entropy(logits.flatten(0, 1).float(), targets_BT.flatten())


def rotations(length: int, size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (length, size / 2) of the angles by which position t turns the pairs of a head's numbers."""
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(length)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x_BHTE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first half of each head against the second."""
    a, b = x_BHTE.chunk(2, dim=-1)
    cos, sin = cos.to(x_BHTE.dtype), sin.to(x_BHTE.dtype)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, *, length: int, context: int, temperature: float = 0.7, seed: int = 0
) -> bytes:
    """Continue `prompt` by `length` bytes. With a sharded model every rank must call it; all get the same bytes."""
    device = next(model.buffers()).device
    tokens = torch.tensor(list(prompt), device=device)[None]
    dice = torch.Generator().manual_seed(seed)
    for _ in range(length):
        logits = model(tokens[:, -context:])[0, -1].float().cpu()
        choice = torch.multinomial((logits / temperature).softmax(-1), 1, generator=dice)
        tokens = torch.cat((tokens, choice.to(device)[None]), dim=1)
    return bytes(tokens[0].tolist())


class Windows(Dataset):
    """A text as samples of `context` bytes and, as targets, the same shifted by one."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


def load_text(path: Path | None) -> tuple[Tensor, Tensor]:
    """Training and held-out bytes (uint8) of a file, of all text files in a folder, or of Python's own library (None).

    Every twentieth piece is held out, so that both parts cover the whole text.

    Raises:
        ValueError: there is too little text.
    """
    text = b"\n".join(file.read_bytes() for file in text_files(path))
    if len(text) < 100_000:
        raise ValueError(f"--data {path}: got {len(text)} bytes of text, expected at least 100000")
    pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8).split(min(65_536, len(text) // 20))
    held_out = pieces[10::20]
    return torch.cat([p for i, p in enumerate(pieces) if i % 20 != 10]), torch.cat(held_out)


def text_files(path: Path | None) -> Iterator[Path]:
    """The files to learn from, in a fixed order."""
    if path is None:
        library = Path(sysconfig.get_path("stdlib"))
        # Tests are repetitive, and site-packages is not the standard library.
        outside = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        yield from (f for f in sorted(library.rglob("*.py")) if not outside & set(f.relative_to(library).parts))
    elif path.is_dir():
        yield from (f for f in sorted(path.rglob("*")) if f.is_file() and is_text(f))
    elif path.is_file() and is_text(path):
        yield path
    else:
        raise ValueError(f"--data {path}: got no readable text, expected a text file or a folder of text files")


def is_text(file: Path) -> bool:
    """Whether the start of a file looks like text: no zero bytes."""
    with file.open("rb") as stream:
        return b"\0" not in stream.read(8192)
