"""What is made from a layout is made once, made again after a write, and goes with the layout."""

import gc
import weakref

import torch
from dsx_sparse_attn import Layout, LocalSlidingWindowSparsityConfig, SparseSelfAttention, block_sparse_attention
from dsx_sparse_attn.backends import triton_gpu
from dsx_sparse_attn.backends.triton_tiles import Grid
from dsx_sparse_attn.cache import derived, on_device


class Made:
    """Counts what it makes."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return [self.count]


def test_values_are_kept_per_key_until_the_layout_is_written_to():
    layout, make = torch.ones(1, 4, 4), Made()
    first = derived(layout, "a", make)
    assert derived(layout, "a", make) is first and derived(layout, "b", make) == [2]
    layout[0, 0, 1] = 0
    assert derived(layout, "a", make) == [3] and derived(layout, "a", make) == [3]
    assert derived(torch.ones(1, 4, 4), "a", make) == [4], "another layout of the same shape has its own"


def test_values_go_with_their_layout():
    layout = torch.ones(1, 4, 4)
    value = weakref.ref(derived(layout, "a", lambda: torch.zeros(3)))
    assert value() is not None
    del layout
    gc.collect()
    assert value() is None


def test_inference_tensors_count_no_writes_so_nothing_is_kept():
    with torch.inference_mode():
        layout, make = torch.ones(1, 4, 4), Made()
        assert derived(layout, "a", make) == [1] and derived(layout, "a", make) == [2]


def test_a_layout_is_moved_once():
    layout = Layout.from_mask(torch.ones(4, 4), 16).plain()
    there = on_device(layout, torch.device("meta"))
    assert on_device(layout, torch.device("meta")) is there and there.dtype == torch.bool
    assert on_device(layout, torch.device("cpu")) is layout


def test_tile_lists_are_sorted_once_for_all_calls_with_a_layout(monkeypatch):
    count = Made()
    original = triton_gpu.tile_lists
    monkeypatch.setattr(triton_gpu, "tile_lists", lambda *a, **o: (count(), original(*a, **o))[1])
    layout, grid = torch.ones(2, 4, 4), Grid(64, 16, 32, 32, False)
    first = triton_gpu._lists(layout, grid, False, 1)
    assert triton_gpu._lists(layout, grid, False, 1) is first and count.count == 1
    triton_gpu._lists(layout, grid, True, 1)
    triton_gpu._lists(layout, grid._replace(causal=True), False, 1)
    assert count.count == 3


def test_a_module_gives_the_same_layout_tensor_for_a_length_and_sees_writes_to_it():
    module = SparseSelfAttention(LocalSlidingWindowSparsityConfig(2, block=16), max_seq_length=128)
    short = module.get_layout(60)
    assert module.get_layout(64) is short and module.get_layout(128) is module.master_layout
    version = short._version
    module.master_layout[0, 1, 0] = 0
    assert short[0, 1, 0] == 0 and short._version > version
    module.load_state_dict({"master_layout": torch.ones_like(module.master_layout)})
    assert module.get_layout(64).eq(1).all()
    module.to(torch.device("cpu")).set_sparsity(LocalSlidingWindowSparsityConfig(2, block=32))
    assert module.get_layout(64).shape == (1, 2, 2)


def test_a_copied_module_does_not_share_cut_layouts_with_its_original():
    import copy

    module = SparseSelfAttention(LocalSlidingWindowSparsityConfig(2, block=16), max_seq_length=128)
    module.get_layout(64)
    other = copy.deepcopy(module)
    other.master_layout.zero_()
    q = torch.randn(1, 2, 64, 8)
    assert other(q, q, q).eq(0).all() and not module(q, q, q).eq(0).any()
    expected = block_sparse_attention(q, q, q, module.master_layout[:, :4, :4])
    assert torch.equal(module(q, q, q), expected)


def test_many_lengths_do_not_pile_up():
    module = SparseSelfAttention(LocalSlidingWindowSparsityConfig(1, block=16), max_seq_length=1024)
    refs = [weakref.ref(module.get_layout(16 * n)) for n in range(1, 60)]
    gc.collect()
    assert sum(r() is not None for r in refs) <= 16
