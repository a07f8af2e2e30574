"""Bugs in how gradients are added up: over ranks, over micro-batches, and in clipping."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..expected import Expected
from .exhibit import Exhibit, Net, Show, average, pairs, plain_step, rank_and_size, sgd, total_norm

__all__ = ["REDUCTIONS"]


def _show(model: nn.Module, make: Any = Net, **settings: Any) -> tuple[Any, torch.optim.Optimizer, Expected]:
    return model, sgd(model.parameters()), Expected(make, sgd, **settings)


def only_the_last_micro_batch(broken: bool) -> Show:
    """Every backward is taken for the last of an update, so each one starts the accumulation anew."""
    model, optimizer, expected = _show(Net(), accumulation=3)

    def step(batches: list[Any]) -> None:
        optimizer.zero_grad()
        for batch in batches:
            if broken:
                optimizer.zero_grad()
            (model(*batch) / len(batches)).backward()
        average(model.parameters())
        optimizer.step()

    return Show(step, model, expected, pairs, optimizer)


def doubled_at_each_micro_batch(broken: bool) -> Show:
    """In a group of one rank the reduced buffer is the accumulated one, which is then added to itself."""
    model, optimizer, expected = _show(Net(), accumulation=3)

    def step(batches: list[Any]) -> None:
        optimizer.zero_grad()
        for batch in batches:
            (model(*batch) / len(batches)).backward()
            for parameter in model.inner.parameters() if broken else ():
                parameter.grad += parameter.grad.clone()
        average(model.parameters())
        optimizer.step()

    return Show(step, model, expected, pairs, optimizer)


def summed_over_ranks(broken: bool) -> Show:
    """The factor 1 / ranks is applied to another tensor than the one that is reduced."""
    model, optimizer, expected = _show(Net())

    def reduce() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            if not broken:
                parameter.grad /= rank_and_size()[1]

    return Show(plain_step(model, optimizer, reduce=reduce), model, expected, pairs, optimizer)


def summed_over_micro_batches(broken: bool) -> Show:
    """A pipeline adds up the gradients of micro-batches and does not divide by their number."""
    model, optimizer, expected = _show(Net(), accumulation=3)
    share = 1.0 if broken else 1 / 3
    return Show(plain_step(model, optimizer, share=lambda *_: share), model, expected, pairs, optimizer)


def divided_twice(broken: bool) -> Show:
    """Trainer and accelerator each divide the loss by the number of micro-batches."""
    model, optimizer, expected = _show(Net(), accumulation=3)
    share = 1 / 9 if broken else 1 / 3
    return Show(plain_step(model, optimizer, share=lambda *_: share), model, expected, pairs, optimizer)


def _tokens(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = pairs(number)
    return x[: 1 + number % 4], y[: 1 + number % 4]


def means_of_means(broken: bool) -> Show:
    """Each micro-batch's loss is divided by its own number of tokens, and these means are averaged."""
    model, optimizer, expected = _show(Net(), accumulation=3, weight=lambda batch: float(len(batch[0])))

    def share(batches: list[Any], batch: Any) -> float:
        if broken:
            return 1 / len(batches)
        total = torch.tensor(float(sum(len(x) for x, _ in batches)))
        dist.all_reduce(total)
        return len(batch[0]) * rank_and_size()[1] / float(total)

    # An all-reduce for each micro-batch: all ranks have equally many.
    return Show(plain_step(model, optimizer, share=share), model, expected, _tokens, optimizer)


class _Twice(Net):
    """The first layer is used twice; the second use can be kept out of the reduction."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        other = self.norm(self.inner(x.flip(0))).square().mean()
        return super().forward(x, y) + 0.5 * other


def a_use_is_not_reduced(broken: bool) -> Show:
    """A parameter is used in two parts of the graph; what the second one adds after the hook stays on its rank."""
    model, optimizer, expected = _show(_Twice(), _Twice)

    def step(batches: list[Any]) -> None:
        optimizer.zero_grad()
        ((x, y),) = batches
        late = 0.5 * model.norm(model.inner(x.flip(0))).square().mean()
        model(x, y).backward()
        own = torch.autograd.grad(late, model.inner.weight)[0]
        weight: Any = model.inner.weight
        if broken:
            weight.grad -= own
        average(model.parameters())
        if broken:
            weight.grad += own / rank_and_size()[1]
        optimizer.step()

    return Show(step, model, expected, pairs, optimizer)


class _Sliced(nn.Module):
    """Tensor parallelism by hand: each rank has the half of the inner units, and gives a summand of the output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.router = nn.Linear(6, 6)
        self.up = nn.Linear(6, 8, bias=False)
        self.down = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss on one rank."""
        return nn.functional.mse_loss(self.down(torch.tanh(self.up(torch.tanh(self.router(x))))), y)


class _Sum(torch.autograd.Function):
    """Adds up over ranks in forward; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


class _Copy(torch.autograd.Function):
    """Passes in forward; the gradient is added up over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def _tensor_parallel(*, router_is_reduced: bool, bias_is_right: bool) -> Show:
    """Weights are whole on each rank; the mask of its units makes a rank's part. Sums over ranks make them whole."""
    model, optimizer, expected = _show(_Sliced(), _Sliced)
    rank, size = rank_and_size()
    mask = torch.tensor([float(unit % size == rank) for unit in range(8)])

    def step(batches: list[Any]) -> float:
        ((x, y),) = batches
        optimizer.zero_grad()
        hidden = torch.tanh(model.router(x))
        hidden = _Copy.apply(hidden) if router_is_reduced else hidden
        part = nn.functional.linear(torch.tanh(model.up(hidden)) * mask, model.down.weight)
        bias: Any = model.down.bias
        part = part + (bias + (bias / size - bias).detach() if bias_is_right else bias / size)
        loss = nn.functional.mse_loss(_Sum.apply(part), y)
        loss.backward()
        for owned in (model.up.weight, model.down.weight):
            dist.all_reduce(owned.grad)  # each rank has its units' part: the sum is the whole tensor
        optimizer.step()
        return float(loss.detach())

    return Show(step, model, expected, pairs, optimizer, {"data_ranks": (0, 1)})


