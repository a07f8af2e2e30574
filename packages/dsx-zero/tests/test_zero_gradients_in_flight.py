"""A gradient that arrives while its unit's reduction is under way is neither lost nor reduced twice.

A collective may read its buffer when it starts, and write the result when it ends. This transport does exactly that,
so that whatever is added to a buffer in between is gone.
"""

from __future__ import annotations

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_testkit import assert_close_named, run_ranks, tiny
from dsx_zero.transports.plain import PlainGather
from dsx_zero.transports.protocol import Stateless


class SlowWire:
    """`Transports`: gathers as usual, reductions that read at their start and write at their end."""

    def gather(self, sets):
        return PlainGather()

    def reduce(self, op, ranks, *, scatters):
        return SlowReduce(op, scatters)


class SlowReduce(Stateless):
    def __init__(self, op, scatters):
        self._op, self._scatters = op, scatters

    def result_dtype(self, source, group):
        return source

    def start(self, out, source, group, label):
        return UnderWay(out, source.clone(), group.ranks.group, self._op, self._scatters)


class UnderWay:
    def __init__(self, out, message, group, op, scatters):
        self._out, self._message, self._group, self._op, self._scatters = out, message, group, op, scatters

    def wait(self):
        result = self._message
        if self._scatters:
            result = torch.empty_like(self._out)
            dsx_comm.reduce_scatter_tensor(result, self._message, op=self._op, group=self._group)
        else:
            dsx_comm.all_reduce(result, op=self._op, group=self._group)
        self._out.copy_(result)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def late_arrivals(rank, world, stage):
    """From the third step on a parameter gets two gradients in one backward, where it used to get one."""
    plain, model = tiny.Checkpointed(reentrant=False), tiny.Checkpointed(reentrant=False)
    reference = sgd(plain.parameters())
    config = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 64}
    model, optimizer = dsx_zero.shard(model, sgd, stage=stage, config=config, transports=SlowWire())
    for step in range(5):
        model.reentrant = plain.reentrant = step >= 2
        batches = [plain.example(2, seed=10 * step + r) for r in range(world)]
        for _ in range(2):
            loss = model.loss(*batches[rank])
            loss.backward()
            (sum(plain.loss(*batch) for batch in batches) / world).backward()
        outcome = optimizer.step(max_norm=0.5)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item()
        assert outcome.grad_norm == pytest.approx(norm, rel=1e-5), step
        reference.step(), optimizer.zero_grad(), reference.zero_grad()
    with dsx_zero.GatheredParameters(model):
        got = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert_close_named(got, {name: p.detach() for name, p in plain.named_parameters()}, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_late_arrivals_train_as_in_plain_torch(stage):
    run_ranks(late_arrivals, 2, stage)
