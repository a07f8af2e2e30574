"""Handles that nobody waits for: the call is carried out, and then nothing of it is kept."""

import gc
import time
import weakref

import dsx_comm.shm.work
import dsx_comm.works
import pytest
import torch
from dsx_comm.shm import native
from dsx_testkit import run_ranks


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    return condition()


def noted():
    """From now on this rank notes the handles and works that are made; gives a function that lists those not done."""
    made = []
    for kind in (dsx_comm.works.Handle, dsx_comm.shm.work.ShmWork):

        def make(self, *arguments, _make=kind.__init__, **named):
            _make(self, *arguments, **named)
            made.append(weakref.ref(self))  # whole only now: another thread may look at any moment

        kind.__init__ = make
    return lambda: [one for one in (ref() for ref in list(made)) if one is not None and not one._done]


def sends(rank, n):
    """Messages larger than what sockets and mailboxes hold: they must go on after their handles are gone."""
    kept = noted()
    for number in range(5):
        dsx_comm.isend(torch.full((300_000,), float(10 * rank + number)), 1 - rank, tag=number)
    gc.collect()
    time.sleep(0.2)
    for number in range(5):
        got = torch.empty(300_000)
        dsx_comm.recv(got, 1 - rank, tag=number)
        assert got.unique().tolist() == [10.0 * (1 - rank) + number]
    assert until(lambda: not kept()), "a dropped send is kept for ever"


@pytest.mark.parametrize("backend", ["gloo", "dsx"])
def test_dropped_sends_arrive_and_let_go(backend):
    run_ranks(sends, 2, backend=backend)


def receives(rank, n):
    tensor = torch.zeros(300_000)
    dsx_comm.irecv(tensor, 1 - rank)
    gc.collect()
    dsx_comm.send(torch.full((300_000,), rank + 1.0), 1 - rank)
    assert until(lambda: tensor[-1].item() == 2.0 - rank)


@pytest.mark.parametrize("backend", ["gloo", "dsx"])
def test_a_dropped_receive_arrives(backend):
    run_ranks(receives, 2, backend=backend)


CALLS = {
    "all_reduce": lambda t, out: dsx_comm.all_reduce(t, async_op=True),
    "all_reduce in two phases": lambda t, out: dsx_comm.all_reduce(t, async_op=True),
    "reduce_scatter": lambda t, out: dsx_comm.reduce_scatter_tensor(out, t, async_op=True),
    "mean": lambda t, out: dsx_comm.all_reduce(t, dsx_comm.ReduceOp.AVG, async_op=True),
}


def collectives(rank, n, name):
    dtype = torch.bfloat16 if "two phases" in name else torch.float32
    total = 1.5 if name == "mean" else 3.0
    held = []

    def one_call():
        tensor, out = torch.full((60_000,), rank + 1.0, dtype=dtype), torch.zeros(60_000 // n)
        CALLS[name](tensor, out)  # the handle is dropped
        result = out if name == "reduce_scatter" else tensor
        assert until(lambda: bool((result == total).all())), "the result of a dropped call never came"
        held.extend([weakref.ref(tensor), weakref.ref(out)])

    for _ in range(5):
        one_call()
    assert until(lambda: not any(ref() is not None for ref in held)), "a dropped call keeps its tensors for ever"
    dsx_comm.barrier()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", ["gloo", "dsx"])
def test_dropped_collectives_are_carried_out(backend, name):
    run_ranks(collectives, 2, name, backend=backend)


def many(rank, n):
    """As in fire and forget: nothing piles up while a program runs."""
    kept = noted()
    for _ in range(200):
        dsx_comm.all_reduce(torch.ones(100, dtype=torch.bfloat16), async_op=True)
    assert until(lambda: not kept()), len(kept())
    dsx_comm.barrier()


@pytest.mark.parametrize("backend", ["gloo", "dsx"])
def test_nothing_piles_up(backend):
    run_ranks(many, 2, backend=backend)


def failing(rank, n, words):
    import logging
    from datetime import timedelta

    said, kept = [], noted()
    logging.getLogger("dsx_comm").addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())
    group = dsx_comm.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        dsx_comm.all_reduce(torch.ones(4), group=group, async_op=True)
        assert until(lambda: said)
        assert "handle was dropped has failed" in said[0] and words in said[0], said
    dsx_comm.barrier()
    assert not kept()


COMPILED = pytest.mark.skipif(native.module() is None, reason=f"no compiled module: {native.reason()}")
BACKENDS = [pytest.param("dsx", "did not come within 1 s", marks=COMPILED), ("gloo", "1000ms")]


@pytest.mark.parametrize(("backend", "words"), BACKENDS)
def test_a_dropped_call_that_fails_is_logged(backend, words):
    run_ranks(failing, 2, words, backend=backend)
