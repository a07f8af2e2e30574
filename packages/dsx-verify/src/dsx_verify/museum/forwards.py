"""Bugs in the forward pass: what is gathered, drawn, tied and reported."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..expected import Expected
from .exhibit import Exhibit, Show, average, pairs, plain_step, rank_and_size, sgd

__all__ = ["FORWARDS"]


class _Attention(nn.Module):
    """Attention over (batch, tokens, features). `gather` makes keys and values of all ranks' tokens of a rank's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.query, self.pair = nn.Linear(6, 6), nn.Linear(6, 12)
        self.head = nn.Linear(6, 3)
        self.gather: Any = None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of this rank's tokens."""
        pair = self.pair(x)
        key, value = (pair if self.gather is None else self.gather(pair)).chunk(2, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(self.query(x), key, value)
        return nn.functional.mse_loss(self.head(mixed), y)


def _sequences(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, 4, 6, generator=generator), torch.randn(2, 4, 3, generator=generator)


def gather_of_another_axis(broken: bool) -> Show:
    """Context parallelism gathers keys and values along an axis that a transposition has moved."""
    model = _Attention()
    optimizer = sgd(model.parameters())
    rank, size = rank_and_size()

    def gather(pair: torch.Tensor) -> torch.Tensor:
        parts = [torch.zeros_like(pair) for _ in range(size)]
        dist.all_gather(parts, pair.detach().contiguous())
        parts[rank] = pair
        if broken:  # along the batch: each query sees its own rank's tokens only
            return torch.cat(parts, dim=0)[rank * len(pair) : (rank + 1) * len(pair)]
        return torch.cat(parts, dim=1)

    def step(batches: list[Any]) -> float:
        ((x, y),) = batches
        own = slice(4 // size * rank, 4 // size * (rank + 1))
        optimizer.zero_grad()
        whole = model.pair(x)
        keys = whole if not broken else gather(model.pair(x[:, own]))
        model.gather = lambda _: keys
        loss = model(x[:, own], y[:, own])
        loss.backward()
        average(model.parameters())
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / size

    return Show(step, model, Expected(_Attention, sgd), _sequences, optimizer, {"data_ranks": (0, 1)})


class _Noisy(nn.Module):
    """A denoiser: the forward draws the noise that it learns to remove."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.own: torch.Generator | None = None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss."""
        noise = torch.randn(x.shape, generator=self.own).to(x.dtype)
        return nn.functional.mse_loss(self.net(x + noise), noise) + 0 * y.sum()


def one_seed_for_all_ranks(broken: bool) -> Show:
    """Ranks that shard one model get one seed, and so one noise for different samples."""
    model = _Noisy()
    if broken:
        model.own = torch.Generator().manual_seed(17)
    optimizer = sgd(model.parameters())
    return Show(plain_step(model, optimizer), model, Expected(_Noisy, sgd), pairs, optimizer)


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.embed = nn.Embedding(13, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss."""
        logits = self.head(torch.tanh(self.body(self.embed(tokens))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Micro-batch `number` of a language model."""
    drawn = torch.randint(0, 13, (2, 8), generator=torch.Generator().manual_seed(number))
    return drawn[:, :-1], drawn[:, 1:]


def untied(broken: bool) -> Show:
    """New storage for each parameter unties head and embedding: values are equal at first, gradients are not."""
    model = Tied()
    if broken:
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    optimizer = sgd(model.parameters())
    return Show(plain_step(model, optimizer), model, Expected(Tied, sgd), tokens, optimizer)


def reported_loss(broken: bool) -> Show:
    """The loss that is shown is a share of the ranks' sum, because one of two reductions is left out."""
    model = Tied()
    optimizer = sgd(model.parameters())
    right = plain_step(model, optimizer)

    def step(batches: list[Any]) -> float:
        with torch.no_grad():
            loss = model(*batches[0]) / (2 if broken else 1)
        right(batches)
        return float(loss)

    return Show(step, model, Expected(Tied, sgd), tokens, optimizer)


FORWARDS = (
    Exhibit(
        "pytorch/torchtitan#3206", "2026-05", "context parallelism gathers keys and values along the wrong axis",
        "forward", "", gather_of_another_axis,
    ),
    Exhibit(
        "mlcommons/training#844", "2025-11", "sharded data-parallel ranks draw the same noise",
        "random stream", "", one_seed_for_all_ranks,
    ),
    Exhibit(
        "verl-project/verl#7835", "2026-09", "head and embedding are no longer tied after their storage is made anew",
        "tied weights", "", untied, 1,
    ),
    Exhibit(
        "pytorch/torchtitan#3329", "2026-05", "the reported loss is not reduced over all ranks, and about half",
        "loss scaled", "", reported_loss, 1,
    ),
)  # fmt: skip
