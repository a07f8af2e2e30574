"""Where the host does not read the norm (on a device, without a check for overflow), the words of a step travel while
the host launches its part of the norm; they are read before anything is written, so that late needs are still served.
"""

from __future__ import annotations

import threading

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks, tiny, together
from dsx_zero.order.agreed import AgreedOrder
from dsx_zero.order.channel import ControlChannel
from dsx_zero.step.norm import StepNorm

PATIENCE = 5.0


class Words:
    """Words of two ranks, which are threads. It takes part in the order of events that `log` shows."""

    def __init__(self):
        self.changed, self.rounds, self.log = threading.Condition(), [[], []], []

    def note(self, *event):
        with self.changed:
            self.log.append(event)
            self.changed.notify_all()

    def until(self, ready):
        with self.changed:
            assert self.changed.wait_for(ready, PATIENCE), "waited for ever"


class Rank:
    def __init__(self, words, rank):
        self.words, self.rank, self.gradients, self.sums = words, rank, {}, 0

    def exchange(self, words):
        return self.post(words)()

    def post(self, words):
        with self.words.changed:
            self.words.rounds[self.rank].append(words)
            turn = len(self.words.rounds[self.rank])
            self.words.changed.notify_all()
        self.words.note("post", self.rank)

        def read():
            self.words.until(lambda: all(len(r) >= turn for r in self.words.rounds))
            self.words.note("read", self.rank)
            return [r[turn - 1] for r in self.words.rounds]

        return read

    def run_gather(self, unit):
        raise AssertionError("nothing is gathered")

    holds = held = waits_for = discard = run_gather

    def run_reduce(self, unit):
        self.sums += self.gradients.pop(unit, 0)


def test_work_of_the_step_is_done_before_the_other_rank_has_said_its_word():
    words = Words()
    ranks = [Rank(words, rank) for rank in range(2)]
    orders = [AgreedOrder(rank, rank) for rank in ranks]

    def first():
        orders[0].boundary(list, meanwhile=lambda: words.note("norm", 0))

    def second():
        words.until(lambda: ("norm", 0) in words.log)  # never, if rank 0 waited for this rank's word before
        orders[1].boundary(list, meanwhile=lambda: words.note("norm", 1))

    together(first, second)
    assert [event for event in words.log if event[1] == 0] == [("post", 0), ("norm", 0), ("read", 0)]


def test_gradients_that_come_late_are_in_the_last_call():
    words = Words()
    ranks = [Rank(words, rank) for rank in range(2)]
    orders = [AgreedOrder(rank, rank) for rank in ranks]
    seen = [[], []]
    ranks[1].gradients = {3: 5, 1: 7}

    def step(rank):
        mine = ranks[rank]
        orders[rank].boundary(lambda: list(mine.gradients), meanwhile=lambda: seen[rank].append(mine.sums))

    together(lambda: step(0), lambda: step(1))
    assert seen[1] == [12]  # it has reduced all that it had before its own word
    assert seen[0] == [0, 0, 0]  # once more after each reduction of the other rank
    assert len(words.rounds[0]) == 3


def test_an_error_meanwhile_leaves_the_channel_in_step():
    words = Words()
    ranks = [Rank(words, rank) for rank in range(2)]
    orders = [AgreedOrder(rank, rank) for rank in ranks]

    def fails():
        raise OSError("no norm")

    def step(order):
        with pytest.raises(OSError, match="no norm"):
            order.boundary(list, meanwhile=fails)
        order.boundary(list, meanwhile=lambda: None)

    together(*(lambda order=order: step(order) for order in orders))
    assert [len(r) for r in words.rounds] == [2, 2]


# The same over gloo, as if the tensors were on a device --------------------------------------------------------------


def trained(rank, world, stage, apart, events=None):
    """Training with all that ranks may do differently: a skipped layer, one more backward, gradients that come late."""
    with pytest.MonkeyPatch.context() as patch:
        if apart:  # what a CUDA device without a check for overflow says
            patch.setattr(StepNorm, "host_reads", lambda self: False)
        model, optimizer = dsx_zero.shard(
            tiny.SkippingMLP(depth=4),
            lambda p: torch.optim.AdamW(p, lr=0.01),
            config={"stage": stage, "stage3_param_persistence_threshold": 0},
            precision=dsx_zero.Precision(check_overflow=False),
        )
        norms = []
        for step in range(9):
            x, y = model.example(3, seed=10 * step + rank)
            for _ in range(2 if rank == 1 and step in (4, 6, 7) else 1):
                torch.nn.functional.mse_loss(model(x, rank == 0 and step in (5, 6)), y).backward()
            if events is not None:
                events(step)
            norms.append(optimizer.step(max_norm=0.05).grad_norm)
            optimizer.zero_grad()
        with dsx_zero.GatheredParameters(model):
            return norms, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_differ_train_alike_on_both_ways(stage):
    with_word = run_ranks(trained, 2, stage, False)
    apart = run_ranks(trained, 2, stage, True)
    for (norms, want), (others, got) in zip(with_word, apart, strict=True):
        assert others == pytest.approx(norms, rel=1e-6)
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(got, want, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(apart[0][1], apart[1][1], strict=True))


def recorded(rank, world, stage):
    """What the host does in a step whose order is frozen."""
    from dsx_zero.step import norm as module

    log, post, squares = [], ControlChannel.post, module.sum_of_squares

    def posting(self, words):
        log.append("word")
        read = post(self, words)

        def reading():
            log.append("read")
            return read()

        return reading

    def summing(*args, **kwargs):
        log.append("norm")
        return squares(*args, **kwargs)

    step = torch.optim.AdamW.step

    def writing(self, *args, **kwargs):
        log.append("write")
        return step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ControlChannel, "post", posting)
        patch.setattr(module, "sum_of_squares", summing)
        patch.setattr(torch.optim.AdamW, "step", writing)
        trained(rank, world, stage, True, lambda number: log.clear())
    return log


@pytest.mark.parametrize("stage", [2, 3])
def test_the_word_is_read_between_the_norm_and_the_first_write(stage):
    for log in run_ranks(recorded, 2, stage):
        assert log[: log.index("write") + 1] == ["word", "norm", "read", "write"]
