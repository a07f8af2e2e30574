"""Asynchronous quantised reduce-scatter: both hops go on beside the caller, in the order of calls, with the results of
synchronous ones.
"""

import os
import subprocess
import sys
import threading
import time

import dsx_comm
import pytest
import torch
from dsx_comm import step_lane
from dsx_comm.calls import Call
from dsx_comm.compressed import quantized
from dsx_comm.compressed.blocks import BlockFormat
from dsx_comm.step_lane import StepLane
from dsx_testkit import run_ranks

NUMEL = 300


def source(rank, call, world):
    return torch.randn(world * NUMEL, generator=torch.Generator().manual_seed(100 * call + rank))


def together(rank, world, devices, calls):
    hierarchy = dsx_comm.make_hierarchy(devices)
    wanted = []
    for call in range(calls):
        wanted.append(torch.empty(NUMEL))
        assert dsx_comm.quantized_reduce_scatter(wanted[-1], source(rank, call, world), hierarchy) is None
    outputs = [torch.empty(NUMEL) for _ in range(calls)]
    with dsx_comm.count_traffic() as traffic:
        handles = [
            dsx_comm.quantized_reduce_scatter(out, source(rank, call, world), hierarchy, async_op=True)
            for call, out in enumerate(outputs)
        ]
    # counted when they are issued, hop by hop
    form, nodes = BlockFormat(4, 2048), world // devices
    intra, inter = (devices - 1) * form.message_bytes(nodes * NUMEL), (nodes - 1) * form.message_bytes(NUMEL)
    assert traffic.calls() == calls * ((devices > 1) + (nodes > 1))
    assert traffic.sent_bytes() == calls * (intra + inter)
    last = torch.empty(NUMEL)
    dsx_comm.quantized_reduce_scatter(
        last, source(rank, calls - 1, world), hierarchy
    )  # a synchronous one takes its turn
    assert torch.equal(last, wanted[-1])
    order = range(calls) if rank % 2 else reversed(range(calls))
    for call in order:
        assert handles[call].wait() and handles[call].is_completed()
        assert torch.equal(outputs[call], wanted[call])


@pytest.mark.parametrize(
    ("world", "devices", "backend"), [(4, 2, "gloo"), (4, 2, "dsx"), (2, 2, "gloo"), (3, 1, "gloo")]
)
def test_several_in_flight_give_what_synchronous_calls_give(world, devices, backend):
    run_ranks(together, world, devices, 4, backend=backend)


def by_itself(rank, world):
    """Nobody waits and nobody asks: the result comes into its place all the same. The call returns before others have
    called.
    """
    hierarchy = dsx_comm.make_hierarchy(2)
    output, wanted, done = torch.full((NUMEL,), torch.nan), torch.empty(NUMEL), threading.Event()
    dsx_comm.quantized_reduce_scatter(wanted, source(rank, 0, world), hierarchy)
    if rank:
        dsx_comm.barrier()  # rank 0 comes here after its call, which so far nobody answers
    handle = dsx_comm.quantized_reduce_scatter(output, source(rank, 0, world), hierarchy, async_op=True)
    if not rank:
        assert not handle.is_completed()
        dsx_comm.barrier()
    handle.on_arrival(done.set)
    assert done.wait(20), "the second hop was never done"
    assert torch.equal(output, wanted)
    handle.wait()


@pytest.mark.parametrize("backend", ["gloo", "dsx"])
def test_both_hops_go_on_by_themselves(backend):
    run_ranks(by_itself, 4, backend=backend)


def fails(rank, world):
    hierarchy = dsx_comm.make_hierarchy(2)
    output = torch.zeros(NUMEL)
    real, broken = quantized.quantize_rows, threading.Event()

    def breaking(rows, form):
        if not broken.is_set():
            broken.set()
            raise RuntimeError("out of paper")
        return real(rows, form)

    quantized.quantize_rows = breaking  # on every rank: nobody is left waiting
    handle = dsx_comm.quantized_reduce_scatter(output, source(rank, 0, world), hierarchy, async_op=True)
    with pytest.raises(RuntimeError, match="out of paper"):
        handle.wait()
    assert isinstance(handle.exception(), RuntimeError) and not output.any()
    wanted = torch.empty(NUMEL)
    dsx_comm.quantized_reduce_scatter(wanted, source(rank, 1, world), hierarchy)
    handle = dsx_comm.quantized_reduce_scatter(output, source(rank, 1, world), hierarchy, async_op=True)
    handle.wait()
    assert torch.equal(output, wanted)


