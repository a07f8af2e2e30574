"""The expected values of a step: plain torch on the micro-batches of all ranks, in float64.

Beside it the same micro-batches run through plain torch in the precision of the system under audit. What lies between
the two is the rounding of this model on these samples, measured and not guessed: tolerances are a multiple of it.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from .compare import magnitude
from .errors import AuditError
from .oracle import Loss, Oracle, Recipe, default_loss
from .seen import Seen, watch_forward

__all__ = ["TIMES_NOISE", "Computed", "Expected", "Reference", "Sample", "rounding"]

TIMES_NOISE = 8.0
"""A gradient may be wrong by so many times the rounding error that plain torch itself makes on these samples."""

_EPS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


@dataclass(frozen=True)
class Expected:
    """The expected values of one update of the audited system.

    Args:
        model: makes the plain, unsharded model; its names are those of the report.
        optimizer: (parameters or groups) -> the optimizer.
        loss: (model, batch) -> the loss of a micro-batch; by default found in the model's output.
        groups: (model) -> parameter groups; by default one of all parameters that need a gradient.
        schedule: (optimizer) -> a learning rate schedule, stepped once in each update.
        accumulation: micro-batches of one rank in an update.
        max_norm: clip gradients to this global norm; 0.0: do not clip.
        weight: (batch) -> the share of a micro-batch in the mean, such as its number of tokens; None: equal shares.
        compute: dtype of the forward pass; with `autocast`, that of autocast around fp32 parameters.
        reduce: dtype in which gradients are summed over ranks.
        autocast: whether `compute` is autocast, not the dtype of the parameters in forward.
        master: dtype of the parameters that the optimizer updates; None: not compared.
        same_start: the system's parameters must equal those of `model()`; else the system's are taken.
        exact: dtype of the plain training; float32 for models that cannot run in float64.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    loss: Loss = default_loss
    groups: Callable[[nn.Module], Any] | None = None
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    accumulation: int = 1
    max_norm: float = 0.0
    weight: Callable[[Any], float] | None = None
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    autocast: bool = False
    master: torch.dtype | None = torch.float32
    same_start: bool = False
    exact: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        if self.accumulation < 1:
            raise AuditError(f"accumulation: got {self.accumulation}, expected at least 1")
        if not 0 <= self.max_norm < math.inf:
            raise AuditError(f"max_norm: got {self.max_norm}, expected a number of at least 0; 0 means no clipping")

    def trained(self, model: nn.Module) -> Any:
        """The parameter groups of a plain model."""
        if self.groups is not None:
            return self.groups(model)
        return [p for p in model.parameters() if p.requires_grad]


@dataclass(frozen=True)
class Sample:
    """One micro-batch of one data-parallel rank, and its number, counted over all updates."""

    rank: int
    micro: int
    number: int
    batch: Any


