"""Tiny models, deterministic for a seed: the ordinary ones and the oddities that sharding has to survive.

Every class takes `seed` and draws its weights from a generator of its own, so that ranks agree whatever the global
generator has done before. `example(batch)` gives a fixed input (and target) drawn from the same seed.
"""

from itertools import pairwise
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def _reset(module: nn.Module, seed: int) -> None:
    """Fill all parameters from a generator seeded with `seed`: scaled normal for matrices, near 1 / 0 for vectors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if parameter.dim() > 1:
                noise *= parameter.shape[-1] ** -0.5
            else:
                noise = noise * 0.1 + (1.0 if name.endswith("norm.weight") else 0.0)
            parameter.copy_(noise)


class _Regression(nn.Module):
    """Base of the models that map (batch, width) floats to (batch, out) floats."""

    width: int
    out: int
    seed: int

    def example(self, batch: int = 4, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Input (batch, width) and target (batch, out), float32."""
        generator = torch.Generator().manual_seed(10_000 * (self.seed + 1) + seed)
        x = torch.randn(batch, self.width, generator=generator)
        return x, torch.randn(batch, self.out, generator=generator)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean squared error in float32."""
        return F.mse_loss(self(x).float(), y.float())


class MLP(_Regression):
    """Linear layers with GELU between them, in a ModuleList named `layers`."""

    def __init__(
        self, width: int = 8, hidden: int = 16, out: int = 4, depth: int = 3, *, bias: bool = True, seed: int = 0
    ):
        super().__init__()
        self.width, self.out, self.seed = width, out, seed
        sizes = [width, *[hidden] * (depth - 1), out]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in pairwise(sizes))
        _reset(self, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return self.layers[-1](x)


class SkippingMLP(MLP):
    """An `MLP` of at least three layers that leaves out its second one where a caller says so."""

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        for index, layer in enumerate(self.layers[:-1]):
            if not (skip and index == 1):
                x = F.gelu(layer(x))
        return self.layers[-1](x)


class _Block(nn.Module):
    """Pre-norm transformer block with causal attention: (batch, time, width) to the same."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class TinyGPT(nn.Module):
    """A decoder over `vocab` tokens with a ModuleList `blocks`; `tied` shares the embedding with the output layer."""

    def __init__(
        self, vocab: int = 32, width: int = 16, layers: int = 2, heads: int = 2, context: int = 16, *,
        tied: bool = True, seed: int = 0
    ):  # fmt: skip
        super().__init__()
        self.vocab, self.context, self.seed = vocab, context, seed
        self.embedding = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        _reset(self, seed)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, time, vocab) of integer tokens (batch, time)."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in float32."""
        return F.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten())

    def example(self, batch: int = 2, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and next tokens, each (batch, context) int64."""
        generator = torch.Generator().manual_seed(10_000 * (self.seed + 1) + seed)
        text = torch.randint(self.vocab, (batch, self.context + 1), generator=generator)
        return text[:, :-1], text[:, 1:]


class Tied(_Regression):
    """Two layers in different children share one weight (and the second has a bias of its own)."""

    def __init__(self, width: int = 6, *, seed: int = 0):
        super().__init__()
        self.width = self.out = width
        self.seed = seed
        first = nn.Linear(width, width, bias=False)
        self.encoder = nn.Sequential(first, nn.Tanh())
        self.middle = nn.Linear(width, width)
        self.decoder = nn.Linear(width, width)
        self.decoder.weight = first.weight
        _reset(self, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.tanh(self.middle(self.encoder(x))))


class Reused(_Regression):
    """One block is used `times` times in a step, between two ordinary layers."""

    def __init__(self, width: int = 6, times: int = 3, *, seed: int = 0):
        super().__init__()
        self.width = self.out = width
        self.seed, self.times = seed, times
        self.first = nn.Linear(width, width)
        self.shared = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.last = nn.Linear(width, width)
        _reset(self, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = x + self.shared(x)
        return self.last(x)


class Frozen(_Regression):
    """A frozen layer between trainable ones (gradients must pass through), a frozen first layer, a frozen bias."""

    def __init__(self, width: int = 6, *, seed: int = 0):
        super().__init__()
        self.width = self.out = width
        self.seed = seed
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        _reset(self, seed)
        self.layers[0].requires_grad_(False)
        self.layers[2].requires_grad_(False)
        self.layers[3].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Unused(_Regression):
    """Branch `i` is used by ranks with `rank % branches == i` only; `never` is used by none.

    `rank=None` uses all branches at once, each on the rows it would have got: with the inputs of all ranks
    concatenated in order this is the single-process oracle (`rows` is the number of rows per rank).
    """

    def __init__(self, rank: int | None, width: int = 6, branches: int = 2, *, rows: int = 4, seed: int = 0):
        super().__init__()
        self.width = self.out = width
        self.seed, self.rank, self.rows = seed, rank, rows
        self.trunk = nn.Linear(width, width)
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(branches))
        self.never = nn.Linear(width, 3)
        self.last = nn.Linear(width, width)
        _reset(self, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.trunk(x))
        if self.rank is not None:
            return self.last(torch.tanh(self.branches[self.rank % len(self.branches)](x)))
        parts = [self.branches[r % len(self.branches)](rows) for r, rows in enumerate(x.split(self.rows))]
        return self.last(torch.tanh(torch.cat(parts)))


class OddSizes(_Regression):
    """Sizes below the world size, primes, an empty parameter, and a scalar (0-dim) one."""

    def __init__(self, *, seed: int = 0):
        super().__init__()
        self.width, self.out, self.seed = 5, 1, seed
        self.prime = nn.Linear(5, 7)
        self.narrow = nn.Linear(7, 1, bias=True)
        self.scale = nn.Parameter(torch.empty(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.pair = nn.Parameter(torch.empty(2))
        _reset(self, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.narrow(torch.tanh(self.prime(x)))
        return y * (1.0 + self.scale) + self.pair.sum() + self.empty.sum()


class ResidualBlock(nn.Module):
    """`x + down(relu(up(x)))`: a block of four parameters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Residual(nn.Module):
    """Blocks `x + tanh(linear(x))` in a ModuleList named `blocks`. `model(x)` is the loss: the mean square, in float32.

    Args:
        aside: there is a layer `aside` behind the blocks, which takes part as the attribute `uses_aside` says.
        uneven: two blocks share their weight, and another one has a frozen bias (needs five blocks).
        dtype: of the parameters and of `batch`.
    """

    def __init__(
        self, width: int = 24, depth: int = 6, *,
        aside: bool = False, uneven: bool = False, dtype: torch.dtype = torch.float32, seed: int = 3
    ):  # fmt: skip
        super().__init__()
        self.width, self.dtype = width, dtype
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.aside = nn.Linear(width, width) if aside else None
        self.uses_aside: Literal["no", "weight", "all"] = "no"
        if uneven:
            self.blocks[1].weight = self.blocks[4].weight
            self.blocks[2].bias.requires_grad_(False)
        _reset(self, seed)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        if self.aside is not None and self.uses_aside == "all":
            x = x + self.aside(x)
        elif self.aside is not None and self.uses_aside == "weight":
            x = x + F.linear(x, self.aside.weight)
        return x.float().square().mean()

    def batch(self, rank: int, step: int) -> torch.Tensor:
        """The input (4, width) of a rank in a step."""
        generator = torch.Generator().manual_seed(100 * step + rank)
        return torch.randn(4, self.width, generator=generator).to(self.dtype)


class TwoGroups(MLP):
    """An MLP whose `groups()` gives two optimizer groups: matrices with weight decay, vectors without and another
    lr.
    """

    def groups(self, lr: float = 1e-2) -> list[dict]:
        """Parameter groups for a torch optimizer."""
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() <= 1]
        return [
            {"params": matrices, "weight_decay": 0.1, "lr": lr},
            {"params": vectors, "weight_decay": 0.0, "lr": 2 * lr},
        ]


class MixedDtypes(_Regression):
    """fp32 layers around a layer of `low` (bfloat16 by default), with explicit casts in forward."""

    def __init__(self, width: int = 6, *, low: torch.dtype = torch.bfloat16, seed: int = 0):
        super().__init__()
        self.width = self.out = width
        self.seed = seed
        self.first = nn.Linear(width, width)
        self.low = nn.Linear(width, width, dtype=low)
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, width)
        _reset(self, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = self.low(x.to(self.low.weight.dtype)).to(x.dtype)
        return self.last(self.norm(x))


class Checkpointed(_Regression):
    """Blocks under activation checkpointing, the last of which is the first one again (a shared module)."""

    def __init__(self, *, reentrant: bool, width: int = 6, depth: int = 3, seed: int = 0):
        super().__init__()
        self.width = self.out = width
        self.seed, self.reentrant = seed, reentrant
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        self.last = nn.Linear(width, width)
        _reset(self, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)
