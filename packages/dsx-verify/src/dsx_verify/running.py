"""A running audit: a few updates of any training system, each beside plain torch, point by point.

The sequence of an update, on every rank:

    1) the micro-batches of all ranks go to rank 0, which computes what the update should compute (`expected.py`)
    2) the system trains; hooks note gradients before and after clipping, the learning rates, the forward passes
    3) values are compared on every rank, in the order in which a step makes them; at the first point with a difference
       rank 0 finds the kind of fault (`explaining.py`), and the audit ends
    4) rank 0 goes on from the system's gradients and parameters, so that each value is judged alone and tolerances
       stay tight: Adam makes a whole step of the rounding error of a gradient near zero
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from .case import Case, Observed
from .comparing import Judge
from .errors import AuditError
from .expected import Computed, Expected, Reference, Sample
from .explaining import explain
from .ranks import Ranks
from .receipt import Receipt, WrongStepError
from .seen import Seen, watch_forward
from .system import System, scaler_state

__all__ = ["Audit", "Step"]

Step = Callable[[list[Any]], Any]


class Audit:
    """A running audit on one rank: `update` once for each update of the system, then `receipt`.

    Args:
        system: the adapter.
        expected: what an update should compute.
        batches: (number) -> a micro-batch. Numbers count updates, then micro-batches, then data-parallel ranks.
        ranks: the ranks that take part.
        seed: of random numbers in forward passes: micro-batch n has seed + n on both sides.
    """

    def __init__(
        self,
        system: System,
        expected: Expected,
        batches: Callable[[int], Any],
        ranks: Ranks,
        receipt: Receipt,
        seed: int = 1234,
    ) -> None:
        self.system, self.expected, self._batches = system, expected, batches
        self.ranks, self.seed = ranks, seed
        self.receipt = receipt
        self.scaled_losses = False  # whether losses may be the shares of micro-batches in the mean
        self.step_number = 0
        self._reference: Reference | None = None
        self.observed = Observed()
        self._samples: list[Sample] = []
        self._may_skip = False
        self._kept: Any = None  # the oracle from before the update
        self._previous: dict[str, torch.Tensor] = {}  # parameters from before the previous update

    # - One update

    def micro_batches(self) -> list[Any]:
        """This rank's micro-batches of the coming update."""
        return [sample.batch for sample in self._samples if sample.rank == self.ranks.index]

    @contextmanager
    def update(self) -> Iterator[list[Any]]:
        """Around one update: gives this rank's micro-batches, and compares when it ends."""
        self.draw()
        with self.system.watch(self.point), watch_forward(self.system.module, self.begin_pass):
            yield self.micro_batches()
        self.end()

    def number(self, micro: int) -> int:
        """The number of this rank's micro-batch `micro` of the current update, counted over all updates and ranks."""
        return ((self.step_number - 1) * self.expected.accumulation + micro) * self.ranks.count + self.ranks.index

    def draw(self) -> None:
        """Begin an update with the samples of `batches`."""
        self.begin()
        self.share([self._batches(self.number(micro)) for micro in range(self.expected.accumulation)])

    def begin(self) -> None:
        """An update begins: note what is there before it."""
        self.observed = Observed(before=self.system.parameters(), buffers=self.system.buffers())
        self.observed.scale = self.system.loss_scale()
        self.observed.scaler = scaler_state(self.system)
        self.step_number += 1

    def share(self, batches: list[Any]) -> None:
        """Tell all ranks this rank's micro-batches of the current update."""
        own = [Sample(self.ranks.index, micro, self.number(micro), batch) for micro, batch in enumerate(batches)]
        every = {(s.micro, s.rank): s for samples in self.ranks.gather(own) for s in samples}
        if sorted({rank for _, rank in every}) != list(range(self.ranks.count)):
            raise AuditError(f"data_ranks: no rank has some of the indices below {self.ranks.count}")
        self._samples = [every[key] for key in sorted(every)]

    def begin_pass(self) -> Seen:
        """A forward pass of the system begins: give it the random numbers of its micro-batch."""
        now = self.observed
        if len(now.passes) < self.expected.accumulation:
            torch.manual_seed(self.seed + self.number(len(now.passes)))
        now.passes.append(Seen())
        return now.passes[-1]

    def current_pass(self) -> Seen:
        """The pass that `begin_pass` has begun."""
        return self.observed.passes[-1] if self.observed.passes else Seen()

    def point(self, name: str) -> None:
        """A point of an update of the system; see `System.watch`."""
        now = self.observed
        if name == "unclipped":
            now.clips += 1
            if not now.unclipped and now.scale == 1.0:
                now.unclipped = self.system.gradients()
        elif name == "before" and not now.updates:
            now.gradients, now.rates = self.system.gradients(), self.system.learning_rates()
        elif name == "after":
            now.updates += 1

    def run(self, step: Step) -> None:
        """One update by a function."""
        with self.update() as micro_batches:
            self.note_losses(step(micro_batches))

    def note_losses(self, returned: Any) -> None:
        """Note what the step returned, if it consists of losses."""
        items = returned if isinstance(returned, Sequence) else [returned]
        self.observed.losses = [
            float(item)
            for item in items
            if isinstance(item, (int, float, torch.Tensor)) and torch.tensor(item).numel() == 1
        ]

    # - Comparing

    def start(self) -> None:
        """The system's parameters must be the same on all ranks, and those of the plain model where it is asked for."""
        own = self.system.parameters()
        start = self.ranks.of_rank_0(lambda: own)
        if self.ranks.rank == 0:
            self._reference = Reference(self.expected, start, self.seed)
            if self.system.clipped:  # the oracle steps with the gradients of after clipping
                oracle = self._reference.oracle
                oracle.recipe = replace(oracle.recipe, max_norm=0.0)
        plain = self.ranks.of_rank_0(lambda: self._names(start))
        judge = Judge(0, self.ranks.rank)
        judge.names(own, plain["shapes"], plain["aliases"])
        judge.dtypes(own, self.expected.master, plain["trained"])
        for name, tensor in own.items():
            if name in start:
                judge.tensor("start", name, tensor, plain["values"].get(name, start[name]), 0.0)
        self.settle(judge, None)

    def _names(self, start: dict[str, torch.Tensor]) -> dict[str, Any]:
        reference = self._reference
        if reference is None:
            return {}
        module = self.expected.model()
        values = {n: p.detach().to(start[n].dtype) for n, p in module.named_parameters() if n in start}
        return {
            "shapes": {name: tuple(p.shape) for name, p in reference.names.items()},
            "aliases": reference.aliases,
            "trained": sorted(reference.oracle.masters),
            "values": values if self.expected.same_start else {},
        }

    def end(self) -> None:
        """An update has ended: compare."""
        now, reference, ranks = self.observed, self._reference, self.ranks
        now.after = self.system.parameters()
        buffers = dict(zip([rank for rank in self._indices()], ranks.gather(now.buffers)))
        if self.system.buffers_of_rank_0:
            buffers = {rank: dict(buffers[0]) for rank in buffers}
        now.buffers = self.system.buffers()
        computed = None
        if reference is not None:
            computed = reference.compute(self._samples, {r: dict(values) for r, values in buffers.items()})
        self._forward(computed)
        self._gradients(computed)
        self._numbers(computed)
        self._parameters(computed)
        if reference is not None:
            reference.take(now.after)
        self._previous, self._kept = now.before, None
        self.receipt.steps = self.step_number

    def _indices(self) -> list[int]:
        return self.ranks.gather(self.ranks.index)

    def _forward(self, computed: Computed | None) -> None:
        """Losses, random streams and dtypes of forward passes."""
        now, index = self.observed, self.ranks.index
        plain = self.ranks.of_rank_0(lambda: {} if computed is None else computed.forwards())
        judge = Judge(self.step_number, self.ranks.rank)
        judge.equal("accumulation", "micro-batches", len(self.micro_batches()), self.expected.accumulation)
        seen = {micro: s for (rank, micro), s in plain["seen"].items() if rank == index}
        if len(now.passes) == len(seen):
            for micro, mine in enumerate(now.passes):
                if mine.random and seen[micro].random:  # the outermost module was called on both sides
                    judge.equal("random stream", f"after micro-batch {micro}", mine.random, seen[micro].random)
                for name, dtype in seen[micro].dtypes.items():
                    if name in mine.dtypes:
                        judge.equal("dtype", f"the output of {name or 'the model'}", mine.dtypes[name], dtype)
        own = {key: loss for key, loss in sorted(plain["losses"].items()) if key[0] == index}
        shares = [plain["shares"][key] for key in own]
        parts = [(1 / len(shares), share, share * self.ranks.count, share / sum(shares)) for share in shares]
        everyone = list(plain["losses"].values())
        judge.losses(now.losses, list(own.values()), everyone, plain["noise"], parts if self.scaled_losses else None)
        self.settle(judge, computed)

    def _gradients(self, computed: Computed | None) -> None:
        """Gradients before and after clipping, each on its own."""
        now = self.observed
        plain = self.ranks.of_rank_0(lambda: {} if computed is None else computed.gradients(self.expected))
        overflows = (plain["largest"] * now.scale > 512 and now.scale > 1) or not plain["finite"]
        self._may_skip = overflows and now.updates == 0
        if self._may_skip:
            return
        judge = Judge(self.step_number, self.ranks.rank)
        judge.gradients("gradient", now.unclipped, plain["mean"], plain["allowed"])
        self.settle(judge, computed)
        clip = plain["clip"] if self.system.clipped else 1.0
        expected = {name: clip * grad for name, grad in plain["mean"].items()}
        allowed = {name: clip * limit + 1e-5 * clip * plain["sizes"][name] for name, limit in plain["allowed"].items()}
        if now.updates:
            judge.gradients("clipped gradient" if clip != 1.0 else "gradient", now.gradients, expected, allowed)
        self.settle(judge, computed)

    def _numbers(self, computed: Computed | None) -> None:
        """The number of updates, and the learning rates."""
        judge, reference, now = Judge(self.step_number, self.ranks.rank), self._reference, self.observed
        rates = self.ranks.of_rank_0(lambda: reference.oracle.lr() if reference is not None else [])
        judge.equal("number of updates", "the optimizer", now.updates, 0 if self._may_skip else 1)
        if now.updates:
            judge.rates(now.rates, rates)
        judge.scaler(now.scaler, scaler_state(self.system), skipped=not now.updates)
        self.settle(judge, computed)

    def _parameters(self, computed: Computed | None) -> None:
        """The change of each parameter, and buffers."""
        now = self.observed
        plain = self.ranks.of_rank_0(self._update_plainly)
        judge = Judge(self.step_number, self.ranks.rank)
        for name, value in plain["after"].items():
            if name in now.after:
                judge.parameter(name, now.before[name], now.after[name], value, plain["trained"])
        own = self.ranks.of_rank_0(lambda: {} if computed is None else computed.buffers).get(self.ranks.index, {})
        for name, buffer in now.buffers.items():
            if name in own:
                judge.buffer(name, buffer, own[name], plain["noise"])
        self.settle(judge, computed)

    def _update_plainly(self) -> dict[str, Any]:
        """Rank 0: step the oracle with the system's own gradients."""
        reference = self._reference
        if reference is None:
            return {}
        oracle = reference.oracle
        self._kept = oracle.twin()
        if not self._may_skip:
            oracle.grads = {
                name: self.observed.gradients.get(name, torch.zeros_like(master)).to(master.dtype)
                for name, master in oracle.masters.items()
            }
            oracle.update()
        values = {name: p.detach().clone() for name, p in oracle.params.items()}
        return {"after": values, "trained": set(oracle.masters), "noise": 16 * 2.0**-24}

    def settle(self, judge: Judge, computed: Computed | None) -> None:
        """All ranks exchange what differs, and stop together at the first point with a difference."""
        told = self.ranks.gather((judge.compared, judge.differences, judge.worst))
        for kind, count in told[0][0].items():
            self.receipt.compared[kind] = self.receipt.compared.get(kind, 0) + count
        for _, _, closest in told:
            for kind, share in closest.items():
                self.receipt.closest[kind] = max(self.receipt.closest.get(kind, 0.0), share)
        found = [difference for _, differences, _ in told for difference in differences]
        if not found:
            return
        observed = self.ranks.gather(self.observed)
        parts = (self._reference, computed, found, self._kept, self._previous)
        case = Case(self.expected, self.ranks.count, self._indices(), observed, *parts)
        self.receipt.fault = self.ranks.of_rank_0(lambda: explain(case))
        raise WrongStepError(self.receipt)
