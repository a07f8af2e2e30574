"""`step_agreement: norm`: in a step whose order is frozen the ranks agree by numbers in the norm's all-reduce, and
send no words. Where they differ in anything, they agree by words as ever.
"""

from __future__ import annotations

import threading

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks, tiny, together
from dsx_zero.order.agreed import AgreedOrder, ScheduleDivergence
from dsx_zero.order.channel import ControlChannel
from dsx_zero.order.schedule import Pass
from dsx_zero.order.sums import all_say_the_same, declining_row, row_of
from dsx_zero.step.norm import SquaresAndRows, StepNorm

PATIENCE = 5.0


# Arithmetic ----------------------------------------------------------------------------------------------------------


def added(rows):
    total = torch.tensor(rows, dtype=torch.float64).sum(0)
    return total.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3, 64, 1025])
@pytest.mark.parametrize("values", [(0, 0), (2**64 - 1, 2**31 - 1), (0x1234_5678_9ABC_DEF0, 7)])
def test_ranks_that_say_the_same_agree_and_one_that_differs_in_a_bit_is_seen(ranks, values):
    assert all_say_the_same(added([row_of(values)] * ranks), ranks)
    if ranks == 1:
        return
    for bit in range(128):
        other = [
            value ^ (1 << bit - 64 * place if 0 <= bit - 64 * place < 64 else 0) for place, value in enumerate(values)
        ]
        for many in {1, ranks // 2, ranks - 1}:
            rows = [row_of(other)] * many + [row_of(values)] * (ranks - many)
            assert not all_say_the_same(added(rows), ranks), (bit, many)


def test_numbers_around_their_mean_are_seen_by_the_rank_in_the_middle_too():
    assert not all_say_the_same(added([row_of([1]), row_of([2]), row_of([3])]), 3)


def test_sums_are_exact_for_two_million_ranks():
    row = torch.tensor(row_of([2**64 - 1]), dtype=torch.float64)
    assert all_say_the_same((row * 2**21).tolist(), 2**21)
    assert not all_say_the_same((row * (2**21 - 1) + torch.tensor(row_of([2**64 - 2]))).tolist(), 2**21)


def test_a_rank_that_declines_is_seen():
    assert len(declining_row(2)) == len(row_of([3, 4]))
    assert not all_say_the_same(added([row_of([0, 0]), declining_row(2)]), 2)


# The order, by threads -----------------------------------------------------------------------------------------------


class Meeting:
    """Rounds of two ranks, which are threads: of words, and of rows."""

    def __init__(self):
        self.changed, self.said = threading.Condition(), {"word": [[], []], "row": [[], []]}

    def say(self, what, rank, content):
        with self.changed:
            self.said[what][rank].append(content)
            turn = len(self.said[what][rank])
            self.changed.notify_all()
        return turn

    def heard(self, what, turn):
        with self.changed:
            ready = self.changed.wait_for(lambda: all(len(s) >= turn for s in self.said[what]), PATIENCE)
            assert ready, f"waited for ever for a {what}"
            return [said[turn - 1] for said in self.said[what]]


class Rank:
    """The channel, the executor and the sums of one rank."""

    ranks = 2

    def __init__(self, meeting, rank):
        self.meeting, self.rank, self.ran, self.pending = meeting, rank, [], []

    def exchange(self, words):
        return self.post(words)()

    def post(self, words):
        turn = self.meeting.say("word", self.rank, words)
        return lambda: self.meeting.heard("word", turn)

    def add_up(self, row):
        return added(self.meeting.heard("row", self.meeting.say("row", self.rank, row)))

    def take_part(self, row):
        self.meeting.say("row", self.rank, row)

    def run_gather(self, unit):
        self.ran.append(("gather", unit))

    def run_reduce(self, unit):
        self.ran.append(("reduce", unit))
        if unit in self.pending:
            self.pending.remove(unit)

    def holds(self, unit):
        return True

    def held(self):
        return ()

    def waits_for(self, unit):
        return False

    def discard(self, unit):
        self.ran.append(("discard", unit))


def frozen_orders():
    """Two orders with a schedule of one gather and one reduction, which agree by sums from now on."""
    meeting = Meeting()
    ranks = [Rank(meeting, rank) for rank in range(2)]
    orders = [AgreedOrder(rank, rank) for rank in ranks]
    for order, rank in zip(orders, ranks, strict=True):
        order.agree_by(rank)
    for _ in range(2):
        together(*(lambda order=order: evaluation(order) for order in orders))
    for _ in range(3):
        together(*(lambda order=order: usual_step(order) for order in orders))
    for said in meeting.said.values():
        for each in said:
            each.clear()
    for rank in ranks:
        rank.ran.clear()
    return meeting, ranks, orders


def usual_step(order):
    begin(order)
    order.boundary(list)


def begin(order):
    order.gather(0)
    order.end_forward()
    order.reduce(0)
    order.end_backward()


def evaluation(order):
    order.gather(3, during=Pass.EVALUATION)
    order.end_forward(during=Pass.EVALUATION)


def test_a_usual_step_sends_one_row_and_no_word():
    meeting, ranks, orders = frozen_orders()
    together(*(lambda order=order: usual_step(order) for order in orders))
    assert meeting.said["word"] == [[], []]
    assert [len(rows) for rows in meeting.said["row"]] == [1, 1]
    assert ranks[0].ran == ranks[1].ran == [("gather", 0), ("reduce", 0)]
    assert all(order.schedule is not None for order in orders)


def test_a_rank_that_needs_more_is_served_by_one_that_waits_in_the_sums():
    meeting, ranks, orders = frozen_orders()
    seen = []

    def needs_more():
        begin(orders[0])
        orders[0].gather(5)
        seen.append(list(ranks[0].ran))
        orders[0].boundary(list)

    together(needs_more, lambda: usual_step(orders[1]))
    assert seen == [[("gather", 0), ("reduce", 0), ("gather", 5)]]
    assert ranks[1].ran == [("gather", 0), ("reduce", 0), ("gather", 5), ("discard", 5)]
    assert [len(rows) for rows in meeting.said["row"]] == [1, 1]  # one each: by declining, or at the boundary
    together(*(lambda order=order: usual_step(order) for order in orders))
    assert [len(rows) for rows in meeting.said["row"]] == [2, 2]
    assert [len(words) for words in meeting.said["word"]] == [2, 2]  # of the step before


def test_a_rank_that_evaluates_alone_is_served_before_it_ends():
    _, ranks, orders = frozen_orders()
    assert orders[0].evaluation_schedule is not None
    served = threading.Event()
    ranks[1].run_gather = lambda unit, right=ranks[1].run_gather: (right(unit), unit == 3 and served.set())

    def evaluates_and_steps():
        begin(orders[0])
        orders[0].gather(3, during=Pass.EVALUATION)
        assert served.wait(PATIENCE)  # as a gather, which ends only if the other rank takes part
        orders[0].end_forward(during=Pass.EVALUATION)
        orders[0].boundary(list)

    together(evaluates_and_steps, lambda: usual_step(orders[1]))
    assert ranks[1].ran.count(("gather", 3)) == 1


def test_late_gradients_are_reduced_and_the_norm_is_computed_again():
    meeting, ranks, orders = frozen_orders()
    ranks[1].pending = [7]
    again = []

    def step(rank):
        begin(orders[rank])
        orders[rank].boundary(lambda: list(ranks[rank].pending), meanwhile=lambda: again.append(rank))

    together(lambda: step(0), lambda: step(1))
    assert ranks[0].ran[-1] == ranks[1].ran[-1] == ("reduce", 7)
    assert set(again) == {0, 1}
    assert [len(rows) for rows in meeting.said["row"]] == [1, 1]


def test_two_steps_with_deviations_end_the_sums_until_the_order_is_frozen_again():
    meeting, _ranks, orders = frozen_orders()

    def deviating(rank):
        begin(orders[rank])
        if rank == 0:
            orders[0].gather(5)
        orders[rank].boundary(list)

    for _ in range(2):
        together(lambda: deviating(0), lambda: deviating(1))
    assert all(order.schedule is None for order in orders)
    counts = []
    for _ in range(4):
        together(*(lambda order=order: usual_step(order) for order in orders))
        counts.append([len(rows) for rows in meeting.said["row"]])
    assert counts == [[2, 2], [2, 2], [3, 3], [4, 4]]


def test_ranks_that_executed_different_operations_raise_on_both():
    _meeting, _ranks, orders = frozen_orders()
    raised = []

    def step(rank):
        begin(orders[rank])
        if rank == 1:
            orders[rank]._executed.pop()  # a defect: it has lost a reduction
        with pytest.raises(ScheduleDivergence, match="different collectives"):
            orders[rank].boundary(list)
        raised.append(rank)

    together(lambda: step(0), lambda: step(1))
    assert sorted(raised) == [0, 1]


# Training ------------------------------------------------------------------------------------------------------------


def evaluate(model, x, times):
    with torch.no_grad(), dsx_zero.uneven_forwards(model):
        for _ in range(times):
            model(x)


def trained(rank, world, stage, agreement, overflow=False, differs=True):
    """Training with all that ranks may do differently, and evaluation between the steps."""
    model, optimizer = dsx_zero.shard(
        tiny.SkippingMLP(depth=4),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        config={"stage": stage, "stage3_param_persistence_threshold": 0, "step_agreement": agreement},
        precision=dsx_zero.Precision(check_overflow=overflow),
    )
    seen = []
    for step in range(14):
        x, y = model.example(3, seed=10 * step + rank)
        if differs and step in (5, 10):
            evaluate(model, x, rank + step % 2)
        factor = float("inf") if overflow and rank == 1 and step == 9 else 1.0
        for _ in range(2 if differs and rank == 1 and step in (4, 6, 7) else 1):
            (factor * torch.nn.functional.mse_loss(model(x, differs and rank == 0 and step in (5, 6)), y)).backward()
        if differs and rank == 0 and step == 12:
            with dsx_zero.GatheredParameters(model.layers[0].weight):
                model.layers[0].weight.sum()
        outcome = optimizer.step(max_norm=0.05)
        seen.append((outcome.overflow, outcome.grad_norm))
        optimizer.zero_grad()
    with dsx_zero.GatheredParameters(model):
        return seen, [p.detach().clone() for p in model.parameters()]


def compare(found, wanted):
    for (seen, got), (expected, want) in zip(found, wanted, strict=True):
        assert [overflow for overflow, _ in seen] == [overflow for overflow, _ in expected]
        assert [norm for _, norm in seen] == pytest.approx([norm for _, norm in expected], rel=1e-6, nan_ok=True)
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(got, want, strict=True))
    for _, got in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, found[0][1], strict=True))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_differ_train_as_with_messages(stage, world):
    compare(run_ranks(trained, world, stage, "norm"), run_ranks(trained, world, stage, "message"))


