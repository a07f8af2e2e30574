"""The verification itself: the same micro-batches through the engine on all ranks and through the oracle on rank 0.

The sequence, on every rank:

    0) build the model, each rank with another seed; after `initialize` all parameters must be those of rank 0
    1) per micro-batch: run the engine, send batch and loss to rank 0, which runs the oracle and compares the losses; in
       the first two updates the first micro-batch is run once before, its gradients clipped and cleared as a user's
       loop does it (`probes.py`); this must leave no trace
    2) before the update: rank 0 sends the oracle's gradient of each parameter, and every rank compares its full
       gradient; the oracle then uses the engine's gradients, so that the update is judged separately
    3) after the update: skipped or not, norm, rates; then each master and each parameter in the module, on every rank;
       the oracle then uses the engine's master weights
    4) after the first applied update: older graphs must be stale; at the end: a replaced parameter must be noticed

Because the oracle takes the engine's values, rounding errors do not accumulate (Adam turns a rounding error of a tiny
gradient into a full step), and tolerances can stay tight. After each point all ranks exchange their results and stop
together at the first point with a difference.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from dsx_checkpoint.ranks import default_ranks
from dsx_verify import Tolerance, VerifyError, VerifyReport
from dsx_verify.compare import Comparison, magnitude
from dsx_verify.oracle import Loss, Oracle, default_loss
from torch import nn

from ..engine.engine import Engine
from ..engine.errors import EngineError
from .probes import Probes
from .setup import build, sender

_THROWN_AWAY = 2
"""The number of updates that begin with a micro-batch which is thrown away: the first, and one with existing
buffers.
"""


class _Differs(Exception):
    """Ends the run at the first point with a difference."""


@dataclass(frozen=True)
class _Task:
    """The task: the user's functions, and the seed of the random numbers in a forward pass."""

    batch: Callable[[int], Any]
    loss: Loss
    seed: int


def verify(
    model_fn: Callable[[], nn.Module],
    config: Any,
    batch_fn: Callable[[int], Any],
    *,
    steps: int = 3,
    loss_fn: Loss = default_loss,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    parameters_fn: Callable[[nn.Module], Any] | None = None,
    tolerance: Tolerance | None = None,
    seed: int = 1234,
    raise_error: bool = True,
) -> VerifyReport:
    """Check that training as configured computes what plain single-process torch computes. Every rank must call it.

    Rank 0 needs additional memory for the full model, its gradients and optimizer states.

    Args:
        model_fn: builds the model; called once on each rank.
        config: as for `dsx.initialize`.
        batch_fn: returns the micro-batch with a number; called on one rank for each number from 0 on, in the order
            step, micro-batch, rank.
        steps: updates to compare.
        loss_fn: (model, batch) -> the loss; it calls `model` like the module. None: the batch is the model's arguments,
            and the loss is found in its output.
        optimizer: (parameters or groups) -> an optimizer; None: that of the configuration.
        parameters_fn: (model) -> parameters or groups; None: all parameters.
        tolerance: allowed relative errors; None: defaults for the dtypes.
        seed: the seed of the models and of random numbers in a forward pass.
        raise_error: raise if there is a difference; False: only report it.

    Returns:
        The report, the same on all ranks.

    Raises:
        VerifyError: something differs; the message names the first value, its step, kind, rank and place.
    """
    torch.manual_seed(seed + default_ranks().rank)  # other values on each rank: dsx must make them equal
    model = model_fn()
    original = copy.deepcopy(model)
    engine, oracle = build(model, original, config, loss_fn, optimizer, parameters_fn)
    try:
        report = _Run(engine, oracle, _Task(batch_fn, loss_fn, seed), tolerance).compare(steps)
    finally:
        engine.destroy()
    if raise_error and not report.ok:
        raise VerifyError(report)
    return report