@dataclass
class Computed:
    """Plain torch on all samples of an update. Tensors of gradients are by name, one dict a sample.

    Attributes:
        weights: the share of each sample in the mean.
        losses, seen: by (rank, micro).
        noise: by name: rounding error of plain torch in the system's precision, relative to the largest element.
        loss_noise: the same of losses.
        buffers: by rank, after the update.
    """

    samples: list[Sample]
    weights: list[float]
    parts: list[dict[str, torch.Tensor]] = field(default_factory=list)
    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    seen: dict[tuple[int, int], Seen] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    loss_noise: float = 0.0
    buffers: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def mean(self) -> dict[str, torch.Tensor]:
        """The gradient of the update, before clipping."""
        names = self.parts[0]
        weighted = list(zip(self.weights, self.parts))
        return {name: sum(weight * part[name] for weight, part in weighted) for name in names}  # type: ignore[misc]

    def forwards(self) -> dict[str, Any]:
        """The results of the forward passes, and the share of each in the mean."""
        shares = {(sample.rank, sample.micro): share for sample, share in zip(self.samples, self.weights)}
        return {"seen": self.seen, "losses": self.losses, "noise": self.loss_noise, "shares": shares}

    def gradients(self, expected: Expected) -> dict[str, Any]:
        """The right gradients, and how much a system's may differ: by rounding that was measured, and by that of sums
        over ranks and micro-batches.
        """
        mean = self.mean()
        sums = 2 * rounding(expected.reduce) * (1 + math.log2(len(self.samples)))
        sizes = {name: max(magnitude(grad), self.terms(name)) for name, grad in mean.items()}
        largest = max(sizes.values(), default=0.0)
        relative = {name: TIMES_NOISE * self.noise[name] + sums for name in mean}
        # A gradient that is tiny beside the others has the rounding error of what they were computed from.
        allowed = {name: relative[name] * max(sizes[name], 1e-3 * largest) for name in mean}
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in mean.values()))
        clip = min(1.0, expected.max_norm / (norm + 1e-6)) if expected.max_norm > 0 else 1.0
        finite = math.isfinite(norm)
        return {"mean": mean, "allowed": allowed, "sizes": sizes, "largest": largest, "clip": clip, "finite": finite}

    def terms(self, name: str) -> float:
        """The largest element of a summand: a sum that cancels keeps the rounding error of its terms."""
        return max(w * magnitude(part[name]) for w, part in zip(self.weights, self.parts))


