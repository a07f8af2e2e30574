"""The table of tiles: the first that fits a device is taken; a call that fits with none is refused with the reason."""

import pytest
import torch
from dsx_sparse_attn import explain_backends
from dsx_sparse_attn.backends import triton_gpu
from dsx_sparse_attn.backends.triton_table import KERNELS, Device, Need, Tiles, column_of, fitting
from dsx_sparse_attn.backends.triton_tiles import MAX_BLOCKS_PER_TILE
from dsx_sparse_attn.call import AttentionCall
from torch._subclasses import FakeTensorMode

A100 = Device((8, 0), 166912, 108)
L40 = Device((8, 9), 101376, 142)
H200 = Device((9, 0), 232448, 132)
B200 = Device((10, 0), 232448, 148)
T4 = Device((7, 5), 65536, 40)


def call_on_cuda(dim=64, dtype=torch.bfloat16, block=128, bias=False):
    """A call with tensors on a GPU that is not there."""
    with FakeTensorMode():
        q = torch.empty(1, 2, 1024, dim, device="cuda", dtype=dtype)
        b = torch.empty(1, 1, 1024, 1024, device="cuda") if bias else None
        return AttentionCall(
            q, q, q, torch.ones(1, 1024 // block, 1024 // block), b, None, None, 1.0, block, False, 0.0
        )


@pytest.mark.parametrize("device", [A100, L40, H200, B200], ids=["A100", "L40", "H200", "B200"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("dim", [1, 40, 64, 80, 128, 192, 256])
def test_every_16_bit_call_has_tiles_on_every_device_of_today(dim, block, biased, device):
    for kernel in KERNELS:
        found = fitting(Need(kernel, False, dim, biased, block), device)
        assert found, (kernel, dim)
        for tiles in found:
            down, across = max(1, tiles.rows // block), max(1, tiles.cols // block)
            assert down * across <= MAX_BLOCKS_PER_TILE and min(tiles.rows, tiles.cols) >= 16


def test_float32_goes_to_128():
    for kernel in KERNELS:
        assert fitting(Need(kernel, True, 128, True, 16), H200) and fitting(Need(kernel, True, 64, True, 16), L40)
        assert not fitting(Need(kernel, True, 256, False, 16), H200)


def test_the_first_row_that_fits_is_taken():
    need = Need("dq", False, 64, True, 64)
    on_h200, on_l40 = fitting(need, H200), fitting(need, L40)
    assert on_h200[0].rows > on_l40[0].rows and on_h200[-len(on_l40) :] == on_l40
    assert fitting(need._replace(block=16), H200)[0] == Tiles(64, 64, 4, 2), "tiles of 128 would hold few blocks of 16"


def test_capabilities_have_their_columns():
    assert [column_of(c) for c in [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]] == [0, 0, 1, 2, 2, 0]
    assert column_of((7, 5)) is None and fitting(Need("dq", False, 64, False, 64), T4) == ()


@pytest.mark.parametrize(
    "device, options, text",
    [
        (H200, {}, ""),
        (H200, {"dim": 256, "bias": True}, ""),
        (
            Device((9, 0), 20_000, 132),
            {"dim": 256, "bias": True},
            "forward kernel for head dimension 256 in bfloat16 with a bias",
        ),
        (Device((9, 0), 20_000, 132), {}, "does not fit into the 20000 bytes of shared memory"),
        (H200, {"dim": 256, "dtype": torch.float32}, "has no tiles for head dimension 256 in float32"),
        (T4, {}, "compute capability 7.5, Triton needs 8.0"),
        (H200, {"block": 256}, "got block 256"),
        (H200, {"dim": 512}, "got head dimension 512"),
    ],
)
def test_refusals_look_at_the_device(monkeypatch, device, options, text):
    monkeypatch.setattr(triton_gpu, "device_of", lambda _: device)
    monkeypatch.setattr(triton_gpu, "_INSTALLED", True)
    why = triton_gpu.refusals(call_on_cuda(**options))
    assert why == [] if not text else text in " ".join(why), why


def test_query_heads_share_a_program_when_there_are_enough_programs(monkeypatch):
    monkeypatch.setattr(triton_gpu, "device_of", lambda _: H200)

    def parts(batch, heads, kv_heads, seq):
        with FakeTensorMode():
            q, k = (torch.empty(batch, n, seq, 64, device="cuda", dtype=torch.bfloat16) for n in (heads, kv_heads))
        return triton_gpu.group_parts(
            AttentionCall(q, k, k, torch.ones(1, 1, 1), None, None, None, 1.0, 128, False, 0.0)
        )

    assert parts(1, 32, 1, 1024) == 32, "one key head and 8 tiles: a program for every query head"
    assert parts(1, 32, 1, 16384) == 8, "128 tiles x 8 >= 4 x 132 programs"
    assert parts(64, 32, 8, 4096) == 1 and parts(1, 8, 8, 128) == 1
    assert parts(1, 24, 2, 2048) == 12


def test_a_cpu_call_says_so():
    q = torch.zeros(1, 1, 16, 8)
    why = explain_backends(q, q, q, torch.ones(1, 1, 1))["triton"]
    assert any("tensors are on cpu" in reason for reason in why)
