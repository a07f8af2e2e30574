"""The tensors of a micro-batch are freed when its backward is over, without a run of Python's garbage collector."""

import gc
import weakref

import dsx_comm  # noqa: F401  (registers the shared-memory backend before ranks are forked)
import pytest
from dsx_pipe import Pipeline, build
from dsx_pipe.runtime.structure import flatten, unflatten
from dsx_testkit import run_ranks
from torch import nn, randn

WIDTH, MICRO_BATCHES = 6, 4


@pytest.fixture(autouse=True)
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Watched(nn.Module):
    """Takes and returns a dictionary of tensors, and notes a weak reference to each input."""

    def __init__(self, seen):
        super().__init__()
        self.linear, self.seen = nn.Linear(WIDTH, WIDTH), seen

    def forward(self, value):
        x = value["x"] if isinstance(value, dict) else value
        self.seen.append(weakref.ref(x))
        return {"x": self.linear(x), "more": [None, (1, "text")]}


def loss_of(value, labels):
    return nn.functional.mse_loss(value["x"], labels)


def freed_inputs(rank, world):
    gc.disable()
    seen = []
    pipe = Pipeline([Watched(seen)], build("1f1b", world, MICRO_BATCHES), loss_fn=loss_of)
    for _ in range(2):
        pipe.step(randn(8, WIDTH), randn(8, WIDTH))
    return [ref() is None for ref in seen]


def test_inputs_that_a_stage_received_are_freed():
    # Only the second stage: the inputs of the first are the user's data, which the pipeline keeps until the next step.
    assert run_ranks(freed_inputs, 2, backend="gloo")[1] == [True] * 2 * MICRO_BATCHES


def test_flatten_and_unflatten_keep_no_reference_to_a_value():
    value = {"a": randn(3), "b": [randn(2), (randn(1), "text")]}
    held = [weakref.ref(tensor) for tensor in flatten(value)[1]]
    again = unflatten(*flatten(value))
    assert again["b"][1][1] == "text" and again["a"] is value["a"]
    del value, again
    assert [ref() for ref in held] == [None] * 3
