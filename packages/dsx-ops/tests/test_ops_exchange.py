"""ZeRO++'s swizzle, quantised reduction and error feedback: a two-hop exchange played on one process against the exact
sum.
"""

import contextlib
import functools

import dsx_ops
import pytest
import torch
from dsx_ops import native
from dsx_ops.codes.exchange import (
    LocoQuantizer,
    reduce_dequantize,
    reduce_quantize,
    swizzle_quantize,
    unswizzle_dequantize,
)
from dsx_ops.codes.quantize import Quantized

WAYS = {"native": contextlib.nullcontext, "reference": dsx_ops.reference_only}


@pytest.fixture(params=WAYS)
def way(request):
    """Runs the test over the compiled kernels and over the reference."""
    with WAYS[request.param]():
        yield request.param


def stacked(parts):
    """Messages one after another."""
    return Quantized(*(torch.cat(tensors) for tensors in zip(*parts)))


@pytest.mark.parametrize("bits,symmetric,stochastic", [(4, True, False), (8, True, True), (4, False, True)])
@pytest.mark.parametrize("nodes,devices,pipeline", [(2, 3, 1), (3, 2, 2), (1, 4, 1), (1, 1, 3)])
def test_swizzle_is_a_transposition_of_groups(way, nodes, devices, pipeline, bits, symmetric, stochastic):
    torch.manual_seed(0)
    how = {"bits": bits, "symmetric": symmetric, "group_size": 32}
    grid = torch.randn(nodes, devices, pipeline, 64)
    moved = swizzle_quantize(
        grid, nodes=nodes, devices=devices, pipeline=pipeline, stochastic=stochastic, seed=3, **how
    )
    plain = dsx_ops.quantize(grid, stochastic=stochastic, seed=3, **how)

    def turned(t):
        return t.view(nodes, devices, pipeline, -1).permute(2, 1, 0, 3).reshape(-1)

    assert torch.equal(moved.codes, turned(plain.codes)) and torch.equal(moved.scale, turned(plain.scale))
    assert symmetric or torch.equal(moved.zero, turned(plain.zero))
    back = unswizzle_dequantize(moved, grid.shape, nodes=nodes, devices=devices, pipeline=pipeline, **how)
    assert torch.equal(back, dsx_ops.dequantize(plain, grid.shape, **how))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "numel,group,ranks", [(1, 16, 3), (1000, 64, 1), (1000, 64, 4), (1000, 48, 9), (40_002, 250, 3)]
)
def test_reduction_is_the_sum_of_what_the_codes_mean(way, numel, group, ranks, bits, symmetric):
    torch.manual_seed(1)
    how = {"bits": bits, "symmetric": symmetric, "group_size": group}
    parts = [dsx_ops.quantize(torch.randn(numel), **how) for _ in range(ranks)]
    values = [dsx_ops.dequantize(q, numel, **how) for q in parts]
    total = reduce_dequantize(stacked(parts), ranks=ranks, numel=numel, **how)
    assert torch.equal(total, functools.reduce(torch.add, values))
    mean = reduce_dequantize(stacked(parts), ranks=ranks, numel=numel, mean=True, **how)
    torch.testing.assert_close(mean.double(), torch.stack(values).double().mean(0), rtol=1e-6, atol=1e-6)
    again = reduce_quantize(stacked(parts), ranks=ranks, numel=numel, mean=True, out_bits=8, out_group_size=48, **how)
    wanted = dsx_ops.quantize(mean, bits=8, group_size=48, symmetric=symmetric)
    assert all(torch.equal(a, b) for a, b in zip(again, wanted))


def test_two_hops_give_every_device_its_chunk_of_the_sum(way):
    """N nodes of D devices; the messages change hands here by indexing."""
    torch.manual_seed(2)
    nodes, devices, chunk, group = 2, 3, 128, 32
    grads = torch.randn(nodes, devices, nodes * devices * chunk)
    how = {"bits": 8, "group_size": group}
    sent = [[swizzle_quantize(g, nodes=nodes, devices=devices, **how) for g in row] for row in grads]

    def piece(q, index, parts):
        return [t.view(parts, -1)[index] if t.numel() else t for t in q]

    half = {
        (n, d): reduce_quantize(
            stacked([piece(sent[n][peer], d, devices) for peer in range(devices)]),
            ranks=devices,
            numel=nodes * chunk,
            **how,
        )
        for n in range(nodes)
        for d in range(devices)
    }
    wanted = grads.double().sum((0, 1)).view(nodes, devices, chunk)
    for n in range(nodes):
        for d in range(devices):
            messages = stacked([piece(half[peer, d], n, nodes) for peer in range(nodes)])
            got = reduce_dequantize(messages, ranks=nodes, numel=chunk, **how)
            assert (got.double() - wanted[n, d]).abs().max() < 0.15


