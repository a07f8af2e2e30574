"""Small tensors travel behind the header of their message: counted between two mailboxes in one process, whose messages
go through queues that compare sizes and dtypes, as transports do.
"""

from collections import Counter, deque
from types import SimpleNamespace

import pytest
import torch
from dsx_pipe.errors import PipelineError
from dsx_pipe.runtime import messages
from dsx_pipe.runtime.messages import DATA, FAILURE, Key, Mailbox, Parcel
from dsx_testkit import run_ranks

FORWARD, BACKWARD = Key(1, False, 0), Key(1, True, 0)


class Wire:
    """What `messages` asks of dsx_comm, between ranks of this process."""

    def __init__(self):
        self.queues, self.sent = {}, Counter()

    def of(self, me):
        def isend(tensor, *, group, tag, group_dst):
            assert tensor.is_contiguous()
            self.sent[me] += 1
            self.queues.setdefault((me, group_dst, tag), deque()).append(tensor.clone())
            return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

        def recv(tensor, *, group, tag, group_src):
            got = self.queues[group_src, me, tag].popleft()
            assert (got.numel(), got.dtype) == (tensor.numel(), tensor.dtype)
            tensor.copy_(got)

        return SimpleNamespace(**{**vars(messages.dsx_comm), "isend": isend, "recv": recv})


class Pair:
    """Rank 0 sends to rank 1."""

    def __init__(self, monkeypatch, *, frames=True):
        self.wire, self.patch = Wire(), monkeypatch
        self.boxes = [
            Mailbox(
                SimpleNamespace(
                    host=None, payload=None, batched=False, frames=frames, device=torch.device("cpu"), ranks=[0, 1]
                ),
                str,
            )
            for _ in range(2)
        ]
        self.begin()

    def begin(self):
        for box in self.boxes:
            box.begin_run()

    def send(self, key, value):
        """How many messages it took."""
        self.patch.setattr(messages, "dsx_comm", self.wire.of(0))
        before = self.wire.sent[0]
        self.boxes[0].send(1, key, Parcel.of(value))
        return self.wire.sent[0] - before

    def fail(self, key, text):
        self.patch.setattr(messages, "dsx_comm", self.wire.of(0))
        self.boxes[0].send_failure(1, key, FAILURE, text)

    def receive(self, key):
        self.patch.setattr(messages, "dsx_comm", self.wire.of(1))
        return self.boxes[1].receive(0, key)


VALUES = [
    torch.randn(3, 5, requires_grad=True),
    (torch.randn(2, 3).t(), torch.tensor([[True, False]]), torch.empty(0, 4), torch.tensor(3.5)),
    {"x": torch.randn(4).bfloat16(), "n": torch.arange(5), "c": torch.randn(2, dtype=torch.complex64), "name": "a"},
    torch.randn(7, 11, dtype=torch.float64),
]


@pytest.mark.parametrize("frames", [True, False])
@pytest.mark.parametrize("value", VALUES)
def test_values_arrive_as_they_were_sent(monkeypatch, value, frames):
    pair = Pair(monkeypatch, frames=frames)
    for number in range(3):
        key = Key(1, False, number)
        pair.send(key, value)
        message = pair.receive(key)
        _, sent, others = messages.flatten(value)
        _, arrived, found = messages.flatten(message.value)
        assert message.status == DATA and found == others
        for one, other in zip(sent, arrived, strict=True):
            assert one.dtype == other.dtype and one.requires_grad == other.requires_grad and other.is_leaf
            assert torch.equal(one, other)


def test_from_the_second_message_on_a_channel_there_is_one_per_value(monkeypatch):
    pair = Pair(monkeypatch)
    value = (torch.randn(8, 16), torch.arange(3))
    assert [pair.send(Key(1, False, m), value) for m in range(4)] == [4, 1, 1, 1]  # header, structure, two tensors
    assert [pair.send(Key(1, True, m), value) for m in range(3)] == [4, 1, 1]
    assert pair.send(Key(2, False, 0), value) == 4