def test_ranks_in_shared_memory_train_as_with_messages():
    found, wanted = (run_ranks(trained, 2, 3, agreement, backend="dsx") for agreement in ("norm", "message"))
    compare(found, wanted)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_that_overflows_is_skipped_by_all_ranks(stage):
    found = run_ranks(trained, 2, stage, "norm", True, False)
    assert [step for step, (overflow, _) in enumerate(found[0][0]) if overflow] == [9]
    compare(found, run_ranks(trained, 2, stage, "message", True, False))


def counted(rank, world, stage, agreement):
    """How many rounds of words, and how many all-reduces of rows, the last steps take."""
    counts = {"words": 0, "sums": 0, "declined": 0}

    def counting(owner, method, key):
        right = getattr(owner, method)

        def wrapped(self, *args):
            counts[key] += 1
            return right(self, *args)

        patch.setattr(owner, method, wrapped)

    with pytest.MonkeyPatch.context() as patch:
        counting(ControlChannel, "post", "words")
        counting(SquaresAndRows, "add_up", "sums")
        counting(SquaresAndRows, "take_part", "declined")
        trained(rank, world, stage, agreement, differs=False)
    return counts


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_steps_send_no_words(stage):
    with_norm, with_messages = (run_ranks(counted, 2, stage, agreement) for agreement in ("norm", "message"))
    for found, other in zip(with_norm, with_messages, strict=True):
        assert found["sums"] == 12  # of 14 steps, since two showed the order
        assert other["words"] - found["words"] == 12
        assert found["declined"] == (stage == 3)  # where parameters are gathered at the end
        assert other["sums"] == other["declined"] == 0


