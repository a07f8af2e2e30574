"""The 1-bit all-reduce against a float64 simulation of the published algorithm, and its bytes against the formula."""

import math

import dsx_comm
import pytest
import torch
from dsx_comm.compressed import ErrorFeedback, OneBitLayout, compressed_all_reduce, signs
from dsx_comm.compressed.codec import rows_of
from dsx_comm.compressed.layout import Range
from dsx_testkit import run_ranks


def simulate(per_rank, worker, server, lengths, world, scale):
    """One all-reduce in float64, element lists and loops: values, worker errors, server errors -> the mean that
    arrives.

    `per_rank[r]`, `worker[r]`: lists of segments. `server`: one list of segments, owned chunk by chunk.
    """
    layout = OneBitLayout.of(lengths, world)
    measure = (lambda x: x.square().mean().sqrt()) if scale == "rms" else (lambda x: x.abs().mean())
    sign = lambda x: torch.where(x >= 0, 1.0, -1.0).double()  # noqa: E731
    mean = [torch.zeros(n, dtype=torch.float64) for n in lengths]
    for r in range(world):
        for s, x in enumerate(per_rank[r]):
            if not len(x):
                continue
            full = x + worker[r][s]
            sent = measure(full) * sign(full)
            worker[r][s] = full - sent
            mean[s] += sent / world
    out = [torch.zeros(n, dtype=torch.float64) for n in lengths]
    for s, m in enumerate(mean):
        for r in range(world):
            low = max(r * layout.chunk - layout.offsets[s], 0)
            high = min((r + 1) * layout.chunk - layout.offsets[s], len(m))
            if low < high:
                full = m[low:high] + server[s][low:high]
                out[s][low:high] = measure(full) * sign(full)
                server[s][low:high] = full - out[s][low:high]
    return out


def several(rank, world, lengths, scale, steps):
    feedback = ErrorFeedback(lengths, scale=scale)
    results = []
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        x = torch.randn(sum(lengths))
        compressed_all_reduce(x, feedback)
        results.append(x)
    worker = [s.clone() for s in feedback.segments(feedback.worker)]
    return results, worker, [(s, a, v.clone()) for s, a, v in feedback.server_ranges()]


@pytest.mark.parametrize("scale", ["rms", "mean"])
@pytest.mark.parametrize(("world", "lengths"), [(2, (64,)), (3, (1000, 3, 0, 129)), (4, (5,)), (2, (1, 1, 1, 4099))])
def test_every_step_is_the_published_algorithm(world, lengths, scale):
    steps = 4
    got = run_ranks(several, world, lengths, scale, steps)
    zeros = lambda: [torch.zeros(n, dtype=torch.float64) for n in lengths]  # noqa: E731
    worker, server = [zeros() for _ in range(world)], zeros()
    for step in range(steps):
        values = []
        for r in range(world):
            torch.manual_seed(100 * step + r)
            values.append(list(torch.randn(sum(lengths)).double().split(list(lengths))))
        want = torch.cat(simulate(values, worker, server, lengths, world, scale))
        for results, _, _ in got:
            torch.testing.assert_close(results[step].double(), want, rtol=1e-5, atol=1e-5)
            assert torch.equal(results[step], got[0][0][step])  # the same bits on every rank
    owned = [torch.full((n,), math.nan, dtype=torch.float64) for n in lengths]
    for r, (_, errors, ranges) in enumerate(got):
        for mine, theirs in zip(errors, worker[r]):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
        for s, start, view in ranges:
            owned[s][start : start + len(view)] = view.double()
    torch.testing.assert_close(torch.cat(owned), torch.cat(server), rtol=1e-5, atol=1e-5)


def nothing_is_lost(rank, world):
    """What was sent so far plus what is kept back is what was put in: the errors hold the rest exactly."""
    lengths = (300, 77)
    feedback, total_in, total_out = ErrorFeedback(lengths), torch.zeros(377), torch.zeros(377)
    for step in range(20):
        torch.manual_seed(step * world + rank)
        x = torch.randn(377) * torch.linspace(0.01, 3, 377)
        total_in += x
        compressed_all_reduce(x, feedback)
        total_out += x
    kept = torch.cat(feedback.segments(feedback.worker))
    dsx_comm.all_reduce(total_in)
    dsx_comm.all_reduce(kept)
    server = torch.zeros(377)
    for segment, start, view in feedback.server_ranges():
        begin = (0, 300)[segment] + start
        server[begin : begin + len(view)] = view
    dsx_comm.all_reduce(server)
    torch.testing.assert_close(total_out, total_in / world - kept / world - server, rtol=1e-4, atol=1e-3)
    return float((total_out - total_in / world).abs().max()), float((total_in / world).abs().max())


