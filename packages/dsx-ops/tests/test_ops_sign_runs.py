"""Signs of many runs of one buffer in one call: against `onebit` run by run, on every path there is (CPU kernels,
reference, CUDA's on the emulator).
"""

from __future__ import annotations

import contextlib
import os

import dsx_ops
import pytest
import torch
from dsx_ops import native, onebit, sign_runs
from dsx_ops.cuda import loader
from dsx_ops.cuda.operators import KERNELS
from dsx_ops.sign_runs import SignRuns, compress_runs, mean_of_runs, unpack_runs

PIECE = sign_runs.PIECE
LENGTHS = [(8,), (1, 7, 9), (40, 3, 129), (PIECE, PIECE + 1, 5), (3 * PIECE + 77, 12)]


def places(lengths, cut=None):
    """Runs one after the other at multiples of 8, signs packed likewise; `cut`: a stretch of its own every so many
    elements.
    """
    runs, at, byte = [], 0, 5
    for n in lengths:
        step = n if cut is None else cut
        run = []
        for begin in range(at, at + n, step):
            end = min(begin + step, at + n)
            run.append((begin, end, byte))
            byte += -(-(end - begin) // 8) + (cut is not None)
        runs.append(run)
        at += -(-n // 8) * 8
    return runs, at, byte + 3


def emulated(name):
    """The operator's CUDA kernel, run by the emulator on host tensors."""
    return lambda *arguments: KERNELS[name].run(loader.module(), *arguments)


@pytest.fixture(params=["native", "reference", "emulator"])
def way(request, monkeypatch):
    """Runs the test over the compiled CPU kernels, the reference, and the CUDA kernels on the emulator."""
    if request.param == "emulator":
        module = request.getfixturevalue("emulator")
        monkeypatch.setattr(loader, "module", lambda: module)
        for name in ("compress_sign_runs", "unpack_sign_runs", "mean_of_sign_runs"):
            monkeypatch.setattr(torch.ops.dsx_ops, name, emulated(name))
        yield "emulator"
        return
    if request.param == "native" and native.module() is None:
        pytest.skip(native.why_not())
    with contextlib.nullcontext() if request.param == "native" else dsx_ops.reference_only():
        yield request.param


@pytest.mark.parametrize("cut", [None, 64])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_each_run_is_what_one_tensor_would_be(way, lengths, cut):
    torch.manual_seed(sum(lengths))
    where, numel, size = places(lengths, cut)
    runs = SignRuns(where)
    x, error = torch.randn(numel), torch.randn(numel) * 0.3
    bits, scales = torch.full((size,), 0xAA, dtype=torch.uint8), torch.full((len(lengths) + 1,), 7.0)
    kept, before, gaps = error.clone(), x.clone(), torch.ones(numel, dtype=torch.bool)
    compress_runs(x, error, runs, bits, scales)
    assert torch.equal(x, before) and scales[-1] == 7, "nothing else is written"
    out = torch.full((numel,), 3.0)
    unpack_runs(bits, scales, runs, out)
    for run, stretches in enumerate(where):
        ranges = [slice(a, b) for a, b, _ in stretches]
        t = torch.cat([x[r] + kept[r] for r in ranges])
        torch.testing.assert_close(scales[run].double(), t.double().square().mean().sqrt(), rtol=1e-6, atol=0)
        sent = torch.where(t >= 0, scales[run], -scales[run])
        assert torch.equal(torch.cat([out[r] for r in ranges]), sent)
        assert torch.equal(torch.cat([error[r] for r in ranges]), t - sent)
        for a, b, byte in stretches:
            packed = onebit.reference_pack_signs(x[a:b] + kept[a:b])
            assert torch.equal(bits[byte : byte + packed.numel()], packed)
            gaps[a:b] = False
            bits[byte : byte + packed.numel()] = 0xAA
    assert torch.equal(error[gaps], kept[gaps]) and (out[gaps] == 3).all()
    assert (bits == 0xAA).all(), "no byte beside the runs' own is written"


@pytest.mark.parametrize("ranks", [1, 3, 9])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_mean_of_messages_in_the_order_of_ranks(way, lengths, ranks):
    torch.manual_seed(ranks)
    where, numel, size = places(lengths)
    stride = -(-size // 4) * 4 + 4 * len(lengths)
    messages = torch.randint(0, 256, (ranks, stride), dtype=torch.uint8)
    numbers = torch.rand(ranks, len(lengths) + 2)
    order = list(reversed(range(len(lengths))))  # scales at places of their own
    runs = SignRuns([[(*stretch, order[i]) for stretch in run] for i, run in enumerate(where)])
    out = torch.full((numel,), 3.0)
    mean_of_runs(
        messages.view(-1), numbers.view(-1), runs, out, ranks=ranks, bit_stride=stride, scale_stride=numbers.shape[1]
    )
    for run, ((a, b, byte),) in enumerate(where):
        rows = messages[:, byte : byte + -(-(b - a) // 8)].contiguous()
        wanted = onebit.reference_mean_of_signs(rows, numbers[:, order[run]].contiguous(), b - a)
        assert torch.equal(out[a:b], wanted)
    assert (out == 3).sum() == numel - sum(lengths)


def test_views_at_any_address(way):
    """Buffers that are not aligned to 16 bytes."""
    torch.manual_seed(3)
    where, numel, size = places((100, 40))
    runs = SignRuns(where)
    x, error = torch.randn(numel + 1)[1:], torch.randn(numel + 3)[3:]
    aligned = error.clone()
    results = []
    for kept in (error, aligned):
        bits, scales = torch.zeros(size, dtype=torch.uint8), torch.zeros(2)
        compress_runs(x, kept, runs, bits, scales)
        results.append((bits, scales, kept))
    assert all(map(torch.equal, *results))


def test_nan_zeros_and_nothing(way):
    runs = SignRuns([[(0, 9, 0)], [(16, 24, 2)]])
    x, error = torch.zeros(24), torch.zeros(24)
    x[3] = torch.nan
    bits, scales = torch.zeros(3, dtype=torch.uint8), torch.zeros(2)
    compress_runs(x, error, runs, bits, scales)
    assert scales[0].isnan() and scales[1] == 0 and bits.tolist() == [0b11110111, 1, 255]
    assert error[16:].eq(0).all()
    none = SignRuns([])
    assert len(none) == 0
    compress_runs(torch.empty(0), torch.empty(0), none, torch.empty(0, dtype=torch.uint8), torch.empty(0))
    unpack_runs(bits, scales, none, torch.empty(0))


@pytest.mark.skipif(native.module() is None, reason="compares the compiled kernels with each other")
def test_every_instruction_set_and_thread_count_gives_the_same_bits():
    module, threads = native.module(), torch.get_num_threads()
    torch.manual_seed(2)
    where, numel, size = places((70_001, 300_000, 13, 5000))
    runs, x, e = SignRuns(where), torch.randn(numel), torch.randn(numel)

    def everything():
        error, bits, scales, out = e.clone(), torch.zeros(size, dtype=torch.uint8), torch.zeros(4), torch.zeros(numel)
        compress_runs(x, error, runs, bits, scales)
        mean_of_runs(bits, scales, runs, out, ranks=1, bit_stride=0, scale_stride=0)
        return error, bits, scales, out

    before = module.isa()
    try:
        wanted = everything()
        for isa in module.isas():
            module.set_isa(isa)
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                assert all(map(torch.equal, everything(), wanted)), (isa, count)
    finally:
        module.set_isa(before)
        torch.set_num_threads(threads)
    for run, ((a, b, byte),) in enumerate(where):
        one = e[a:b].clone()
        packed, scale = onebit.compress_with_feedback(x[a:b], one)
        assert torch.equal(scale, wanted[2][run]) and torch.equal(one, wanted[0][a:b])
        assert torch.equal(packed, wanted[1][byte : byte + packed.numel()])


def test_writes_are_seen_by_autograd():
    runs = SignRuns([[(0, 16, 0)]])
    weight = torch.randn(16, requires_grad=True)
    error, bits, scales = torch.randn(16), torch.zeros(2, dtype=torch.uint8), torch.zeros(1)
    stale = (weight * error).sum()
    compress_runs(torch.randn(16), error, runs, bits, scales)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    out = torch.zeros(16)
    version = out._version
    unpack_runs(bits, scales, runs, out)
    assert out._version == version + 1


def test_unfit_places_and_tensors_are_named_and_nothing_is_written():
    for wrong, words in (
        ([[(4, 12, 0)]], "begins at a multiple of 8"),
        ([[(8, 8, 0)]], "not empty"),
        ([[]], "run 0: got no stretch"),
        ([[(0, 8, -1)]], "not empty"),
    ):
        with pytest.raises(dsx_ops.errors.TensorError, match=words):
            SignRuns(wrong)
    runs = SignRuns([[(0, 20, 1)]])
    x, error, bits, scales = torch.ones(20), torch.ones(20), torch.zeros(4, dtype=torch.uint8), torch.zeros(1)
    for call, words in (
        (lambda: compress_runs(x[:19], error, runs, bits, scales), "x: got 19 elements, expected at least 20"),
        (lambda: compress_runs(x, error.bfloat16(), runs, bits, scales), "error: got bfloat16"),
        (lambda: compress_runs(x, error, runs, bits[:3], scales), "bits: got 3 bytes, expected at least 4"),
        (lambda: compress_runs(x, error, runs, bits, scales[:0]), "scales: got 0 scales, expected at least 1"),
        (lambda: compress_runs(x, error, SignRuns([[(0, 8, 0, 3)]]), bits, scales), "expected scale r for run r"),
        (lambda: unpack_runs(bits.float(), scales, runs, x), "bits: got float32"),
        (
            lambda: mean_of_runs(bits, scales, runs, x, ranks=2, bit_stride=1, scale_stride=0),
            "bits: got 4 bytes, expected at least 5",
        ),
        (
            lambda: mean_of_runs(bits, scales, runs, x, ranks=0, bit_stride=0, scale_stride=0),
            "expected at least one rank",
        ),
    ):
        with pytest.raises(dsx_ops.errors.TensorError, match=words):
            call()
    assert torch.equal(error, torch.ones(20)) and not bits.any()


def test_missing_kernels_names_the_reason():
    assert dsx_ops.status.missing_kernels("cpu") == native.why_not()
    assert dsx_ops.status.missing_kernels("cuda") == loader.reason()
    assert "no kernels for meta tensors" in dsx_ops.status.missing_kernels("meta")
    with dsx_ops.reference_only():
        assert "reference_only" in dsx_ops.status.missing_kernels(torch.device("cpu"))


@pytest.mark.parametrize("name", ["compress_sign_runs", "unpack_sign_runs", "mean_of_sign_runs"])
def test_the_operators_keep_torchs_rules(name):
    runs = SignRuns([[(0, 20, 0)]])
    bits, scales = torch.zeros(4, dtype=torch.uint8), torch.ones(1)
    arguments = {
        "compress_sign_runs": (torch.randn(20), torch.randn(20), runs.pieces, runs.first, bits, scales),
        "unpack_sign_runs": (bits, scales, runs.pieces, torch.zeros(20)),
        "mean_of_sign_runs": (bits, scales, runs.pieces, 1, 0, 0, torch.zeros(20)),
    }[name]
    torch.library.opcheck(getattr(torch.ops.dsx_ops, name).default, arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(os.environ.get("DSX_SIMCUDA") == "1", reason="CUDA kernels do not run on the simulated device")
def test_a_gpu_gives_the_bits_of_the_cpu_without_waiting():
    where, numel, size = places((3 * PIECE + 77, 12, 5000, 1))
    torch.manual_seed(0)
    x, e = torch.randn(numel), torch.randn(numel)
    results = []
    for device in ("cpu", "cuda"):
        runs = SignRuns(where, device)
        values, error = x.to(device), e.to(device)
        bits = torch.zeros(2 * size, dtype=torch.uint8, device=device)
        scales, mean, out = (torch.zeros(n, device=device) for n in (8, numel, numel))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            compress_runs(values, error, runs, bits, scales)
            mean_of_runs(bits, scales, runs, mean, ranks=2, bit_stride=size, scale_stride=4)
            unpack_runs(bits, scales, runs, out)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([t.cpu() for t in (error, bits, scales, mean, out)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)  # scales: another order of sums
    assert torch.equal(results[0][1], results[1][1])