class _Run:
    """A running verification on one rank."""

    def __init__(self, engine: Engine, oracle: Oracle | None, task: _Task, tolerance: Tolerance | None) -> None:
        self.engine, self.oracle, self._task = engine, oracle, task
        self._ranks = default_ranks(engine._parts.topology.data.group)
        self._send = sender(engine)
        precision = engine.precision
        self._tolerance = tolerance or Tolerance.for_dtypes(precision.dtype("compute"), precision.dtype("reduce"))
        self._found = Comparison(self._ranks.rank)
        self._report = VerifyReport(0, self._ranks.world_size, engine.zero_optimization_stage())
        self._names = [name for name, _ in engine.module.named_parameters()]
        self._trained = [name for name, p in engine.module.named_parameters() if p.requires_grad]
        self._probes = Probes(engine, self._found, self._of_rank_0, self._trained, self._tolerance.grad)
        self._applied = False

    def compare(self, steps: int) -> VerifyReport:
        """Run the verification; returns the report."""
        with contextlib.suppress(_Differs):  # the report holds what differs
            self._start()
            for step in range(1, steps + 1):
                self._one_step(step)
                self._report.steps = step
            self._probes.replace_a_parameter(steps)
            self._agree()
        return self._report

    # - Exchanging

    def _agree(self) -> None:
        """Merge the results of the ranks; all stop if one found a difference."""
        shares = self._ranks.gather((self._found.compared, self._found.worst, self._found.differences))
        self._report.compared = dict(shares[0][0])
        for _, worst, _ in shares:
            for kind, share in worst.items():
                self._report.worst[kind] = max(self._report.worst.get(kind, 0.0), share)
        found = [difference for _, _, differences in shares for difference in differences]
        self._report.differences = sorted(found, key=lambda d: -(d.error / d.allowed if d.allowed else float("inf")))
        if found:
            raise _Differs

    def _of_rank_0(self, value: Any) -> Any:
        return self._ranks.gather(value if self.oracle is not None else None)[0]

    def _expected(self, pick: Callable[[Oracle], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """A tensor of the oracle, on every rank."""
        value = None if self.oracle is None else pick(self.oracle).detach()
        return self._send(value, tuple(like.shape), like.dtype)

    # - Reading the engine

    def _parameter(self, name: str) -> nn.Parameter:
        owner, _, leaf = name.rpartition(".")
        return self.engine.module.get_submodule(owner)._parameters[leaf]  # type: ignore[return-value]

    def _in_module(self, name: str) -> torch.Tensor:
        """The full parameter that the module computes with, on this rank."""
        with self.engine._parts.gather([self._parameter(name)]):
            return self._parameter(name).detach().clone()

    def _master(self, name: str) -> torch.Tensor:
        import dsx_zero

        master = dsx_zero.safe_get_full_fp32_param(self._parameter(name))
        if master is None:
            raise EngineError(f"verify: {name} is trained but has no master; is another engine using this model?")
        return master

    def _gradient(self, name: str, scale: float) -> torch.Tensor:
        import dsx_zero

        grad = dsx_zero.safe_get_full_grad(self._parameter(name))
        if grad is None:
            return torch.zeros(tuple(self._parameter(name).shape), device=self.engine.device)
        return grad.float() / scale

    # - The sequence

    def _start(self) -> None:
        for name in self._names:
            got = self._in_module(name)
            self._found.tensors(0, "start", name, got, self._expected(lambda o, n=name: o.params[n], got), 0.0)
        self._agree()

    def _one_step(self, step: int) -> None:
        gas, scale, oracle = self.engine.gradient_accumulation_steps(), self.engine.loss_scale(), self.oracle
        if oracle is not None:
            oracle.zero_grad()
        for micro in range(gas):
            self._micro_batch(step, (step - 1) * gas + micro, scale)
            if micro < gas - 1:
                self.engine.step()
        finite = self._of_rank_0(oracle is not None and oracle.finite())
        if finite:
            self._compare_gradients(step, scale)
        skips = not finite and self.engine.precision.check_overflow
        expected = (oracle.lr(), oracle.norm()) if oracle is not None else ([], 0.0)
        before = {n: m.detach().clone() for n, m in oracle.masters.items()} if oracle is not None else {}
        judges_graphs = not skips and not self._applied
        if judges_graphs:
            self._keep_graphs()
        if oracle is not None and not skips:
            oracle.update()
        self.engine.step()
        self._applied = self._applied or not skips
        if judges_graphs:
            self._probes.judge_graphs(step)
            if oracle is not None:
                oracle.module.zero_grad()
        self._compare_numbers(step, skips, expected[0], expected[1] if finite else None)
        self._compare_parameters(step, before)

    def _micro_batch(self, step: int, micro_index: int, scale: float) -> None:
        self._batch = self._task.batch(micro_index * self._ranks.world_size + self._ranks.rank)
        if step <= _THROWN_AWAY and micro_index % self.engine.gradient_accumulation_steps() == 0:
            self._throw_away(step, micro_index, scale)
        loss = self._loss(micro_index)
        loss.backward() if self._probes.direct(step) else self.engine.backward(loss)
        self._compare_losses(step, micro_index, loss, scale)

    def _loss(self, micro_index: int) -> torch.Tensor:
        torch.manual_seed(self._task.seed + micro_index * self._ranks.world_size + self._ranks.rank)
        return self._task.loss(self.engine, self._batch)

    def _compare_losses(self, step: int, micro_index: int, loss: torch.Tensor, scale: float) -> None:
        """Run the oracle on every rank's micro-batch, which adds to the oracle's gradients, and compare the losses."""
        first, everyone = micro_index * self._ranks.world_size, self._ranks.gather((self._batch, float(loss.detach())))
        if self.oracle is not None:
            for source, (theirs, got) in enumerate(everyone):
                expected = self.oracle.micro_batch(theirs, scale=scale, seed=self._task.seed + first + source)
                allowed = self._tolerance.loss * max(abs(expected), 1e-3)
                self._found.losses(step, f"micro-batch {first + source}", source, got, expected, allowed)
        self._agree()

    def _throw_away(self, step: int, micro_index: int, scale: float) -> None:
        """Run a micro-batch whose gradients are clipped and cleared."""
        oracle, loss, norm = self.oracle, self._loss(micro_index), None
        self._compare_losses(step, micro_index, loss, scale)
        if oracle is not None:
            norm = oracle.norm() if oracle.finite() else None
            oracle.zero_grad()
        self._probes.throw_away(step, loss, self._of_rank_0(norm))
        self._agree()

    def _keep_graphs(self) -> None:
        """Keep graphs, to be judged after the first applied update."""
        oracle, batch = self.oracle, self._batch
        plain = None if oracle is None else lambda: oracle.recipe.loss(oracle.forward, batch)
        self._probes.keep_graphs(lambda: self._task.loss(self.engine, batch), plain)

    def _compare_gradients(self, step: int, scale: float) -> None:
        if self.oracle is not None:
            self.oracle.unscale(scale)
        largest = self._of_rank_0(max(map(magnitude, self.oracle.grads.values()), default=0.0) if self.oracle else None)
        for name in self._trained:
            got = self._gradient(name, scale)
            expected = self._expected(lambda o, n=name: o.grads[n], got)
            # A sum that cancels nearly to zero has the rounding error of its terms, so a share of the largest is
            # allowed.
            allowed = self._tolerance.grad * max(magnitude(expected), 1e-3 * largest)
            self._found.tensors(step, "grad", name, got, expected, allowed)
            if self.oracle is not None:
                self.oracle.grads[name] = got.clone()
        self._agree()

    def _compare_numbers(self, step: int, skips: bool, lr: list[float], norm: float | None) -> None:
        last = self.engine.last_step
        if self.oracle is not None and last is not None:
            self._found.numbers(step, "skip", "the update", float(last.skipped), float(skips), 0.0)
            for group, (got, expected) in enumerate(zip(last.lr, lr, strict=True)):
                self._found.numbers(step, "lr", f"group {group}", got, expected, 1e-9 * abs(expected))
            if norm is not None and last.grad_norm is not None:
                self._found.numbers(step, "norm", "all gradients", last.grad_norm, norm, self._tolerance.grad * norm)
        self._agree()

    def _compare_parameters(self, step: int, before: dict[str, torch.Tensor]) -> None:
        for name in self._names:
            allowed = self._compare_master(step, name, before.get(name)) if name in self._trained else 0.0
            got = self._in_module(name)
            expected = self._expected(lambda o, n=name: o.params[n], got)
            # The module holds the master rounded to its dtype; two nearly equal masters may round to different values.
            rounding = torch.finfo(got.dtype).eps * magnitude(expected) if got.element_size() < 4 and allowed else 0.0
            self._found.tensors(step, "param", name, got, expected, allowed + rounding)
            if self.oracle is not None:
                self.oracle.params[name].data.copy_(got)
        self._agree()

    def _compare_master(self, step: int, name: str, before: torch.Tensor | None) -> float:
        """Compare a master, and set the oracle's master to the engine's. Returns the allowed error of the parameter."""
        got = self._master(name)
        expected = self._expected(lambda o: o.masters[name], got)
        change = (
            0.0 if before is None or self.oracle is None else magnitude(self.oracle.masters[name].detach() - before)
        )
        change = self._of_rank_0(change)
        allowed = self._tolerance.update * change + self._tolerance.param * magnitude(expected)
        self._found.tensors(step, "master", name, got, expected, allowed)
        if self.oracle is not None:
            self.oracle.masters[name].data.copy_(got)
        return allowed