@pytest.mark.skipif(native.module() is None, reason="compares the compiled kernels with the reference")
def test_every_path_gives_the_same_bits():
    module, threads = native.module(), torch.get_num_threads()
    before = module.isa()
    x = torch.randn(6, 4 * 1200)

    def run():
        how = {"bits": 4, "group_size": 100}
        parts = [swizzle_quantize(row, nodes=2, devices=2, stochastic=True, seed=1, **how) for row in x]
        messages = stacked(parts)
        again = reduce_quantize(messages, ranks=6, numel=4800, stochastic=True, seed=2, offset=7, **how)
        return [*messages, *again, reduce_dequantize(messages, ranks=6, numel=4800, **how)]

    try:
        with dsx_ops.reference_only():
            wanted = run()
        for isa in module.isas():
            module.set_isa(isa)
            for count in (1, 3):
                torch.set_num_threads(count)
                assert all(torch.equal(a, b) for a, b in zip(run(), wanted)), (isa, count)
    finally:
        module.set_isa(before)
        torch.set_num_threads(threads)


def test_loco_sends_in_later_calls_what_rounding_lost(way):
    torch.manual_seed(3)
    x = torch.randn(1024) * torch.linspace(0.01, 1, 1024)
    loco = LocoQuantizer(1024, beta=0.0, group_size=128)
    sent = torch.zeros(1024)
    for _ in range(200):
        sent += dsx_ops.dequantize(loco.quantize(x, bits=4), 1024, bits=4, group_size=128)
    plain = dsx_ops.dequantize(dsx_ops.quantize(x, bits=4, group_size=128), 1024, bits=4, group_size=128)
    with_feedback, without = (sent / 200 - x).norm(), (plain - x).norm()
    assert with_feedback < 0.1 * without
    loco.reset, loco.calls = 1, 0
    loco.quantize(x)
    assert not dsx_ops.dequantize(loco.error, 1024, group_size=128).any(), "a reset forgets the error"


def test_wrong_arguments_are_named():
    x = torch.ones(256)
    q = dsx_ops.quantize(x, bits=4, group_size=32)
    for words, call in (
        (
            "expected a multiple of 192",
            lambda: swizzle_quantize(x, nodes=2, devices=3, group_size=32),
        ),
        ("expected numbers >= 1", lambda: swizzle_quantize(x, nodes=0, devices=1)),
        (
            "expected a multiple of 3 ranks",
            lambda: reduce_dequantize(q, ranks=3, numel=85, group_size=32),
        ),
        ("ranks: got 0", lambda: reduce_quantize(q, ranks=0, numel=256)),
        ("for 100 elements", lambda: reduce_dequantize(q, ranks=2, numel=100, group_size=32)),
        ("got 256 elements, expected 255", lambda: LocoQuantizer(255).quantize(x)),
    ):
        with pytest.raises(dsx_ops.errors.TensorError, match=words):
            call()
    with pytest.raises(dsx_ops.errors.HyperparameterError, match="beta: got 1"):
        LocoQuantizer(8, beta=1)


@pytest.mark.parametrize("part", [0, 1])
def test_messages_that_are_not_contiguous_are_refused(part):
    q = list(dsx_ops.quantize(torch.randn(4 * 64), bits=8, group_size=64))
    q[part] = q[part].new_zeros(q[part].numel(), 2)[:, 0]
    with pytest.raises(dsx_ops.errors.TensorError, match="expected contiguous"):
        reduce_dequantize(dsx_ops.codes.quantize.Quantized(*q), ranks=4, numel=64, bits=8, group_size=64)
    with pytest.raises(dsx_ops.errors.TensorError, match="expected contiguous"):
        reduce_quantize(dsx_ops.codes.quantize.Quantized(*q), ranks=4, numel=64, bits=8, group_size=64)