def test_the_errors_hold_exactly_what_was_not_sent():
    for lost, size in run_ranks(nothing_is_lost, 3):
        assert lost < 10 and size > 3  # bounded, not growing with the steps


def forms(rank, world):
    lengths = (70, 9)
    torch.manual_seed(rank)
    values = torch.randn(79)
    packed, flat_state, half_state, late_state = (ErrorFeedback(lengths) for _ in range(4))
    a = values.clone()
    compressed_all_reduce(a, packed)
    flat = flat_state.flat()
    for view, part in zip(flat_state.segments(flat), values.split([70, 9])):
        view.copy_(part)
    compressed_all_reduce(flat, flat_state)
    assert torch.equal(torch.cat(flat_state.segments(flat)), a)
    assert torch.equal(flat_state.worker, packed.worker) and torch.equal(flat_state.server, packed.server)
    shaped = values.view(79, 1).clone()
    handle = compressed_all_reduce(shaped, late_state, async_op=True)
    handle.wait()
    assert handle.is_completed() and torch.equal(shaped.view(-1), a)
    half = values.to(torch.bfloat16)
    compressed_all_reduce(half, half_state)
    assert half.dtype == torch.bfloat16 and ((half.float() > 0) == (a > 0)).float().mean() > 0.9
    gaps = flat.clone()
    for view in flat_state.segments(gaps):
        view.zero_()
    assert not gaps.any()  # padding stays zero


def test_padded_flat_shaped_and_16_bit_tensors():
    run_ranks(forms, 2)


def subgroup(rank, world):
    pair = dsx_comm.new_group([2, 0])
    if rank == 1:
        return None
    feedback = ErrorFeedback(40, group=pair)
    x = torch.full((40,), float(rank + 1))
    compressed_all_reduce(x, feedback, pair)
    return x.unique().tolist(), feedback.rank


def test_a_group_in_its_own_order():
    first, none, last = run_ranks(subgroup, 3)
    assert none is None and first == ([2.0], 1) and last == ([2.0], 0)


def alone(rank, world):
    x = torch.tensor([3.0, -1.0, 0.5])
    feedback = ErrorFeedback(3)
    with dsx_comm.count_traffic() as traffic:
        compressed_all_reduce(x, feedback)
    assert x.tolist() == [3.0, -1.0, 0.5] and not feedback.worker.any() and traffic.sent_bytes() == 0
    empty = torch.empty(0)
    compressed_all_reduce(empty, ErrorFeedback(0))


def test_one_rank_compresses_nothing():
    run_ranks(alone, 1)


def ugly(rank, world):
    zeros = torch.zeros(50)
    feedback = ErrorFeedback(50)
    compressed_all_reduce(zeros, feedback)
    assert not zeros.any() and not feedback.worker.any()
    compressed_all_reduce(torch.empty(0), ErrorFeedback(()))
    broken = torch.ones(50)
    broken[7] = math.nan if rank == 1 else 1.0
    compressed_all_reduce(broken, feedback)
    assert broken.isnan().any()  # it shows, on every rank
    wrong = [
        (torch.ones(49), "got 49 elements, expected 50"),
        (torch.ones(100)[::2], "not contiguous"),
        (torch.ones(50, dtype=torch.int64), "got torch.int64, expected one of"),
    ]
    for tensor, text in wrong:
        with pytest.raises(dsx_comm.errors.CommArgumentError, match=text):
            compressed_all_reduce(tensor, feedback)
    alone = dsx_comm.new_group([0])
    if rank == 0:
        with pytest.raises(dsx_comm.errors.CommArgumentError, match="made for rank 0 of 2, but this is rank 0 of 1"):
            compressed_all_reduce(torch.ones(50), feedback, alone)
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="scale: got 'max', expected one of rms, mean"):
        ErrorFeedback(3, scale="max")


def test_zeros_nothing_nan_and_wrong_arguments():
    run_ranks(ugly, 2)


def wire(rank, world):
    """Bytes that the collectives beneath really move, next to what is counted."""
    import torch.distributed as dist

    moved = []
    send, gather = (
        dist.isend,
        dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor,
    )
    dist.isend = lambda t, *a, **k: (moved.append(t.numel() * t.element_size()), send(t, *a, **k))[1]
    name = gather.__name__

    def gathering(output, source, *a, **k):
        moved.append(source.numel() * source.element_size() * (world - 1))
        return gather(output, source, *a, **k)

    setattr(dist, name, gathering)
    lengths = (1 << 19, 777)
    feedback, x = ErrorFeedback(lengths), torch.randn(sum(lengths))
    with dsx_comm.count_traffic() as traffic:
        compressed_all_reduce(x, feedback)
    return sum(moved), traffic.by_op(), feedback.layout.sent_bytes


