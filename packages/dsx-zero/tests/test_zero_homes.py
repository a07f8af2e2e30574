"""Homes: the same reads and writes give the same values in memory, in a store, and in a tier of a user's own, on
every kind of lane.
"""

from __future__ import annotations

import gc
import random

import pytest
import torch
from dsx_comm.lanes import DeferringLane, HostLane, TensorBuffer
from dsx_testkit import MemoryStore
from dsx_zero.homes.home import DeviceHome, HostHome, accumulate, fetching, opened, read, write
from dsx_zero.homes.stored import StoredHome

NUMEL = 1000


class Drawer:
    """A store in a dictionary: transfers happen when they are waited for, so that whoever does not wait sees
    nothing.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.puts = self.gets = 0

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def put(self, name: str, tensor: torch.Tensor) -> _Later:
        self.puts += 1
        self.tensors.setdefault(name, torch.full_like(tensor, float("nan")))
        return _Later(lambda: self.tensors[name].copy_(tensor))

    def get(self, name: str, out: torch.Tensor | None = None) -> _Later:
        self.gets += 1
        assert out is not None
        assert out.shape == self.tensors[name].shape
        return _Later(lambda: out.copy_(self.tensors[name]))


class _Later:
    def __init__(self, job) -> None:
        self._job = job

    def wait(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job()


def device() -> DeviceHome:
    return DeviceHome(torch.empty(NUMEL))


def host() -> HostHome:
    return HostHome(NUMEL, torch.float32, torch.device("cpu"))


def stored() -> StoredHome:
    return StoredHome(Drawer(), "state", NUMEL, torch.float32, piece=96)


HOMES = pytest.mark.parametrize("make", [device, host, stored], ids=lambda make: make.__name__)


@HOMES
def test_ranges_against_a_plain_tensor(make):
    home, plain = make(), torch.zeros(NUMEL)
    write(home, plain)
    draw = random.Random(1)
    for number in range(60):
        start = draw.randrange(NUMEL)
        stop = draw.randrange(start, NUMEL + 1)
        kind = number % 3
        if kind == 0:
            values = torch.full((stop - start,), float(number), dtype=torch.float64)
            plain[start:stop] = values
            write(home, values, start)
        elif kind == 1:
            with opened(home, start, stop) as part:
                part.add_(1.5)
            plain[start:stop] += 1.5
        else:
            more = torch.arange(NUMEL, dtype=torch.float32)
            plain += more
            accumulate(home, more, HostLane()).wait()
        assert torch.equal(read(home), plain)
        assert torch.equal(read(home, start, stop, device=torch.device("cpu")), plain[start:stop])
    assert home.nbytes == 4 * NUMEL


@HOMES
@pytest.mark.parametrize("lane", [HostLane, DeferringLane])
def test_fetch_and_store_are_done_when_waited_for(make, lane):
    home, lane = make(), lane()
    write(home, torch.zeros(NUMEL))
    values = torch.arange(200, dtype=torch.float32)
    home.store(values, lane, start=300).wait()
    values.fill_(-1)  # its time is over: the home has its own
    out = torch.full((250,), float("nan"))
    home.fetch(out, lane, start=280).synchronize()
    assert torch.equal(out, torch.cat([torch.zeros(20), torch.arange(200.0), torch.zeros(30)]))


@pytest.mark.parametrize("make", [host, stored])
def test_on_a_deferring_lane_mistakes_of_order_show(make):
    home, lane = make(), DeferringLane()
    write(home, torch.ones(NUMEL))
    early = torch.full((NUMEL,), float("nan"))
    home.fetch(early, lane)
    assert early.isnan().all()  # who reads without waiting
    lane.drain()
    staging = torch.full((NUMEL,), 2.0)
    ticket = home.store(staging, lane)
    lane.free_after_use(TensorBuffer(staging))  # freed before the store has read it
    ticket.wait()
    assert read(home).isnan().all()


def test_memory_on_the_device_is_the_home_itself():
    home, lane = device(), DeferringLane()
    assert fetching(home, torch.device("cpu"), lane)() is home.view()
    with opened(home, 10, 20) as part:
        assert part.data_ptr() == read(home, 10).data_ptr()


def test_a_home_in_a_store_moves_whole_pieces_without_copies_between():
    drawer = Drawer()
    home = StoredHome(drawer, "state", NUMEL, torch.float32, piece=100)
    assert home.nbytes == 0
    assert torch.equal(read(home, 50, 250), torch.zeros(200))  # never stored
    write(home, torch.arange(200, dtype=torch.float32), 200)
    assert (drawer.puts, drawer.gets) == (2, 0)
    write(home, torch.ones(10), 250)  # a part of a piece: read, changed, written
    assert (drawer.puts, drawer.gets) == (3, 1)
    assert read(home, 200, 400).tolist() == [*range(50), *[1.0] * 10, *range(60, 200)]


def test_a_home_in_a_store_takes_and_gives_other_dtypes():
    home = StoredHome(Drawer(), "state", 10, torch.float32, piece=4)
    write(home, torch.arange(10, dtype=torch.bfloat16))
    out = torch.empty(10, dtype=torch.bfloat16)
    home.fetch(out, HostLane()).wait()
    assert out.tolist() == list(range(10))


def test_pieces_without_elements_are_refused():
    with pytest.raises(ValueError, match="got 0, expected at least one"):
        StoredHome(Drawer(), "state", 10, torch.float32, piece=0)


def test_what_a_step_fetched_is_let_go_behind_it():
    """A view of no elements kept the memory of each master that lives elsewhere."""
    import dsx_zero

    shelf = MemoryStore()
    config = {"stage": 1, "offload_optimizer": {"device": "nvme"}, "sub_group_size": 300}
    model = torch.nn.Linear(40, 40).bfloat16()
    model, optimizer = dsx_zero.shard(model, lambda p: torch.optim.AdamW(p, lr=1e-2), config=config, store=shelf)
    for _ in range(2):
        model(torch.ones(1, 40).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    assert shelf.held == 0
