"""While a transfer is in flight: the tensor lives and is guarded, closing waits, forks are harmless, awaiting works."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref

import dsx_nvme
import dsx_nvme.errors
import pytest
import torch
from dsx_nvme import staging

BIG = 6 << 20  # bytes; long enough in flight to be met there


def pattern(nbytes, seed=0):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_a_tensor_lives_until_its_transfer_is_over(tmp_path):
    with dsx_nvme.Engine(block_size=1 << 16, queue_depth=2) as engine:
        data = pattern(BIG)
        expected = bytes(data[-100:].tolist())
        watch = weakref.ref(data)
        ticket = engine.write(data, tmp_path / "t")
        del data
        gc.collect()
        assert watch() is not None
        ticket.wait()
        del ticket
        gc.collect()
        assert watch() is None
    assert (tmp_path / "t").read_bytes()[-100:] == expected


def test_closing_and_forgetting_wait_for_what_is_in_flight(tmp_path):
    data = pattern(BIG)
    for end in ("close", "forget"):
        engine = dsx_nvme.Engine(block_size=1 << 16, queue_depth=2)
        engine.write(data, tmp_path / end)
        if end == "close":
            engine.close()
        del engine
        gc.collect()
        assert torch.equal(torch.frombuffer(bytearray((tmp_path / end).read_bytes()), dtype=torch.uint8), data)


def test_forgetting_waits_for_what_goes_through_host_buffers(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "PIECE", 1 << 16)  # many pieces: most begin after the engine is let go of
    data, back = pattern(2 * BIG)[::2], torch.zeros(2 * BIG, dtype=torch.uint8)[::2]
    engine = dsx_nvme.Engine()
    engine.write(data, tmp_path / "t")
    del engine
    gc.collect()
    assert torch.equal(torch.frombuffer(bytearray((tmp_path / "t").read_bytes()), dtype=torch.uint8), data)
    engine = dsx_nvme.Engine()
    engine.read(back, tmp_path / "t")
    del engine
    gc.collect()
    assert torch.equal(back, data)


def test_a_ticket_that_is_over_keeps_no_tensor(tmp_path):
    with dsx_nvme.Engine() as engine:
        data = pattern(5000)
        watch = weakref.ref(data)
        done = engine.write(data, tmp_path / "t")
        assert done.wait() == 5000
        longer = torch.zeros(6000, dtype=torch.uint8)
        also = weakref.ref(longer)
        failed = engine.read(longer, tmp_path / "t")
        assert isinstance(failed.exception(), dsx_nvme.errors.EndOfFileError)
        del data, longer
        gc.collect()
        assert watch() is None and also() is None
        assert done.wait() == 5000 and failed.failed
        with pytest.raises(dsx_nvme.errors.EndOfFileError):
            engine.wait_all()


def test_a_closed_engine_says_so(tmp_path):
    engine = dsx_nvme.Engine()
    engine.close()
    engine.close()
    with pytest.raises(dsx_nvme.errors.OptionError, match="closed"):
        engine.write(torch.zeros(3), tmp_path / "t")


def test_writing_to_a_tensor_in_flight_is_reported(tmp_path):
    with dsx_nvme.Engine() as engine:
        data = torch.zeros(1000)
        ticket = engine.write(data, tmp_path / "t")
        data += 1
        with pytest.raises(dsx_nvme.errors.DataRaceError, match="was written to while its write of"):
            ticket.wait()
        data += 1  # over: nobody minds
        flat = torch.zeros(2000)  # of a buffer, the parts that are not in flight are the caller's
        ticket = engine.write(flat[:1000], tmp_path / "t")
        flat[1000:] += 1
        assert ticket.wait() == 4000
        assert engine.write(data, tmp_path / "t").wait() == 4000


@pytest.mark.parametrize("move", ["set_", "data"])
def test_memory_lives_until_the_transfer_is_over_though_its_tensor_moves_away(move, tmp_path):
    with dsx_nvme.Engine(block_size=1 << 16, queue_depth=1) as engine:
        data = pattern(BIG)
        engine.write(data, tmp_path / "t").wait()
        data = torch.zeros(BIG, dtype=torch.uint8)
        memory = weakref.ref(data.untyped_storage())
        ticket = engine.read(data, tmp_path / "t")
        if move == "set_":
            data.set_(torch.zeros(4000, dtype=torch.uint8))
        else:
            data.data = torch.zeros(4000, dtype=torch.uint8)
        gc.collect()
        kept = memory() is not None
        assert kept
        with pytest.raises(dsx_nvme.errors.DataRaceError, match="moved or resized"):
            ticket.wait()
        assert not data.any()
        del ticket
        gc.collect()
        gone = memory() is None
        assert gone


def test_two_transfers_of_the_same_memory_are_refused_where_they_race(tmp_path):
    with dsx_nvme.Engine(block_size=1 << 16, queue_depth=1) as engine:
        data = pattern(BIG)
        engine.write(data, tmp_path / "a").wait()
        writing = [engine.write(data, tmp_path / "b"), engine.write(data, tmp_path / "c")]  # both only read the memory
        with pytest.raises(dsx_nvme.errors.DataRaceError, match="takes part in a write"):
            engine.read(data[-10:], tmp_path / "a")
        for ticket in writing:
            ticket.wait()
        engine.read(data[-10:], tmp_path / "a", BIG - 10).wait()
        reading = engine.read(data, tmp_path / "a")
        with pytest.raises(dsx_nvme.errors.DataRaceError, match="takes part in a read"):
            engine.write(data[:10], tmp_path / "d")
        reading.wait()


def test_autograd_sees_that_a_read_wrote(tmp_path):
    with dsx_nvme.Engine() as engine:
        x = torch.ones(10)
        engine.write(x, tmp_path / "t").wait()
        w = torch.ones(10, requires_grad=True)
        y = (x * w).sum()
        engine.read(x, tmp_path / "t").wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_timeouts_threads_and_repeated_waits(tmp_path):
    with dsx_nvme.Engine(block_size=1 << 16, queue_depth=1) as engine:
        data = pattern(BIG)
        ticket = engine.write(data, tmp_path / "t")
        with pytest.raises(TimeoutError, match="not over after"):
            ticket.wait(0.0)
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(ticket.wait())) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [BIG] * 5 and ticket.done() and ticket.wait() == BIG and ticket.exception() is None


def test_many_threads_share_an_engine(tmp_path):
    with dsx_nvme.Engine(queue_depth=4) as engine:
        wrong = []

        def work(number):
            for step in range(10):
                data, back = pattern(20_000 + number, step), torch.zeros(20_000 + number, dtype=torch.uint8)
                engine.write(data, tmp_path / f"{number}").wait()
                engine.read(back, tmp_path / f"{number}").wait()
                if not torch.equal(data, back):
                    wrong.append((number, step))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_await(tmp_path):
    async def job(engine, number):
        data = pattern(10_000, number)
        assert await engine.write(data, tmp_path / f"{number}") == 10_000
        back = torch.zeros_like(data)
        await engine.read(back, tmp_path / f"{number}")
        return torch.equal(back, data)

    async def main():
        with dsx_nvme.Engine() as engine:
            found = await asyncio.gather(*(job(engine, n) for n in range(30)))
            with pytest.raises(dsx_nvme.errors.EndOfFileError):
                await engine.read(torch.zeros(20_000), tmp_path / "0")
            return found

    assert all(asyncio.run(main()))


FORK = """
import os, sys, torch, dsx_nvme
torch.set_num_threads(1)  # a forked child of a process with worker threads of OpenMP hangs in its first parallel region
folder = sys.argv[1]
engine = dsx_nvme.Engine(block_size=1 << 16, queue_depth=2)
handle = dsx_nvme.aio_handle()
data = torch.arange(1 << 20, dtype=torch.int32)
ticket = engine.write(data, folder + "/parent")
handle.async_pwrite(torch.ones(1000), folder + "/first")
handle.wait()
child = os.fork()
if child == 0:
    try: ticket.wait()
    except dsx_nvme.errors.ForkError: pass
    else: os._exit(3)
    own = torch.full((100_000,), 7)
    assert engine.write(own, folder + "/child").wait() == 800_000
    back = torch.zeros_like(own)
    assert handle.sync_pread(back, folder + "/child") == 1 and torch.equal(back, own)
    del engine, ticket
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert ticket.wait() == data.numel() * 4
back = torch.zeros_like(data)
engine.read(back, folder + "/parent").wait()
print(torch.equal(back, data))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_starts_afresh_and_leaves_the_parent_alone(tmp_path):
    done = subprocess.run([sys.executable, "-c", FORK, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "True", done.stderr[-3000:]


FORK_WITH_FILES = """
import os, sys, torch, dsx_nvme
torch.set_num_threads(1)
folder = sys.argv[1]
engine, handle = dsx_nvme.Engine(), dsx_nvme.aio_handle(block_size=4096, queue_depth=1)
first, second = (dsx_nvme.empty(1 << 16, dtype=torch.uint8).fill_(i) for i in (1, 2))
engine.write(first, folder + "/first").wait()
engine.write(second, folder + "/second").wait()
opened = engine.open(folder + "/first", write=False)  # registered with the parent's ring
store = dsx_nvme.TensorStore(folder + "/store")
store.put("a", first)
store.flush()
assert store.get("a").result()[0] == 1
big = torch.zeros(4 << 20, dtype=torch.uint8)
handle.async_pwrite(big, folder + "/big")
child = os.fork()
if child == 0:
    try:
        other = engine.open(folder + "/second", write=False)  # the first one that the child's ring knows
        back = dsx_nvme.empty(1 << 16, dtype=torch.uint8)
        engine.read(back, opened).wait()
        assert back.unique().tolist() == [1], back.unique()
        engine.close_file(opened)
        engine.read(back, other).wait()
        assert back.unique().tolist() == [2], back.unique()
        assert store.get("a").result()[0] == 1
        try: handle.wait()
        except dsx_nvme.errors.ForkError: pass
        else: raise SystemExit(4)
    except BaseException as error:
        sys.stderr.write(repr(error))
        os._exit(3)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
back = dsx_nvme.empty(1 << 16, dtype=torch.uint8)
engine.read(back, opened).wait()
print(back.unique().tolist(), handle.wait())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_reads_the_files_its_parent_opened(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FORK_WITH_FILES, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[1] 1", done.stderr[-3000:]


def test_the_interpreter_waits_at_its_end(tmp_path):
    code = (
        "import sys, torch, dsx_nvme; e = dsx_nvme.Engine(block_size=1 << 16, queue_depth=1);"
        "e.write(torch.ones(1 << 20), sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "t")], check=True, timeout=120)
    assert torch.equal(
        torch.frombuffer(bytearray((tmp_path / "t").read_bytes()), dtype=torch.float32), torch.ones(1 << 20)
    )


COLLECTED = """
import gc, sys, threading, torch, dsx_nvme
from dsx_nvme import staging
gc.disable()
write, let_go = staging.Stager._write, threading.Event()
def collecting(*args):
    let_go.wait()
    gc.collect()
    return write(*args)
staging.Stager._write = collecting
engine = dsx_nvme.Engine()
engine.itself = engine  # what only the collector frees
engine.write(torch.ones(1 << 21)[::2], sys.argv[1])
del engine
let_go.set()
"""


def test_an_engine_that_its_own_thread_collects_comes_to_its_end(tmp_path):
    subprocess.run([sys.executable, "-c", COLLECTED, str(tmp_path / "t")], check=True, timeout=60)
    assert torch.equal(
        torch.frombuffer(bytearray((tmp_path / "t").read_bytes()), dtype=torch.float32), torch.ones(1 << 20)
    )


@pytest.mark.parametrize("native", ["1", "0"])
def test_the_interpreter_waits_at_its_end_for_what_goes_through_host_buffers(native, tmp_path):
    code = (
        "import sys, torch, dsx_nvme; dsx_nvme.staging.PIECE = 1 << 16; e = dsx_nvme.Engine();"
        "e.write(torch.ones(1 << 21)[::2], sys.argv[1])"
    )
    environment = {**os.environ, "DSX_NVME_NATIVE": native}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "t")], check=True, timeout=120, env=environment)
    assert torch.equal(
        torch.frombuffer(bytearray((tmp_path / "t").read_bytes()), dtype=torch.float32), torch.ones(1 << 20)
    )


def test_tensors_of_a_device_go_through_host_buffers(tmp_path, monkeypatch):
    """The staging path, with host memory in the place of a device's."""
    outside = {"on": False}
    monkeypatch.setattr(staging, "PIECE", 1 << 16)
    monkeypatch.setattr(
        staging, "needed", lambda tensor: outside["on"] and tensor.numel() * tensor.element_size() > 1 << 16
    )
    with dsx_nvme.Engine() as engine:
        for numel in (1 << 16, 100_000, 333_333):
            data = torch.randn(numel)
            outside["on"] = True
            assert engine.write(data, tmp_path / "t", 5).wait() == numel * 4
            assert (tmp_path / "t").read_bytes()[5 : 5 + numel * 4] == data.numpy().tobytes()
            back = torch.zeros(numel)
            assert engine.read(back, tmp_path / "t", 5).wait() == numel * 4
            assert torch.equal(back, data)
            with pytest.raises(dsx_nvme.errors.EndOfFileError):
                engine.read(torch.zeros(400_000), tmp_path / "t").wait()
            outside["on"] = False
        assert engine.in_flight() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_tensors(tmp_path):
    data = torch.randn(5_000_001, device="cuda")
    for handle in (dsx_nvme.aio_handle(), dsx_nvme.gds_handle(intra_op_parallelism=2)):
        data.mul_(1.5)
        assert handle.async_pwrite(data, str(tmp_path / "t")) == 0 and handle.wait() == 1
        assert (tmp_path / "t").read_bytes() == data.cpu().numpy().tobytes()
        back = torch.zeros_like(data)
        handle.sync_pread(back, str(tmp_path / "t"))
        assert torch.equal(back, data)
        pinned = handle.new_cpu_locked_tensor(1000, data)
        assert pinned.is_pinned()
        handle.close()
