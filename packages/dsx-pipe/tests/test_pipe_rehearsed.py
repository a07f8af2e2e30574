"""Letters of a rehearsed pipeline: a rank receives what its neighbour has sent. Guessed letters are right where stages
have equal shapes, and a wrong one is refused.
"""

import dsx_comm
import pytest
import torch
from dsx_pipe import Pipeline, PipelineError, build
from dsx_pipe.runtime.rehearsed import Letter, RehearsedMail, keys_between
from torch import nn


class LetterObserver(dsx_comm.RehearsalObserver):
    """Passes the messages of a rehearsal to a `RehearsedMail`."""

    def __init__(self, mail):
        self.mail = mail

    def received(self, tensor, source, tag):
        if not self.mail.take(tensor, source, tag):
            tensor.zero_()

    def sent(self, tensor, destination, tag):
        self.mail.note(tensor, destination, tag)


def rehearsed(rank, known, sizes, schedule="1f1b", steps=2, micro_batches=3):
    """The mail of one rank whose stages are linear layers of these (inputs, outputs)."""
    plan = build(schedule, 2, micro_batches)
    mail = RehearsedMail(known)
    with dsx_comm.rehearse(2, rank, observer=LetterObserver(mail)):
        stages = [nn.Linear(*sizes[stage]) for stage in plan.stages_of(rank)]
        pipe = Pipeline(stages, plan, loss_fn=lambda x, _: x.square().mean(), nonfinite="ignore")
        mail.begin(pipe)
        for _ in range(steps):
            pipe.train_batch(iter([(torch.ones(2, sizes[0][0]), torch.ones(2, 1))] * micro_batches))
    return mail


def test_guessed_letters_are_those_that_the_neighbour_sends():
    sizes = [(8, 4), (4, 6)]
    first = rehearsed(0, {}, sizes)
    second = rehearsed(1, {0: first.sent[1]}, sizes)
    assert second.given[0] == first.sent[1]
    assert first.given[1] == second.sent[0]
    assert {letter.words is None for letter in first.sent[1]} == {True, False}
    payloads = [letter for letter in first.sent[1] if letter.words is None]
    assert [letter.size for letter in payloads] == [4 * 2 * 4] * 6


def test_guesses_with_two_stages_per_rank_are_right_for_equal_shapes_and_refused_otherwise():
    """Rank 0 guesses that the input of its stage 2 has the shape of stage 1's input."""
    right, wrong = [(8, 4), (4, 4), (4, 4), (4, 2)], [(8, 4), (4, 8), (8, 4), (4, 2)]
    first = rehearsed(0, {}, right, "interleaved", micro_batches=4)
    second = rehearsed(1, {0: first.sent[1]}, right, "interleaved", micro_batches=4)
    assert first.given[1] == second.sent[0] and second.given[0] == first.sent[1]
    with pytest.raises(PipelineError, match="shapes"):
        rehearsed(0, {}, wrong, "interleaved", micro_batches=4)


def test_letters_in_another_order_are_refused():
    known = {0: [Letter(12, 3, b"abc")]}
    with pytest.raises(Exception, match="rank 0 sends"):
        rehearsed(1, known, [(8, 4), (4, 6)])
    with pytest.raises(Exception, match="nothing more"):
        rehearsed(1, {0: []}, [(8, 4), (4, 6)])


def test_keys_follow_the_schedule():
    plan = build("1f1b", 2, 3)
    assert [key.micro_batch for key in keys_between(plan, 0, 1)] == [0, 1, 2]
    assert all(not key.backward and key.stage == 1 for key in keys_between(plan, 0, 1))
    assert all(key.backward and key.stage == 0 for key in keys_between(plan, 1, 0))