def test_large_tensors_are_sent_as_they_lie(monkeypatch):
    pair = Pair(monkeypatch)
    value = torch.randn((1 << 18) + 1)
    assert [pair.send(Key(1, False, m), value) for m in range(3)] == [3, 2, 2]
    for m in range(3):
        assert torch.equal(pair.receive(Key(1, False, m)).value, value)


def test_channels_and_micro_batches_may_be_received_in_another_order(monkeypatch):
    pair = Pair(monkeypatch)
    keys = [Key(stage, backward, m) for m in range(3) for stage in (1, 3) for backward in (False, True)]
    values = [torch.full((2 + key.stage + 50 * key.backward,), float(number)) for number, key in enumerate(keys)]
    for key, value in zip(keys, values):
        pair.send(key, value)
    for key, value in zip(reversed(keys), reversed(values)):
        assert torch.equal(pair.receive(key).value, value)


def test_a_structure_that_changes_is_sent_again(monkeypatch):
    pair = Pair(monkeypatch)
    plain = [torch.randn(4), torch.randn(4), torch.randn(9), torch.randn(9)]
    values = [*plain, (torch.randn(9), "b"), (torch.randn(9), "c")]
    assert [pair.send(Key(1, False, m), v) for m, v in enumerate(values)] == [3, 1, 3, 1, 3, 2]
    for m, value in enumerate(values):
        found = pair.receive(Key(1, False, m)).value
        if isinstance(value, tuple):
            assert found[1] == value[1]
            found, value = found[0], value[0]
        assert torch.equal(found, value)


def test_a_failure_is_sent_in_place_of_a_value(monkeypatch):
    pair = Pair(monkeypatch)
    pair.fail(FORWARD, b"before any value")
    assert pair.receive(FORWARD).text == b"before any value"
    for m in range(2):
        pair.send(Key(1, False, m), torch.ones(3))
        assert pair.receive(Key(1, False, m)).status == DATA
    pair.fail(Key(1, False, 2), b"wrong")
    message = pair.receive(Key(1, False, 2))
    assert (message.status, message.text) == (FAILURE, b"wrong")
    pair.begin()
    assert pair.send(FORWARD, torch.ones(3)) == 1
    assert torch.equal(pair.receive(FORWARD).value, torch.ones(3))


def test_shapes_are_sent_again_when_both_sides_forget_them(monkeypatch):
    pair = Pair(monkeypatch)
    for _ in range(2):
        assert pair.send(FORWARD, torch.ones(3)) == 3
        pair.receive(FORWARD)
        for box in pair.boxes:
            box.forget_shapes()


def test_a_message_of_another_step_is_an_error(monkeypatch):
    pair = Pair(monkeypatch)
    pair.send(FORWARD, torch.ones(3))
    pair.receive(FORWARD)
    pair.boxes[0].begin_run()
    pair.send(FORWARD, torch.ones(3))
    with pytest.raises(PipelineError, match="equally often"):
        pair.receive(FORWARD)


def test_a_write_to_one_tensor_does_not_spoil_what_autograd_keeps_of_another(monkeypatch):
    pair = Pair(monkeypatch)
    value = (torch.ones(3, requires_grad=True), torch.zeros(3))
    for m in range(2):
        pair.send(Key(1, False, m), value)
        x, mask = pair.receive(Key(1, False, m)).value
        out = (x * x).sum()
        mask.add_(1)
        out.backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0))


def sends_of_a_step(rank, world, micro_batches):
    """Messages between stages that this rank sends in a step, behind the first two."""
    from dsx_pipe import Pipeline, build

    pipe = Pipeline(torch.nn.Linear(4, 4), build("1f1b", 2, micro_batches), loss_fn=torch.nn.functional.mse_loss)
    x, count, isend = torch.randn(micro_batches, 4), 0, messages.dsx_comm.isend

    def counted(*args, **named):
        nonlocal count
        count += 1
        return isend(*args, **named)

    for number in range(3):
        messages.dsx_comm.isend = counted if number == 2 else isend
        pipe.step(x, x)
    messages.dsx_comm.isend = isend
    return count


@pytest.mark.parametrize("backend", ["dsx", "gloo"])
def test_a_stage_sends_one_message_per_micro_batch_and_direction(backend):
    assert run_ranks(sends_of_a_step, 2, 5, backend=backend) == [5, 5]