def bias_divided_by_ranks(broken: bool) -> Show:
    """The bias is divided by the number of ranks in forward, and autograd divides its gradient as well."""
    return _tensor_parallel(router_is_reduced=True, bias_is_right=not broken)


def router_is_not_reduced(broken: bool) -> Show:
    """A replicated router gets only its own rank's share of the gradient from sliced experts."""
    return _tensor_parallel(router_is_reduced=not broken, bias_is_right=True)


class _Deep(_Sliced):
    """A layer below the router, which gets the router's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss on one rank."""
        return super().forward(torch.tanh(self.below(x)), y)


def gradients_below_experts(broken: bool) -> Show:
    """Without expert parallelism the placement of the input's gradient is dropped, so one rank's share is kept."""
    show = _tensor_parallel(router_is_reduced=not broken, bias_is_right=True)
    model = _Deep()
    optimizer = sgd(model.parameters())
    rank, size = rank_and_size()
    mask = torch.tensor([float(unit % size == rank) for unit in range(8)])

    def step(batches: list[Any]) -> None:
        ((x, y),) = batches
        optimizer.zero_grad()
        hidden = torch.tanh(model.router(torch.tanh(model.below(x))))
        hidden = hidden if broken else _Copy.apply(hidden)
        part = nn.functional.linear(torch.tanh(model.up(hidden)) * mask, model.down.weight)
        bias = model.down.bias
        part = part + bias + (bias / size - bias).detach()
        nn.functional.mse_loss(_Sum.apply(part), y).backward()
        for owned in (model.up.weight, model.down.weight):
            dist.all_reduce(owned.grad)
        optimizer.step()

    return Show(step, model, Expected(_Deep, sgd), pairs, optimizer, show.more)


def norm_of_experts_averaged(broken: bool) -> Show:
    """Each rank has other experts; the global norm is the mean of the ranks' norms, not the root of their squares."""
    model, optimizer, expected = _show(Net(), max_norm=0.05)
    experts = [[model.inner.weight], [model.outer.weight]]  # one of them on each rank

    def clip() -> None:
        rank, size = rank_and_size()
        own = [p.grad for p in experts[rank % 2]]
        shared = [p.grad for n, p in model.named_parameters() if n not in ("inner.weight", "outer.weight")]
        if broken:
            norm = torch.tensor(total_norm([*own, *shared]) / size)  # type: ignore[list-item]
            dist.all_reduce(norm)
        else:
            square = torch.tensor(total_norm(own) ** 2)
            dist.all_reduce(square)
            norm = (square + total_norm(shared) ** 2).sqrt()
        for parameter in model.parameters():
            parameter.grad *= min(1.0, 0.05 / (float(norm) + 1e-6))

    return Show(plain_step(model, optimizer, clip=clip), model, expected, pairs, optimizer)


REDUCTIONS = (
    Exhibit(
        "allenai/open-instruct#1498", "2026-02", "ZeRO-2 keeps only the last micro-batch of a manual accumulation",
        "lost or doubled micro-batch", "", only_the_last_micro_batch,
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#6660", "2026-08", "gradients double at each micro-batch in groups of one rank",
        "lost or doubled micro-batch", "inner.weight", doubled_at_each_micro_batch,
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#3023", "2026-01", "the factor 1 / ranks goes to the wrong buffer, so gradients are summed",
        "scaled by the ranks", "", summed_over_ranks,
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#7773", "2026-01", "a pipeline sums the gradients of micro-batches",
        "scaled by accumulation", "", summed_over_micro_batches, 1,
    ),
    Exhibit(
        "huggingface/accelerate#3533", "2025-04", "the loss is divided by the micro-batches twice",
        "scaled by accumulation", "", divided_twice, 1,
    ),
    Exhibit(
        "modelscope/ms-swift#10165", "2026-09", "means over each micro-batch's tokens are averaged",
        "sample weights", "", means_of_means,
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#8224", "2026-08", "ZeRO-2 leaves the second use of a module out of the reduction",
        "missing reduction", "inner.weight", a_use_is_not_reduced,
    ),
    Exhibit(
        "pytorch/torchtitan#4332", "2026-08", "a row-parallel bias gets 1 / ranks of its gradient",
        "scaled by the ranks", "down.bias", bias_divided_by_ranks,
    ),
    Exhibit(
        "pytorch/torchtitan#2387", "2026-02", "the router's gradient is not reduced over tensor-parallel ranks",
        "missing reduction", "router.weight", router_is_not_reduced,
    ),
    Exhibit(
        "pytorch/torchtitan#4054", "2026-08", "parameters below the experts lose their tensor-parallel reduction",
        "missing reduction", "router.weight", gradients_below_experts,
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#8478", "2026-09", "the norm for clipping is averaged over ranks that have other experts",
        "clipped by another norm", "", norm_of_experts_averaged,
    ),
)  # fmt: skip
