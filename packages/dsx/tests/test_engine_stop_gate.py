"""Where all ranks stop together: after the update during which they were asked to, and not one later."""

import threading

import dsx
import pytest
import torch
from dsx.engine.report import Counters
from dsx.engine.stepper import StepGate
from dsx_checkpoint.ranks import Solo
from dsx_testkit import run_ranks


def asked_by_a_thread(gate, action, ranks=None):
    """The update that a thread's request is agreed for."""
    agreed = []
    thread = threading.Thread(target=lambda: agreed.append(gate.agree(ranks or Solo(), action)))
    thread.start()
    thread.join(timeout=30)
    return agreed[0]


def test_the_running_update_is_counted_once():
    counters, ran = Counters(), []
    gate = StepGate(counters)
    assert asked_by_a_thread(gate, lambda: ran.append("before")) == 0
    gate.begin_update()
    assert ran == ["before"]
    assert asked_by_a_thread(gate, lambda: ran.append("during")) == 1
    counters.global_steps = 1  # the update is counted, and observers run
    assert asked_by_a_thread(gate, lambda: ran.append("behind")) == 1
    assert ran == ["before"]
    gate.end_update()
    assert ran == ["before", "during", "behind"]


def test_an_update_that_was_dropped_is_not_counted():
    gate = StepGate(Counters(global_steps=3))
    gate.begin_update()
    gate.abandon_update()
    assert asked_by_a_thread(gate, lambda: None) == 3


class AsksAtTheEnd:
    """What an elastic run does between two updates; somebody asks to stop while it works."""

    def __init__(self, engine, when, ran, rank):
        self.engine, self.when, self.ran, self.rank = engine, when, ran, rank

    def after_update(self):
        from dsx_checkpoint.ranks import default_ranks

        if self.engine.global_steps == self.when:
            gate = self.engine._parts.gate
            asked_by_a_thread(gate, lambda: self.ran.append(self.engine.global_steps), default_ranks())

    def close(self):
        pass


def train_to_the_end(rank, world, steps):
    config = {"train_batch_size": world, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "steps_per_print": None}
    engine, ran = dsx.initialize(model=torch.nn.Linear(3, 2), config=config)[0], []
    engine.accompany(AsksAtTheEnd(engine, steps, ran, rank))
    for _ in range(steps):
        engine.backward(engine(torch.ones(1, 3)).sum())
        engine.step()
    return ran


@pytest.mark.parametrize("world", [1, 2])
def test_a_request_at_the_end_of_the_last_update_is_not_missed(world):
    assert run_ranks(train_to_the_end, world, 3) == [[3]] * world