def test_a_failure_reaches_who_waits_and_no_later_call():
    run_ranks(fails, 4)


def small(rank, world):
    """No elements, and one rank: done at once."""
    hierarchy = dsx_comm.make_hierarchy(world)
    for numel in (0, 5) if world == 1 else (0,):
        x, y = torch.arange(float(numel * world)), torch.empty(numel)
        handle = dsx_comm.quantized_reduce_scatter(y, x, hierarchy, async_op=True)
        assert handle.wait() and torch.equal(y, x)


@pytest.mark.parametrize("world", [1, 2])
def test_nothing_to_send(world):
    run_ranks(small, world)


def call():
    return Call("op", None, 1, 8, 8, torch.device("cpu"), {})


def threads():
    return [t for t in threading.enumerate() if t.name == "dsx-comm-steps"]


def test_the_thread_ends_when_idle_and_comes_again(monkeypatch):
    monkeypatch.setattr(step_lane, "_IDLE", 0.05)
    lane, tensor, done = StepLane(), torch.zeros(1), []
    for round in range(2):
        handle = lane.do([(call(), lambda: done.append(1)), (call(), lambda: done.append(2))], [tensor], True)
        assert threads() and handle.wait() and done == [1, 2] * (round + 1)
        until = time.monotonic() + 20
        while threads() and time.monotonic() < until:
            time.sleep(0.02)
        assert not threads()


ENDING = """
import sys, time, torch
from dsx_comm.calls import Call
from dsx_comm.step_lane import StepLane
lane = StepLane()
call = Call("op", None, 1, 8, 8, torch.device("cpu"), {})
lane.do([(call, lambda: time.sleep(0.3)), (call, lambda: print("through", flush=True))], [torch.zeros(1)], True)
"""


def test_a_process_that_ends_lets_its_steps_end_first():
    """A thread inside a backend when the interpreter goes away aborts the process."""
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "through\n"), ended.stderr


def test_a_forked_child_has_a_lane_of_its_own():
    lane, tensor, release = StepLane(), torch.zeros(1), threading.Event()
    mine = lane.do([(call(), release.wait)], [tensor], True)
    child = os.fork()
    if child == 0:
        theirs = []
        lane.do([(call(), lambda: theirs.append(1))], [tensor], True).wait()
        os._exit(0 if theirs == [1] else 1)
    release.set()
    assert mine.wait() and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class RecordingCuda:
    """Streams and events that write down what is asked of them; a host that waits would raise (there is no
    synchronize).
    """

    def __init__(self):
        self.log, self.done, self._current = [], False, "caller's"

    def Stream(self, device):
        return RecordingStream(self, "lane's")

    def current_stream(self, device):
        return RecordingStream(self, self._current)

    def stream(self, stream):
        cuda = self

        class Inside:
            def __enter__(self):
                self.before, cuda._current = cuda._current, stream.name

            def __exit__(self, *_):
                cuda._current = self.before

        return Inside()

    def Event(self):
        cuda = self

        class Event:
            def record(self, stream):
                cuda.log.append(f"record on {stream.name}")

            def query(self):
                return cuda.done

        return Event()


class RecordingStream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def wait_stream(self, other):
        self.cuda.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.cuda.log.append(f"{self.name} waits for the event")


class DeviceTensor:
    def __init__(self, cuda):
        self.device, self._cuda = torch.device("cuda", 0), cuda

    def record_stream(self, stream):
        self._cuda.log.append(f"memory kept for {stream.name}")


@pytest.mark.parametrize("async_op", [True, False])
def test_on_a_device_all_steps_are_enqueued_on_a_stream_of_their_own(async_op):
    cuda, before = RecordingCuda(), threads()
    lane = StepLane(cuda)
    steps = [(call(), lambda n=n: cuda.log.append(f"step {n} on {cuda._current}")) for n in (1, 2)]
    handle = lane.do(steps, [DeviceTensor(cuda)], async_op)
    enqueued = [
        "lane's waits for caller's", "step 1 on lane's", "step 2 on lane's", "record on lane's", "memory kept for "
        "lane's",
    ]  # fmt: skip
    assert set(threads()) <= set(before), "no thread is started"
    if not async_op:
        assert handle is None and cuda.log == [*enqueued, "caller's waits for the event"]
        return
    assert cuda.log == enqueued and not handle.is_completed()
    handle.wait()
    assert cuda.log == [*enqueued, "caller's waits for the event"]
