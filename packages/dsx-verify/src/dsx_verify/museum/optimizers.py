"""Bugs in optimizers: the rule that does not run, counters that are ahead, decay of a wrong group, precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..expected import Expected
from .exhibit import Exhibit, Net, Show, pairs, plain_step, sgd

__all__ = ["OPTIMIZERS"]


def orthogonalized(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The nearest orthogonal matrix, about: five iterations of Newton and Schulz."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Muon for matrices, SGD for the rest.

    Args:
        rule: what is done with a matrix's gradient.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.05, rule: Callable[[torch.Tensor], torch.Tensor] = orthogonalized
    ) -> None:
        super().__init__(params, {"lr": lr})
        self._rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    grad = parameter.grad
                    parameter -= group["lr"] * (self._rule(grad) if grad.dim() == 2 else grad)


def muon_is_sgd(broken: bool) -> Show:
    """At stage 0 no wrapper calls the orthogonalisation, and the optimizer's own step is that of SGD."""
    model = Net()
    optimizer = Muon(model.parameters(), rule=(lambda grad: grad) if broken else orthogonalized)
    return Show(plain_step(model, optimizer), model, Expected(Net, Muon), pairs, optimizer)


def muon_is_adam(broken: bool) -> Show:
    """Parameters of zero.Init look flat, so that all of them go to the branch for vectors, AdamW."""
    model = Net()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    adam = torch.optim.AdamW(matrices if broken else vectors, lr=0.05, weight_decay=0.0)
    rule = _Adam(adam) if broken else orthogonalized
    optimizer = Muon(model.parameters(), rule=rule)
    return Show(plain_step(model, optimizer), model, Expected(Net, Muon), pairs, optimizer)


class _Adam:
    """The direction of a first step of Adam."""

    def __init__(self, adam: torch.optim.Optimizer) -> None:
        self.epsilon = adam.defaults["eps"]

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        return grad / (grad.abs() + self.epsilon)


def muon_for_each_micro_batch(broken: bool) -> Show:
    """Stage 3 orthogonalises each micro-batch's gradient, and averages the results."""
    model = Net()
    optimizer = Muon(model.parameters())

    def step(batches: list[Any]) -> None:
        optimizer.zero_grad()
        total = {p: torch.zeros_like(p) for p in model.parameters()}
        for batch in batches:
            for parameter, grad in zip(total, torch.autograd.grad(model(*batch), list(total))):
                total[parameter] += (orthogonalized(grad) if broken and grad.dim() == 2 else grad) / len(batches)
        for parameter, grad in total.items():
            parameter.grad = grad
        optimizer.step()

    return Show(step, model, Expected(Net, Muon, accumulation=2), pairs, optimizer)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """AdamW without decay."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0)


def counter_is_ahead(broken: bool) -> Show:
    """States are made by an update with zero gradients, which leaves Adam's step counter at one."""
    model = Net()
    optimizer = adam(model.parameters())
    if broken:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return Show(plain_step(model, optimizer), model, Expected(Net, adam), pairs, optimizer)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices only."""
    return [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def decay_of_everything(broken: bool) -> Show:
    """Norms and biases lose the mark that keeps weight decay from them."""
    model = Net()
    parts = groups(model)
    if broken:
        parts[1]["weight_decay"] = parts[0]["weight_decay"]
    optimizer = torch.optim.AdamW(parts, lr=0.01)
    expected = Expected(Net, lambda parameters: torch.optim.AdamW(parameters, lr=0.01), groups=groups)
    return Show(plain_step(model, optimizer), model, expected, pairs, optimizer)


class _Half(nn.Module):
    """A model whose parameters come in bf16, and are computed with in bf16."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        """Under autocast."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(*batch)


def no_upcast(broken: bool) -> Show:
    """The master weights should be fp32; the loop that converts them assigns to its own variable only."""
    model = Net().to(torch.bfloat16)
    if not broken:
        model = model.float()
    optimizer = sgd(model.parameters())
    step = plain_step(_Half(model), optimizer)
    expected = Expected(Net, sgd, compute=torch.bfloat16, autocast=True)
    return Show(step, model, expected, pairs, optimizer)


OPTIMIZERS = (
    Exhibit(
        "deepspeedai/DeepSpeed#8441", "2026-09", "Muon at ZeRO stage 0, the default, trains with SGD",
        "plain SGD", "inner.weight", muon_is_sgd, 1,
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#8438", "2026-09", "Muon under zero.Init trains every matrix with AdamW",
        "optimizer rule", "inner.weight", muon_is_adam, 1,
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#8443", "2026-09", "Muon at stage 3 orthogonalises each micro-batch's gradient",
        "values", "inner.weight", muon_for_each_micro_batch, 1,
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#5974", "2026-07", "Adam's step counter is ahead by one, so that updates are too small",
        "optimizer states", "", counter_is_ahead, 1,
    ),
    Exhibit(
        "ServiceNow/Fast-LLM#545", "2026-06", "weight decay is applied to norms and biases",
        "wrong decay", "inner.bias", decay_of_everything, 1,
    ),
    Exhibit(
        "huggingface/accelerate#3979", "2026-03", "FSDP2's upcast of master weights to fp32 does nothing",
        "dtype", "", no_upcast, 1,
    ),
)  # fmt: skip
