"""The order in which `auto` asks the backends, for calls on a GPU that is not there and on the CPU."""

import pytest
import torch
from dsx_sparse_attn import dispatch, native
from dsx_sparse_attn.backends import triton_gpu
from dsx_sparse_attn.backends.triton_table import Device
from dsx_sparse_attn.call import AttentionCall
from torch._subclasses import FakeTensorMode


@pytest.fixture
def gpu(monkeypatch):
    """An H200, as far as the refusals ask."""
    monkeypatch.setattr(triton_gpu, "device_of", lambda _: Device((9, 0), 232448, 132))
    monkeypatch.setattr(triton_gpu, "_INSTALLED", True)


def call(device="cuda", block=128, dim=64, dtype=torch.bfloat16, bias="", dropout=False, grad=False):
    with FakeTensorMode():
        q = torch.empty(1, 2, 1024, dim, device=device, dtype=dtype, requires_grad=grad)
        b = torch.empty(1, 1, 1024, 1024, device=device, requires_grad=bias == "trained") if bias else None
        seed = torch.zeros(1, dtype=torch.int64) if dropout else None
        layout = torch.ones(1, 1024 // block, 1024 // block)
    return AttentionCall(q, q, q, layout, b, None, seed, 1.0, block, False, 0.1 if dropout else 0.0)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, "flex"),
        ({"grad": True}, "flex"),
        ({"block": 256}, "flex"),
        ({"bias": "fixed"}, "flex"),
        ({"bias": "trained"}, "triton"),  # flex adds such a gradient up in an order that changes
        ({"dropout": True}, "triton"),
        ({"block": 16}, "triton"),
        ({"dim": 8}, "triton"),
        ({"dim": 320}, "flex"),  # what the kernels refuse
        ({"dim": 320, "bias": "trained"}, "flex"),
        ({"dim": 320, "dropout": True}, "torch"),
        ({"dtype": torch.float64}, "torch"),
        ({"block": 20}, "torch"),
    ],
    ids=str,
)
def test_the_order_on_cuda(gpu, options, expected):
    c = call(**options)
    assert dispatch.first_choice(c, flex_too=True) == expected
    assert dispatch.prefers_flex(c, "auto") == (expected == "flex")
    inside = dispatch.kernels_for(c, "auto").__name__.rsplit(".", 1)[1]
    assert inside in ("triton_gpu", "torch_blocks"), "the operator itself never chooses flex"


def test_the_order_on_the_cpu(monkeypatch):
    assert dispatch.first_choice(call("cpu", dtype=torch.float64), flex_too=True) == "torch"
    assert dispatch.first_choice(call("cpu"), flex_too=True) == ("native" if native.module() else "torch")
    with native.reference_only():
        assert dispatch.first_choice(call("cpu"), flex_too=True) == "torch"
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert dispatch.first_choice(call("cpu"), flex_too=True) == "torch", "nobody is sent to the interpreter unasked"


def test_other_devices_get_the_backend_that_runs_everywhere():
    assert dispatch.first_choice(call("meta"), flex_too=True) == "torch"


def test_every_place_says_why_and_the_last_takes_everything():
    for places in dispatch.ORDER.values():
        assert all(place.why and place.backend in dispatch.BACKENDS for place in places)
        assert places[-1].backend == "torch"
