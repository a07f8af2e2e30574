"""Plain training in one process: the unsharded model, one optimizer over fp32 master weights, every rank's
micro-batches in turn.

It is written to be compared with a textbook, and on purpose uses nothing that it checks: no flat buffers, no hooks, no
process groups. It follows the same rules of precision: parameters in the training dtype, fp32 master weights, a scaled
loss, and gradients that are unscaled before the check, the norm and clipping.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Loss = Callable[[Callable[..., Any], Any], torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """The training that the oracle does: functions of the user and choices of dtypes. It contains no part under test.

    Attributes:
        optimizer: (groups of fp32 master weights) -> an optimizer.
        schedule: (optimizer) -> a schedule, or None.
        groups: (model) -> the parameter groups (or parameters) to train.
        loss: (a callable in the place of the model, batch) -> a scalar.
        cast, autocast: precision of inputs and of the forward pass.
        share: factor on each micro-batch's loss: 1 / (accumulation steps x ranks).
        max_norm: clip to this global norm; 0.0: no clipping.
        masters: dtype of the master weights and of accumulated gradients.
    """

    optimizer: Callable[[Any], torch.optim.Optimizer]
    schedule: Callable[[torch.optim.Optimizer], Any] | None
    groups: Callable[[nn.Module], Any]
    loss: Loss
    cast: Callable[[Any], Any]
    autocast: Callable[[], AbstractContextManager[object]]
    share: float
    max_norm: float
    masters: torch.dtype = torch.float32


class Oracle:
    """Trains `module` (which it owns) as the recipe says."""

    def __init__(self, module: nn.Module, recipe: Recipe) -> None:
        self.module, self.recipe = module, recipe
        self.params = dict(module.named_parameters())
        self.masters = {
            name: nn.Parameter(p.detach().clone().to(recipe.masters))
            for name, p in self.params.items()
            if p.requires_grad
        }
        by_identity = {id(self.params[name]): master for name, master in self.masters.items()}
        self.optimizer = recipe.optimizer(_over_masters(recipe.groups(module), by_identity))
        self.schedule = None if recipe.schedule is None else recipe.schedule(self.optimizer)
        self.grads: dict[str, torch.Tensor] = {}
        self.zero_grad()

    def twin(self) -> Oracle:
        """Another oracle in the same state. It is built anew, because copies of torch optimizers lose attributes."""
        other = Oracle(copy.deepcopy(self.module), self.recipe)
        with torch.no_grad():
            for name, master in self.masters.items():
                other.masters[name].copy_(master)
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        if other.schedule is not None and self.schedule is not None:
            other.schedule.load_state_dict(copy.deepcopy(self.schedule.state_dict()))
        return other

    def zero_grad(self) -> None:
        """Drop the gradients, at the start of an update."""
        self.grads = {name: torch.zeros_like(master) for name, master in self.masters.items()}

    def micro_batch(self, batch: Any, *, scale: float, seed: int) -> float:
        """Run forward and backward of one rank's micro-batch, and add gradients of `loss * scale * share`. Returns
        the loss.
        """
        torch.manual_seed(seed)
        loss = self.recipe.loss(self.forward, batch)
        (loss.to(self.recipe.masters) * (scale * self.recipe.share)).backward()
        for name, total in self.grads.items():
            grad = self.params[name].grad
            if grad is not None:
                total += grad.to(total.dtype)
                self.params[name].grad = None
        return float(loss.detach())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module as the engine would, inputs cast and under autocast."""
        with self.recipe.autocast():
            return self.module(*self.recipe.cast(args), **self.recipe.cast(kwargs))

    def finite(self) -> bool:
        """Whether all gradients of the update so far are finite."""
        return all(bool(torch.isfinite(grad).all()) for grad in self.grads.values())

    def unscale(self, scale: float) -> None:
        """Divide the gradients by the loss scale."""
        for grad in self.grads.values():
            grad /= scale

    def norm(self) -> float:
        """Global L2 norm of the gradients, summed in fp64."""
        return math.sqrt(sum(float(grad.double().square().sum()) for grad in self.grads.values()))

    def lr(self) -> list[float]:
        """The learning rates of the coming update."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def update(self) -> None:
        """Clip, update the master weights, write the parameters, advance the schedule. Gradients must be unscaled
        already.
        """
        limit = self.recipe.max_norm
        clip = min(1.0, limit / (self.norm() + 1e-6)) if limit > 0 else 1.0
        for name, master in self.masters.items():
            master.grad = self.grads[name] * clip
        self.optimizer.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.params[name].copy_(master)
                master.grad = None
        if self.schedule is not None:
            self.schedule.step()


def default_loss(model: Callable[..., Any], batch: Any) -> torch.Tensor:
    """Run `model` on `batch` and find the loss in the output.

    A mapping gives keyword arguments, a tuple or list positional ones; anything else is a single argument. The loss is
    the output itself, its attribute or item `loss`, or the first item of a tuple or list.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, (tuple, list)):
        output = model(*batch)
    else:
        output = model(batch)
    if isinstance(output, Mapping):
        return output["loss"]
    if isinstance(output, (tuple, list)):
        return output[0]
    return getattr(output, "loss", output)


def _over_masters(groups: Any, masters: Mapping[int, nn.Parameter]) -> list[Any]:
    """The same groups with each trainable parameter replaced by its master."""
    items = list(groups)
    if items and isinstance(items[0], dict):
        return [{**group, "params": _over_masters(group["params"], masters)} for group in items]
    return [masters[id(parameter)] for parameter in items if id(parameter) in masters]
