"""How buffers travel is a transport: one of our own needs no other place than its class, and every kind overlaps."""

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_comm.lanes import DeferringLane
from dsx_testkit import assert_close_named, run_ranks, tiny
from dsx_zero.transports.protocol import Stateless, Then


class Negated:
    """Sends every value with the other sign. `sent` counts the messages."""

    def __init__(self):
        self.sent = {"gather": 0, "reduce": 0}

    def gather(self, sets):
        return NegatedGather(self.sent)

    def reduce(self, op, ranks, *, scatters):
        return NegatedReduce(self.sent, op, scatters)


class NegatedGather(Stateless):
    def __init__(self, sent):
        self._sent = sent

    def start(self, out, source, group, label):
        self._sent["gather"] += 1
        message = -source
        work = dsx_comm.all_gather_into_tensor(out, message, group=group.ranks.gather_group, async_op=True)
        return Then([work], out.neg_, keeps=message)


class NegatedReduce(Stateless):
    def __init__(self, sent, op, scatters):
        self._sent, self._op, self._scatters = sent, op, scatters

    def result_dtype(self, source, group):
        return source

    def start(self, out, source, group, label):
        self._sent["reduce"] += 1
        message = -source
        call = dsx_comm.reduce_scatter_tensor if self._scatters else dsx_comm.all_reduce
        arguments = (torch.empty_like(out), message) if self._scatters else (message,)
        work = call(*arguments, op=self._op, group=group.ranks.group, async_op=True)
        return Then([work], lambda: torch.neg(arguments[0], out=out), keeps=message)


def train(rank, world, stage, transports, precision=None, **config):
    torch.manual_seed(0)
    model = tiny.TinyGPT()
    model, optimizer = dsx_zero.shard(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        config={"stage": stage, "stage3_param_persistence_threshold": 0, **config},
        transports=transports,
        precision=precision,
    )
    losses = []
    for step in range(3):
        loss = model.loss(*model.example(4, seed=10 * step + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {s.name: s.param.clone() for s in optimizer.slices()}


def toy(rank, world):
    for stage in range(4):
        mine = Negated()
        losses, found = train(rank, world, stage, mine)
        want_losses, want = train(rank, world, stage, None)
        assert losses == want_losses
        assert_close_named(found, want, rtol=0, atol=0)
        assert mine.sent["reduce"] > 0 and (mine.sent["gather"] > 0) == (stage == 3)


@pytest.mark.parametrize("world", [2, 4])
def test_a_transport_of_our_own_is_one_class(world):
    run_ranks(toy, world)


def overlapping(rank, world):
    from dsx_comm.works import Handle
    from dsx_zero.grads.reductions import Reductions

    launching, waited, launched = [], [], []
    wait, launch = Handle.wait, Reductions._start

    def watched_wait(self, *arguments):
        waited.extend(launching)
        return wait(self, *arguments)

    def watched_launch(self, *arguments):
        launched.append(self)
        launching.append(self)
        launch(self, *arguments)
        launching.clear()

    Handle.wait, Reductions._start = watched_wait, watched_launch
    for stage in range(4):
        train(rank, world, stage, None, reduce_bucket_size=64)
        train(rank, world, stage, None, precision=dsx_zero.Precision(communication=torch.float64))
    assert len(launched) > 20 and not waited


def test_a_message_that_is_cut_or_cast_is_not_waited_for_where_it_starts():
    run_ranks(overlapping, 2)


def deferred(rank, world):
    """On a lane that runs a job only when somebody waits for it, and poisons memory that is freed."""
    want = {}
    for lane in (None, DeferringLane):
        if lane is not None:
            dsx_zero.building.make_lane = lambda device: lane()
        for stage in range(4):
            for communication, bucket in ((None, 500_000_000), (torch.float64, 64), (torch.bfloat16, 500_000_000)):
                torch.manual_seed(0)
                model, optimizer = dsx_zero.shard(
                    tiny.MLP(),
                    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                    config={"stage": stage, "reduce_bucket_size": bucket, "stage3_param_persistence_threshold": 0},
                    precision=dsx_zero.Precision(communication=communication),
                )
                for step in range(3):
                    model.loss(*model.example(4, seed=10 * step + rank)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                found = {s.name: s.param.clone() for s in optimizer.slices()}
                if lane is None:
                    want[stage, communication] = found
                else:
                    assert_close_named(found, want[stage, communication], rtol=0, atol=0)


def test_reductions_on_a_lane_that_defers_and_poisons():
    run_ranks(deferred, 2)