class Reference:
    """Plain training on rank 0.

    Args:
        expected: what a step should compute.
        start: parameters and buffers to begin with.
        seed: of the random numbers of micro-batch 0; micro-batch n has seed + n.
    """

    def __init__(self, expected: Expected, start: dict[str, torch.Tensor], seed: int) -> None:
        self.expected, self.seed = expected, seed
        module = expected.model()
        self.names = dict(module.named_parameters())
        self.aliases = _aliases(module)
        plain = _in_dtype(copy.deepcopy(module), torch.float32 if expected.autocast else expected.compute)
        self.plain = plain.train(module.training)
        exact = _in_dtype(module, expected.exact)
        with torch.no_grad():
            for name, parameter in exact.named_parameters():
                if name in start:
                    parameter.copy_(start[name])
        self.oracle = Oracle(exact, self._recipe(exact))

    def _recipe(self, module: nn.Module) -> Recipe:
        expected = self.expected
        return Recipe(
            optimizer=expected.optimizer,
            schedule=expected.schedule,
            groups=expected.trained,
            loss=lambda forward, batch: expected.loss(_Called(forward, module), batch),
            cast=partial(_cast, dtype=expected.exact),
            autocast=contextlib.nullcontext,
            share=1.0,
            max_norm=expected.max_norm,
            masters=expected.exact,
        )

    def shares(self, samples: Sequence[Sample]) -> list[float]:
        """The share of each sample in the mean."""
        weigh = self.expected.weight
        given = [1.0 if weigh is None else float(weigh(sample.batch)) for sample in samples]
        return [one / sum(given) for one in given]

    def compute(self, samples: list[Sample], buffers: dict[int, dict[str, torch.Tensor]]) -> Computed:
        """Run all samples of an update at the oracle's parameters.

        Args:
            buffers: of each rank, before the update.
        """
        found = Computed(samples, self.shares(samples))
        rounded = [self._run_plain(sample, buffers) for sample in samples]
        for sample in samples:
            self._run_exact(sample, buffers, found)
        found.buffers = buffers
        self._noise(found, rounded)
        return found

    def gradients_at(self, samples: list[Sample], parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The mean gradient at other parameters: what a rank computes that missed an update."""
        now = {name: p.detach().clone() for name, p in self.oracle.params.items()}
        self._set(parameters)
        found = Computed(samples, self.shares(samples))
        for sample in samples:
            self._run_exact(sample, {}, found)
        self._set(now)
        return found.mean()

    def take(self, parameters: dict[str, torch.Tensor]) -> None:
        """Go on from the system's parameters, so that rounding errors do not pile up."""
        self._set(parameters)
        with torch.no_grad():
            for name, master in self.oracle.masters.items():
                master.copy_(parameters[name])

    def _set(self, parameters: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.oracle.params.items():
                parameter.copy_(parameters[name])

    def _run_exact(self, sample: Sample, buffers: dict[int, dict[str, torch.Tensor]], found: Computed) -> None:
        oracle, key = self.oracle, (sample.rank, sample.micro)
        oracle.zero_grad()
        own = buffers.get(sample.rank, {})
        _write_buffers(oracle.module, own)
        with watch_forward(oracle.module) as seen:
            found.losses[key] = oracle.micro_batch(
                _cast(sample.batch, dtype=self.expected.exact), scale=1.0, seed=self.seed + sample.number
            )
        found.seen[key] = seen
        found.parts.append(oracle.grads)
        if own:
            own.update({name: buffer.detach().clone() for name, buffer in oracle.module.named_buffers()})

    def _run_plain(
        self, sample: Sample, buffers: dict[int, dict[str, torch.Tensor]]
    ) -> tuple[float, dict[str, torch.Tensor], Seen]:
        expected, module = self.expected, self.plain
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(self.oracle.params[name])
                parameter.grad = None
        _write_buffers(module, buffers.get(sample.rank, {}))
        cast = contextlib.nullcontext()
        if expected.autocast:
            cast = torch.autocast("cpu", dtype=expected.compute)  # type: ignore[assignment]
        batch = sample.batch if expected.autocast else _cast(sample.batch, dtype=expected.compute)
        torch.manual_seed(self.seed + sample.number)
        with watch_forward(module) as seen, cast:
            loss = expected.loss(module, batch)
        loss.float().backward()
        grads = {n: p.grad.detach().double() for n, p in module.named_parameters() if p.grad is not None}
        return float(loss.detach()), grads, seen

    def _noise(self, found: Computed, rounded: list[tuple[float, dict[str, torch.Tensor], Seen]]) -> None:
        """The rounding error of each gradient, at least the median of all: a small tensor may be right by luck."""
        for sample, (loss, _, seen) in zip(found.samples, rounded):
            exact = found.losses[sample.rank, sample.micro]
            found.loss_noise = max(found.loss_noise, abs(loss - exact) / max(abs(exact), 1e-3))
            found.seen[sample.rank, sample.micro].dtypes = seen.dtypes
        errors = {}
        for name in found.parts[0]:
            off = [w * (grads[name] - part[name]).abs().max().item() if name in grads and part[name].numel() else 0.0
                   for w, (_, grads, _), part in zip(found.weights, rounded, found.parts)]  # fmt: skip
            errors[name] = sum(off) / max(found.terms(name), 1e-30)
        usual = sorted(errors.values())[len(errors) // 2] if errors else 0.0
        floor = 16 * rounding(self.expected.compute)
        found.noise = {name: max(error, usual, floor) for name, error in errors.items()}
        found.loss_noise = max(found.loss_noise, floor)


class _Called:
    """The model as `Expected.loss` gets it: called, it casts its inputs; its other attributes are the module's."""

    def __init__(self, forward: Callable[..., Any], module: nn.Module) -> None:
        self._forward, self._module = forward, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def rounding(dtype: torch.dtype) -> float:
    """Half of the distance of 1.0 to the next number of a dtype."""
    return _EPS.get(dtype, 2.0**-24)


def _in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with its floating-point numbers in a dtype. Complex ones (the angles of rotary embeddings) stay
    complex: `Module.to` would drop their imaginary parts.
    """
    complex_dtype = torch.complex128 if dtype == torch.float64 else torch.complex64

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            return tensor.to(complex_dtype)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return module._apply(cast)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, value)


def _write_buffers(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in values:
                buffer.copy_(values[name])


def _aliases(module: nn.Module) -> dict[str, str]:
    """Second names of tied parameters, and the first one of each."""
    first = {id(p): name for name, p in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first[id(p)] != name}
