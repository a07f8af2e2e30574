"""Which code compresses on which device, and that it is asked once per phase, whatever the number of parameters.

CUDA is stood in for by fake tensors: they have a device, shapes and dtypes and no values, and raise where the host
would have to wait for a value or where tensors of two devices meet.
"""

from collections import Counter

import dsx_comm
import pytest
import torch
from dsx_comm.compressed import OneBitLayout
from dsx_comm.compressed.blocks import BlockFormat, dequantize_rows, quantize_rows, sum_rows
from dsx_comm.compressed.codec import KernelCodec, TorchCodec, codec_for
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

dsx_ops = pytest.importorskip("dsx_ops")


class Counting(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))

    def of_ops(self):
        return {name.removeprefix("dsx_ops::"): n for name, n in self.calls.items() if name.startswith("dsx_ops::")}


@pytest.fixture
def kernels_on_cuda(monkeypatch):
    """As if dsx-ops' CUDA module were built and a GPU were there."""
    monkeypatch.setattr(dsx_ops.status, "missing_kernels", lambda device: "")


def all_phases(layout, device, codec):
    """One all-reduce on one rank, without what travels between."""
    values, error = torch.zeros(layout.numel, device=device), torch.zeros(layout.numel, device=device)
    mean, kept = torch.zeros(layout.chunk, device=device), torch.zeros(layout.chunk, device=device)
    messages = torch.zeros(layout.world_size * layout.message_bytes, dtype=torch.uint8, device=device)
    with Counting() as counted:
        codec.compress(values, error, messages)
        codec.mean(messages, mean)
        codec.compress_chunk(mean, kept, messages.narrow(0, 0, layout.message_bytes))
        codec.decompress(messages, values)
    return counted


ONCE = {"compress_sign_runs": 2, "mean_of_sign_runs": 1, "unpack_sign_runs": 1}


@pytest.mark.parametrize("parameters", [3, 300])
def test_kernels_are_called_once_per_phase(parameters):
    if reason := dsx_ops.status.missing_kernels("cpu"):
        pytest.skip(reason)
    layout = OneBitLayout.of([40 + i % 7 for i in range(parameters)], 4)
    codec = codec_for(layout, 1, torch.device("cpu"), "rms")
    counted = all_phases(layout, "cpu", codec)
    assert counted.of_ops() == ONCE
    assert sum(counted.calls.values()) < 20, counted.calls


@pytest.mark.parametrize("parameters", [3, 300])
def test_on_cuda_the_kernels_do_it_without_the_host_waiting(parameters, kernels_on_cuda):
    layout = OneBitLayout.of([40 + i % 7 for i in range(parameters)], 4)
    with FakeTensorMode():
        codec = codec_for(layout, 1, torch.device("cuda"), "rms")
        assert isinstance(codec, KernelCodec)
        counted = all_phases(layout, "cuda", codec)
    assert counted.of_ops() == ONCE and "aten::_local_scalar_dense" not in counted.calls
    assert sum(counted.calls.values()) < 20, counted.calls


def test_plain_torch_serves_where_there_are_no_kernels(monkeypatch):
    layout = OneBitLayout.of((40, 7), 2)
    for device, scale in (("cpu", "mean"), ("meta", "rms")):
        status = dsx_comm.compressed.codec_status(device, scale)
        assert not status["native"] and status["reason"]
        assert isinstance(codec_for(layout, 0, torch.device(device), scale), TorchCodec)
    monkeypatch.setattr(dsx_ops.status, "missing_kernels", lambda device: f"nothing for {torch.device(device).type}")
    assert (
        dsx_comm.compressed.codec_status("cuda")["reason"]
        == "dsx-ops has no kernels for cuda tensors: nothing for cuda"
    )
    assert isinstance(codec_for(layout, 0, torch.device("cpu"), "rms"), TorchCodec)


@pytest.mark.parametrize("numel", [4096, 5000])
@pytest.mark.parametrize("ranks", [2, 64])
def test_all_messages_of_a_quantised_collective_are_made_and_read_by_one_call(ranks, numel, kernels_on_cuda):
    form = BlockFormat(4, 2048)
    with FakeTensorMode(), Counting() as counted:
        rows = torch.empty(ranks, numel, dtype=torch.bfloat16, device="cuda")
        messages = quantize_rows(rows, form)
        total = sum_rows(messages, numel, form)
        if (
            numel % form.block == 0
        ):  # else the result is copied, which torch does not do with fakes where it has no CUDA
            dequantize_rows(messages, form, rows)
    assert messages.shape == (ranks, form.message_bytes(numel)) and total.device.type == "cuda"
    assert counted.of_ops().pop("dequantize_out", 1) == 1
    assert {name: n for name, n in counted.of_ops().items() if name != "dequantize_out"} == {
        "quantize": 1,
        "reduce_codes": 1,
    }
    assert "aten::_local_scalar_dense" not in counted.calls and sum(counted.calls.values()) < 50, counted.calls