@pytest.mark.parametrize("world", [2, 3])
def test_counted_bytes_are_the_moved_ones_and_the_formula(world):
    n = (1 << 19) + 777
    for moved, counted, formula in run_ranks(wire, world):
        assert counted == {"compressed_all_reduce": (1, moved)}
        assert moved == formula
        assert formula == pytest.approx(2 * (world - 1) / world * n / 8, rel=1e-3)


def test_the_layout_is_right_for_any_number_of_ranks():
    for world in (1, 2, 3, 7, 64, 1024):
        for lengths in ((1,), (5, 0, 31), (100_000,), tuple(range(1, 60)), ()):
            layout = OneBitLayout.of(lengths, world)
            assert layout.numel == world * layout.chunk and layout.chunk % 32 == 0
            elements = [e for r in range(world) for run in layout.chunk_runs(r) for e in (run.start, run.stop)]
            assert elements == sorted(elements) and all(a % 8 == 0 for a in layout.offsets)
            covered = sum(run.stop - run.start for r in range(world) for run in layout.chunk_runs(r))
            assert covered == sum(lengths) == layout.numel - sum(b - a for a, b in layout.gaps)
    assert OneBitLayout.of(64, 2).sent_bytes == 2 * (4 + 4)
    assert OneBitLayout.of(10**9, 1).sent_bytes == 0
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="lengths >= 0"):
        OneBitLayout.of((3, -1), 2)


def test_packing_against_single_bits():
    values = torch.randn(4096)
    values[:4] = torch.tensor([0.0, -0.0, math.nan, -1e-45])
    bits = torch.empty(512, dtype=torch.uint8)
    signs.pack(values, bits)
    want = [sum((1 << i) for i in range(8) if values[8 * b + i] >= 0) for b in range(512)]
    assert bits.tolist() == want
    out = torch.empty(4096)
    signs.unpack(bits, out)
    assert torch.equal(out, torch.where(values >= 0, 1.0, -1.0))
    assert out[:4].tolist() == [1, 1, -1, -1]


def test_the_shared_memory_backend_gives_the_same_bits():
    from dsx_comm.shm import native

    if native.module() is None:
        pytest.skip(f"no compiled module: {native.reason()}")
    arguments = (3, (1000, 3, 0, 129), "rms", 3)
    for (theirs, worker, _), (ours, same, _) in zip(
        run_ranks(several, *arguments), run_ranks(several, *arguments, backend="dsx")
    ):
        assert all(torch.equal(a, b) for a, b in zip((*theirs, *worker), (*ours, *same)))


@pytest.mark.parametrize("length", [8, 1000, 100_003])
@pytest.mark.parametrize("chunk", [None, 8 * 12600])
def test_kernels_and_torch_compress_alike(length, chunk):
    from dsx_comm.compressed.codec import KernelCodec, TorchCodec, codec_for

    if not dsx_comm.compressed.codec_status()["native"]:
        pytest.skip(dsx_comm.compressed.codec_status()["reason"])
    layout = OneBitLayout((length, 5, 0, length), 2, chunk)
    found = []
    kernels = codec_for(layout, 1, torch.device("cpu"), "rms")
    assert isinstance(kernels, KernelCodec)
    for codec in (TorchCodec(layout, 1, "rms"), kernels):
        torch.manual_seed(length)
        where, values, error = Range.whole(layout), torch.zeros(layout.numel), torch.zeros(layout.numel)
        for view in (*where.views(values), *where.views(error)):
            view.normal_()
        messages = torch.zeros(2 * layout.message_bytes, dtype=torch.uint8)
        codec.compress(values, error, messages)
        mean, kept = torch.zeros(layout.chunk), torch.zeros(layout.chunk)
        codec.mean(messages, mean)
        message, arrived, out = (
            torch.zeros(layout.message_bytes, dtype=torch.uint8),
            mean.clone(),
            torch.zeros(layout.numel),
        )
        codec.compress_chunk(mean.clone(), kept, message)
        codec.decompress(messages, out)
        scales, signs_ = rows_of(messages, layout)
        found.append((scales.clone(), error, arrived, kept, out, signs_))
    *numbers, _ = zip(*found)
    for torch_made, kernel_made in numbers:
        torch.testing.assert_close(torch_made, kernel_made, rtol=1e-5, atol=1e-6)
    for run in layout.runs:  # the signs of elements; of padding they mean nothing
        assert torch.equal(found[0][4][run.start : run.stop] > 0, found[1][4][run.start : run.stop] > 0)
