"""Payloads are sent in batches, as a device's communicator needs them: the numbers stay the same, and ranks never wait
for each other in a circle.

A communicator runs its operations in the order in which they are issued. The operations of one batch run together, and
each send waits for its receive. The tests record the batches that real steps issue, and replay them under these rules.
"""

import dsx_comm
import pytest
import torch
from dsx_pipe import Pipeline, Schedule, StageError, build
from dsx_pipe.runtime.groups import Groups
from dsx_pipe.schedule import BUILDERS
from dsx_testkit import run_ranks
from torch import nn

WIDTH = 4


class Layer(nn.Module):
    def __init__(self, fails=False):
        super().__init__()
        self.linear, self.fails = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), fails

    def forward(self, x):
        if self.fails:
            raise KeyError("planted")
        return torch.tanh(self.linear(x))


class Recorder:
    """Records each batch, and issues it."""

    def __init__(self):
        self.batches, self._issue = [], dsx_comm.batch_isend_irecv
        dsx_comm.batch_isend_irecv = self

    def __call__(self, ops):
        self.batches.append([(op.op.__name__, op.peer, op.tensor.numel()) for op in ops])
        return self._issue(ops)


def modules_of(plan, rank, fails=None):
    torch.manual_seed(0)
    every = [Layer(stage == fails) for stage in range(plan.stages)]
    return every, [every[stage] for stage in plan.stages_of(rank)]


def loss_fn(output, labels):
    return nn.functional.mse_loss(output, labels)


def train_and_record(rank, world, name, micro_batches, rows):
    plan = build(name, world, micro_batches) if isinstance(name, str) else name
    every, mine = modules_of(plan, rank)
    recorder = Recorder()
    pipe = Pipeline(mine, plan, loss_fn=loss_fn, batched_messages=True)
    x = torch.randn(rows * micro_batches, WIDTH, dtype=torch.float64)
    y = torch.randn(rows * micro_batches, WIDTH, dtype=torch.float64)
    loss = pipe.step(x, y)
    grads = [p.grad.clone() for module in mine for p in module.parameters()]
    value = pipe.eval_batch(zip(x.chunk(2), y.chunk(2)), num_micro_batches=2)
    for module in every:
        module.zero_grad()
    whole = nn.Sequential(*every)
    total = sum(loss_fn(whole(a), b) / micro_batches for a, b in zip(x.chunk(micro_batches), y.chunk(micro_batches)))
    total.backward()
    assert float(loss) == pytest.approx(total.item(), rel=1e-6) and float(value) == pytest.approx(float(loss), rel=1e-6)
    for found, p in zip(grads, (p for module in mine for p in module.parameters()), strict=True):
        torch.testing.assert_close(found, p.grad)
    return recorder.batches


def never_finished(batches):
    """Replay batches, [rank][batch][(operation, peer, size)], and return those that wait for ever."""
    left = [[list(batch) for batch in row] for row in batches]
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(left):
            for op in list(row[0]) if row else ():
                kind, peer, size = op
                first = next(o for o in row[0] if o[:2] == (kind, peer))  # in order between two ranks
                theirs = left[peer][0] if left[peer] else []
                other = next((o for o in theirs if o[:2] == ("irecv" if kind == "isend" else "isend", rank)), None)
                if first is op and other is not None:
                    assert other[2] == size, "a send met the receive of another message"
                    row[0].remove(op)
                    theirs.remove(other)
                    progress = True
            while row and not row[0]:
                row.pop(0)
                progress = True
    return [row for row in left if row]


NAMES = [name for name in BUILDERS if name != "inference"]


@pytest.mark.parametrize("name", NAMES)
def test_recorded_batches_of_real_steps_end_under_the_rules_of_a_communicator(name):
    batches = run_ranks(train_and_record, 2, name, 4, 2, backend="dsx")
    assert all(batches) and never_finished(batches) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world, micro_batches", [(3, 6), (4, 8)])
def test_recorded_batches_of_more_ranks_end(name, world, micro_batches):
    assert never_finished(run_ranks(train_and_record, world, name, micro_batches, 1, backend="dsx")) == []


def test_the_rules_find_ranks_that_wait_for_each_other():
    crossed = [[[("isend", 1, 4)], [("irecv", 1, 4)]], [[("isend", 0, 4)], [("irecv", 0, 4)]]]
    together = [[[("isend", 1, 4), ("irecv", 1, 4)]], [[("isend", 0, 4), ("irecv", 0, 4)]]]
    assert never_finished(crossed) and not never_finished(together)


def test_large_messages_on_gloo_where_a_send_really_waits():
    """The messages are larger than the sockets' buffers, so a batch that cannot end hangs here."""
    run_ranks(train_and_record, 3, "1f1b", 6, 40_000, timeout=120)


def test_a_schedule_that_lists_its_own_messages_keeps_them():
    from dsx_pipe import with_communication

    plan = with_communication(build("zb-h1", 2, 4))
    assert isinstance(plan, Schedule)
    assert never_finished(run_ranks(train_and_record, 2, plan, 4, 2, backend="dsx")) == []


def fail_and_step_again(rank, world):
    plan = build("1f1b", world, 4)
    _, mine = modules_of(plan, rank, fails=1)
    recorder = Recorder()
    pipe = Pipeline(mine, plan, loss_fn=loss_fn, batched_messages=True)
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    with pytest.raises(StageError) as caught:
        pipe.step(x, x)
    before = recorder.batches[:]
    for module in mine:
        module.fails = False
    pipe.step(x, x)
    return str(caught.value), before, recorder.batches[len(before) :]


def test_a_failure_is_sent_in_place_of_payloads_and_the_next_step_succeeds():
    results = run_ranks(fail_and_step_again, 3, backend="dsx")
    assert len({text for text, _, _ in results}) == 1 and "stage 1 (rank 1)" in results[0][0]
    for batches in ([r[1] for r in results], [r[2] for r in results]):
        assert never_finished(batches) == []


def two_pipelines(rank, world):
    ranks = [rank % 2, rank % 2 + 2]
    pipeline = dsx_comm.new_group(ranks, local=True)
    groups = Groups(pipeline, torch.device("meta"))  # any device that is not the host's
    for group in (groups.host, groups.payload):
        assert group is not pipeline
        total = torch.tensor([float(rank)])
        dsx_comm.all_reduce(total, group=group)
        assert total.item() == sum(ranks)


def test_pipelines_side_by_side_make_their_groups_apart():
    """With data parallelism each pipeline makes groups of its own ranks, at the same time as the others."""
    run_ranks(two_pipelines, 4)
