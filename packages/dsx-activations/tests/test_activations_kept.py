"""What a checkpoint holds between forward and backward: bytes, buffers that are made once, inputs that are shared."""

import gc
import logging
import weakref

import dsx_activations
import pytest
import torch
from dsx_activations.configured import current
from dsx_activations.places import HostPlace, SlotPlace
from dsx_comm.lanes import DeferringLane, HostLane, TensorBuffer


@pytest.fixture(autouse=True)
def _settings_of_before():
    yield
    dsx_activations.configure()


def chain(x, layers=4, function=torch.tanh):
    for _ in range(layers):
        x = dsx_activations.checkpoint(function, x)
    return x


def test_slots_are_used_again_and_one_buffer_is_made(caplog):
    dsx_activations.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=4)
    place = current().keeper.place
    assert isinstance(place, SlotPlace)
    made = []
    make = place._slots._make
    place._slots._make = lambda *key: made.append(key) or make(*key)
    with caplog.at_level(logging.WARNING, "dsx_activations"):
        for _ in range(3):
            chain(torch.randn(6, requires_grad=True)).sum().backward()
        dropped = chain(torch.randn(6, requires_grad=True))  # a graph that is never differentiated gives its slots back
        del dropped
        gc.collect()
        chain(torch.randn(6, requires_grad=True)).sum().backward()
    assert [key[0] for key in made] == [24] and not caplog.records
    x = torch.randn(6, requires_grad=True)
    with caplog.at_level(logging.WARNING, "dsx_activations"):
        y = chain(x, layers=6)
    assert len(caplog.records) == 1 and "number_checkpoints" in caplog.text
    y.sum().backward()
    z = x.detach().clone().requires_grad_()
    w = z
    for _ in range(6):
        w = torch.tanh(w)
    w.sum().backward()
    assert torch.equal(x.grad, z.grad)
    dsx_activations.reset()
    chain(torch.randn(6, requires_grad=True)).sum().backward()


def test_an_input_of_several_checkpoints_is_kept_once():
    dsx_activations.configure(None, checkpoint_in_cpu=True, lane=HostLane())
    puts = []
    place = current().keeper.place
    put = place.put
    place.put = lambda flat: puts.append(flat.numel()) or put(flat)
    x, mask = torch.randn(8, requires_grad=True), torch.rand(5) + 1

    def function(x, mask):
        return torch.tanh(x) * mask.sum()

    y = x
    for _ in range(3):
        y = dsx_activations.checkpoint(function, y, mask)
    assert puts.count(5) == 1 and puts.count(8) == 3
    y.sum().backward()
    mask.mul_(2)  # another value: kept again
    dsx_activations.checkpoint(function, x, mask).sum().backward()
    assert puts.count(5) == 2


def test_the_device_keeps_two_inputs_and_the_copies_come_back_one_ahead():
    lane = DeferringLane()
    dsx_activations.configure(None, checkpoint_in_cpu=True, lane=lane)
    known, backs = [], []

    def function(x):
        known.append(weakref.ref(x))
        return torch.tanh(x)

    start, place = torch.randn(64, requires_grad=True), current().keeper.place
    assert isinstance(place, HostPlace)
    y = start * 1
    for _ in range(5):
        y = dsx_activations.checkpoint(function, y)
    gc.collect()
    alive = [ref() is not None for ref in known]
    assert alive.count(True) <= 2, alive
    submit = lane.submit
    lane.submit = lambda job: backs.append(len(known)) or submit(job)
    y.sum().backward()
    # Two are still on the device. The fetch for a checkpoint is submitted before the one behind it runs again.
    assert backs == [6, 7, 8], backs
    assert torch.isfinite(start.grad).all()


def test_poisoned_staging_is_never_read():
    """A lane that runs late and poisons what is given back leaves the gradients alone."""
    lane = DeferringLane()
    dsx_activations.configure(None, checkpoint_in_cpu=True, lane=lane)
    x = torch.randn(16, requires_grad=True)
    y = chain(x * 1)
    lane.free_after_use(TensorBuffer(torch.zeros(3)))
    y.sum().backward()
    z = x.detach().clone().requires_grad_()
    w = z * 1
    for _ in range(4):
        w = torch.tanh(w)
    w.sum().backward()
    assert torch.equal(x.grad, z.grad)


def test_nested_inputs_are_not_kept_in_the_forward_pass():
    dsx_activations.configure(None, checkpoint_in_cpu=True, lane=HostLane())
    known = []

    def inner(x):
        known.append(weakref.ref(x))
        return torch.tanh(x)

    def outer(x):
        for _ in range(3):
            x = dsx_activations.checkpoint(inner, x * 1)
        return x

    x = torch.randn(16, requires_grad=True)
    y = dsx_activations.checkpoint(outer, x)
    gc.collect()
    assert not any(ref() is not None for ref in known)
    y.sum().backward()
