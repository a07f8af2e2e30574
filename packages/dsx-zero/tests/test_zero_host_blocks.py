"""Blocks of host memory that are used again: by whom, how many there are, and where they begin."""

from __future__ import annotations

import gc
import mmap
import threading

import dsx_zero
import torch
from dsx_zero.homes.blocks import HostBlocks
from torch import nn

MIB = 1 << 18
"""Elements of fp32 in one MiB."""


def test_a_block_is_used_again_when_the_last_tensor_over_it_is_gone():
    blocks = HostBlocks()
    first = blocks.empty(MIB, torch.float32)
    place, view = first.data_ptr(), first.view(1024, 256)[3:].detach()
    assert place % mmap.PAGESIZE == 0 and first.shape == (MIB,)
    view.fill_(7.0)
    del first
    other = blocks.empty(MIB, torch.float32)
    other.fill_(1.0)
    assert other.data_ptr() != place and bool((view == 7.0).all())  # `view` still has it
    del view
    assert blocks.idle_bytes == 4 * MIB
    again = blocks.empty(2 * MIB - 100, torch.bfloat16)  # of another dtype, and a little smaller
    assert again.data_ptr() == place and blocks.idle_bytes == 0


def test_there_are_never_more_bytes_than_were_in_use_at_one_time():
    blocks = HostBlocks()
    generator = torch.Generator().manual_seed(0)
    held, in_use, most = [], [], 0
    for _ in range(300):
        size = int(torch.randint(1, 40, (), generator=generator)) * MIB // 8
        if len(held) == 5:
            place = int(torch.randint(5, (), generator=generator))
            del held[place], in_use[place]
        held.append(blocks.empty(size, torch.float32))
        in_use.append(-(-4 * size // mmap.PAGESIZE) * mmap.PAGESIZE * 65 // 64)  # of a block that was a little larger
        most = max(most, sum(in_use))
        assert blocks.idle_bytes + 4 * sum(t.numel() for t in held) <= most
    held.clear()
    assert 0 < blocks.idle_bytes <= most
    blocks.drop()
    assert blocks.idle_bytes == 0


def test_small_blocks_are_ordinary_and_conversion_to_the_same_dtype_is_no_copy():
    blocks, values = HostBlocks(), torch.randn(MIB, dtype=torch.float32)
    assert blocks.converted(values, torch.float32) is values
    assert torch.equal(blocks.converted(values, torch.bfloat16), values.bfloat16())
    small = blocks.empty(100, torch.float32)
    del small
    assert blocks.idle_bytes == 2 * MIB  # of the converted values alone
    assert blocks.empty(0, torch.float32).numel() == 0


def test_threads_that_take_and_let_go_never_share_a_block():
    blocks, wrong = HostBlocks(), []

    def work(number):
        for turn in range(200):
            mine = blocks.empty(MIB // 4 + number, torch.float32)
            mine.fill_(number * 1000 + turn)
            if turn % 50 == 0:
                gc.collect()
            if not bool((mine == number * 1000 + turn).all()):
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert blocks.idle_bytes <= 4 * (2 << 20)


class Ended:
    def wait(self):
        pass


class Store:
    """Tensors in memory; notes where they are read to."""

    def __init__(self):
        self.tensors, self.places = {}, []

    def __contains__(self, name):
        return name in self.tensors

    def put(self, name, tensor):
        self.tensors[name] = tensor.clone()
        return Ended()

    def get(self, name, out=None):
        self.places.append(out.data_ptr())
        out.copy_(self.tensors[name])
        return Ended()

    def delete(self, name):
        del self.tensors[name]


WIDTH, DEPTH = 256, 8


def trained(store, dtype, steps):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))).to(dtype)
    offload = {} if store is None else {"offload_optimizer": {"device": "nvme"}, "sub_group_size": WIDTH * WIDTH}
    config = {"stage": 3, "stage3_param_persistence_threshold": 0, **offload}
    model, optimizer = dsx_zero.shard(model, lambda p: torch.optim.AdamW(p, lr=1e-2), config=config, store=store)
    for step in range(steps):
        if store is not None and step < steps - 1:
            store.places.clear()
        model(torch.ones(2, WIDTH, dtype=dtype)).float().square().mean().backward()
        optimizer.step(max_norm=1.0)
        optimizer.zero_grad()
    return model, optimizer


def masters_of(optimizer):
    return torch.cat([part.master.clone() for part in optimizer.slices()])


def test_a_step_from_disk_reads_into_the_same_few_pages_in_every_step():
    store = Store()
    _, optimizer = trained(store, torch.bfloat16, steps=5)
    places = store.places
    assert len(places) == 2 * 3 * DEPTH  # two steps read master and two moments of each sub-group
    assert all(place % mmap.PAGESIZE == 0 for place in places)
    # One sub-group is stepped, one is fetched and one is stored: three buffers each, one for a gradient and one for new
    # values.
    assert len(set(places)) <= 3 * 3 + 2
    idle = optimizer.state_bytes_by_tier()["buffers"]["host"]
    assert 3 * 4 * WIDTH * WIDTH <= idle <= (3 * 3 * 4 + 4 + 2) * WIDTH * WIDTH
    _, oracle = trained(None, torch.bfloat16, steps=5)
    assert torch.equal(masters_of(optimizer), masters_of(oracle))
    optimizer.offload_states()
    assert optimizer.state_bytes_by_tier()["buffers"].get("host", 0) == 0
    optimizer.reload_states()
    optimizer.release()
    assert optimizer.states.blocks.idle_bytes == 0