def shard_with(stage, agreement):
    config = {"stage": stage, "step_agreement": agreement}
    return dsx_zero.shard(tiny.MLP(), lambda p: torch.optim.SGD(p, lr=0.1), config=config)


def refused(rank, world, agreement, host_reads):
    """Edits that differ are refused by both ranks, before anything is written."""
    with pytest.MonkeyPatch.context() as patch:
        if not host_reads:  # what a CUDA device without a check for overflow says
            patch.setattr(StepNorm, "host_reads", lambda self: False)
        refuse_edits(*shard_with(2, agreement), rank)


def refuse_edits(model, optimizer, rank):
    for step in range(5):
        x, y = model.example(3, seed=10 * step + rank)
        torch.nn.functional.mse_loss(model(x), y).backward()
        if step == 4:
            if rank == 1:
                with torch.no_grad():
                    next(model.parameters()).mul_(0.5)
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(dsx_zero.ZeroStateError, match="not alike on all ranks"):
                optimizer.step()
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
            return
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("agreement", "host_reads"), [("norm", True), ("message", True), ("message", False)])
def test_edits_that_differ_are_refused(agreement, host_reads):
    run_ranks(refused, 2, agreement, host_reads)


def unfrozen(rank, world, agreement):
    """A layer that trains later, clipping by hand, and an accumulation that one rank does not do."""
    model = tiny.MLP()
    late = next(model.parameters())
    late.requires_grad_(False)
    model, optimizer = dsx_zero.shard(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), config={"stage": 3, "step_agreement": agreement}
    )
    losses = []
    for step in range(12):
        if step == 5:
            next(model.parameters()).requires_grad_(True)
        x, y = model.example(3, seed=10 * step + rank)
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        if step % 3 == 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_layer_that_trains_later_and_clipping_by_hand():
    for got, want in zip(run_ranks(unfrozen, 2, "norm"), run_ranks(unfrozen, 2, "message"), strict=True):
        assert got == pytest.approx(want, rel=1e-5)


# Settings ------------------------------------------------------------------------------------------------------------


def test_stage_0_has_no_such_all_reduce():
    with pytest.raises(dsx_zero.ZeroConfigError, match=r"step_agreement.*got 'norm'.*stage 0.*use stage 1, 2 or 3"):
        shard_with(0, "norm")


def test_another_value_is_refused():
    with pytest.raises(ValueError, match=r"step_agreement"):
        shard_with(1, "words")


@pytest.mark.parametrize("stage", [1, 3])
def test_one_rank_has_nothing_to_agree_on(stage):
    model, optimizer = shard_with(stage, "norm")
    x, y = model.example(3)
    for _ in range(4):
        torch.nn.functional.mse_loss(model(x), y).backward()
        assert optimizer.step().grad_norm > 0
        optimizer.zero_grad()
