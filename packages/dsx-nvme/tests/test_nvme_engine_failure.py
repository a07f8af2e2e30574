"""A ring that fails while the kernel works on blocks: their memory is kept until the kernel has given it back.

A read of an empty pipe stays with the kernel for as long as the test wants. Through the public API a pipe is refused,
so an open file is made by hand.
"""

import errno
import gc
import os
import threading
import time
import weakref

import dsx_nvme
import pytest
import torch
from dsx_nvme import native
from dsx_nvme.files import Access, OpenFile

NATIVE = [e for e in native.ENGINES if not native.refusal(e)]
pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif("io_uring" not in NATIVE, reason="needs io_uring: only it waits for a pipe"),
]


@pytest.fixture
def pipe():
    """(open file for reading, descriptor for writing)"""
    reader, writer = os.pipe()
    yield OpenFile("<pipe>", False, Access("io_uring", False, 1, 1, ()), reader, -1, (0, 0)), writer
    os.close(writer)


def broken_engine(tensor, file, seconds):
    """An engine whose ring failed while it reads `tensor` from `file`; the worker waits `seconds` for the kernel."""
    engine = dsx_nvme.Engine("io_uring", block_size=4096, queue_depth=4)
    ticket = engine.read(tensor, file)
    ring = engine._state.engines["io_uring"]
    while ring.statistics()["submissions"] == 0:
        time.sleep(0.001)
    time.sleep(0.05)  # now the worker waits in the kernel
    ring.inject_failure(errno.EIO, seconds)
    return engine, ticket


def test_a_transfer_is_not_over_while_the_kernel_may_write_to_its_memory(pipe):
    file, writer = pipe
    tensor = torch.zeros(3 * 4096, dtype=torch.uint8)
    engine, ticket = broken_engine(tensor, file, 60)
    time.sleep(0.2)
    assert not ticket.done()
    os.write(writer, bytes([7]) * 3 * 4096)
    assert ticket.wait(30) == 3 * 4096 and bool((tensor == 7).all())
    with pytest.raises(dsx_nvme.errors.TransferError, match="close this Engine and make a new one") as caught:
        engine.read(tensor, file)
    assert caught.value.errno == errno.EIO
    engine.close()


def test_memory_that_the_kernel_does_not_give_back_is_kept(pipe):
    file, _ = pipe
    tensor = torch.zeros(4096, dtype=torch.uint8)
    memory = weakref.ref(tensor.untyped_storage())
    engine, ticket = broken_engine(tensor, file, 0.1)
    with pytest.raises(dsx_nvme.errors.TransferError, match="kept until the process ends") as caught:
        ticket.wait(30)
    assert caught.value.errno == errno.EIO and caught.value.op == "read"
    engine.close()
    del tensor, ticket, engine, caught
    gc.collect()
    kept = memory() is not None
    assert kept


@pytest.mark.parametrize("name", NATIVE)
def test_a_failing_engine_ends_every_request_and_refuses_new_ones(name, tmp_path):
    """With a real file: blocks in flight, blocks not handed out yet, several threads that wait."""
    data = torch.arange(1 << 20, dtype=torch.int32)
    with dsx_nvme.Engine(block_size=1 << 16) as healthy:
        healthy.write(data, tmp_path / "t").wait()
    for _ in range(5):
        engine = dsx_nvme.Engine(name, block_size=4096, queue_depth=2, threads=2, direct=False)
        backs = [torch.zeros_like(data) for _ in range(3)]
        tickets = [engine.read(back, tmp_path / "t") for back in backs]
        engine._state.engines[name].inject_failure(errno.EBADF, 30.0)
        ended = []
        waiting = [threading.Thread(target=lambda t=t: ended.append(t.exception(60))) for t in tickets]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join()
        assert any(isinstance(error, dsx_nvme.errors.TransferError) and error.errno == errno.EBADF for error in ended)
        for ticket, back in zip(tickets, backs):
            if ticket.exception() is None:  # one that the kernel had finished, whole
                assert torch.equal(back, data)
        with pytest.raises(dsx_nvme.errors.TransferError, match="failed earlier"):
            engine.read(torch.zeros(10), tmp_path / "t")
        engine.close()
