"""Page-locked host memory: of the size that is asked for, locked while it is there, and a warning where it is not
locked though copies would need it.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace

import dsx_zero
import pytest
import torch
from dsx_comm.lanes import CudaLane, lanes_from
from dsx_testkit import FakeCuda, MemoryStore
from dsx_zero.errors import ZeroStateError
from dsx_zero.homes.home import HostHome

CUDA = torch.device("cuda", 0)
NUMEL = 300_000  # 1.2 MB: torch would lock 2 MiB


def is_mapped(address):
    with open("/proc/self/maps") as maps:
        ranges = [line.split(" ", 1)[0].split("-") for line in maps]
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


@pytest.fixture
def locked(monkeypatch):
    """Bytes that are locked, by address."""
    held, answers = {}, [0]

    def register(address, nbytes, flags):
        assert is_mapped(address) and is_mapped(address + nbytes - 1)
        held[address] = nbytes
        return answers[-1]

    def unregister(address):
        assert is_mapped(address), "unlocked after it was unmapped"
        del held[address]

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with FakeCuda().installed() as cuda:
        yield SimpleNamespace(held=held, answers=answers, cuda=cuda)


def test_a_home_locks_as_many_bytes_as_it_has_and_unlocks_them_behind_all_copies(locked):
    home = HostHome(NUMEL, torch.float32, CUDA)
    assert list(locked.held.values()) == [4 * NUMEL]
    view = home.view()[10:20]
    view.fill_(1.0)
    del home
    assert locked.held, "a view keeps the memory"
    assert not locked.cuda.log
    del view
    assert not locked.held
    assert locked.cuda.log == ["host waits for the device"]


def test_refused_locks_are_an_error_that_says_what_was_asked_for(locked):
    locked.answers.append(2)
    with pytest.raises(
        ZeroStateError, match=r"300,000 elements \(1,200,000 bytes, page-locked\) was refused: .*answered 2"
    ):
        HostHome(NUMEL, torch.float32, CUDA)


def test_memory_that_is_not_to_be_locked_is_ordinary(locked):
    HostHome(NUMEL, torch.float32, CUDA, pin=False)
    HostHome(NUMEL, torch.float32, torch.device("cpu"))
    assert not locked.held and not locked.cuda.log


@pytest.mark.parametrize(
    ("section", "warned"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, True),
        ({"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu", "pin_memory": True}}, True),
        ({"offload_param": {"device": "nvme", "pin_memory": False}}, True),
        ({"offload_optimizer": {"device": "cpu", "pin_memory": True}}, False),
        ({}, False),
    ],
)
def test_unlocked_memory_for_a_devices_copies_is_warned_of(section, warned, caplog):
    def shard():
        model = torch.nn.Linear(8, 8)
        make = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
        with caplog.at_level(logging.WARNING):
            dsx_zero.shard(model, make, config={"stage": 3, **section}, store=MemoryStore())
        text = "".join(record.message for record in caplog.records)
        caplog.clear()
        return "pin_memory" in text

    with FakeCuda().installed(), lanes_from(CudaLane):
        assert shard() is warned
    assert not shard(), "copies in host memory make nobody wait"
