"""Quantised all-gather and hierarchical reduce-scatter: exact where codes are exact, bounded elsewhere, bytes
counted.
"""

import dsx_comm
import pytest
import torch
from dsx_comm.compressed import blocks
from dsx_comm.compressed.blocks import BlockFormat, dequantize_rows, quantize_rows, sum_rows
from dsx_testkit import run_ranks


def through(x, form):
    messages, out = quantize_rows(x[None], form), torch.empty(1, x.numel())
    dequantize_rows(messages, form, out)
    return messages[0], out[0]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_message_says_the_nearest_code(bits, native, monkeypatch):
    if not native:
        monkeypatch.setattr(blocks, "block_kernels", lambda device: None)
    levels, form = {8: 127, 4: 7}[bits], BlockFormat(bits, 64)
    torch.manual_seed(0)
    for numel in (1, 7, 63, 64, 65, 1001):
        x = torch.randn(numel) * 3
        message, back = through(x, form)
        for start in range(0, numel, 64):
            part = x[start : start + 64].double()
            scale = part.abs().max() / levels
            want = (part / scale).round().clamp(-levels, levels) * scale
            off = (back[start : start + 64].double() - want).abs()
            assert (
                (off < 1e-5 * part.abs().max()) | ((off - scale).abs() < 1e-4 * scale)
            ).all()  # ties may fall either way
            assert (off < 1e-5 * part.abs().max()).float().mean() > 0.98
        exact = torch.randint(-levels, levels + 1, (numel,)).float()
        exact[::64] = levels
        assert torch.equal(through(exact, form)[1], exact)
        assert message.numel() == 4 * -(-numel // 64) + -(-(-(-numel * bits // 8)) // 4) * 4
    assert torch.equal(through(torch.zeros(5), form)[1], torch.zeros(5))
    broken = torch.ones(130)
    broken[70] = float("inf")
    back = through(broken, form)[1]
    assert back[:64].eq(1).all() and not back[64:128].isfinite().all() and back[128:].eq(1).all()


def test_both_implementations_write_the_same_codes():
    dsx_ops = pytest.importorskip("dsx_ops")
    if not dsx_ops.native_status()["native"]:
        pytest.skip(dsx_ops.native_status()["reason"])
    for bits in (8, 4):
        form, x = BlockFormat(bits, 128), torch.randn(1001)
        ours, _ = through(x, form)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "block_kernels", lambda device: None)
            plain, back = through(x, form)
            assert (ours != plain).float().mean() < 0.01  # x / scale against x * (1 / scale), where they round apart
        again = torch.empty(1, 1001)
        dequantize_rows(plain[None], form, again)
        torch.testing.assert_close(again[0], back, rtol=1e-6, atol=0)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [128, 192, 7, 1001, 0])
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_what_single_messages_are(bits, numel, dtype, native, monkeypatch):
    if not native:
        monkeypatch.setattr(blocks, "block_kernels", lambda device: None)
    form, count = BlockFormat(bits, 64), 5
    torch.manual_seed(numel)
    rows = torch.randn(count, numel).to(dtype)
    messages = quantize_rows(rows, form)
    assert messages.shape == (count, form.message_bytes(numel))
    single = [quantize_rows(row[None], form)[0] for row in rows]
    assert all(map(torch.equal, messages, single))
    out, total = torch.empty(count, numel, dtype=dtype), torch.zeros(numel)
    dequantize_rows(messages, form, out)
    for message, got in zip(messages, out):
        one, exact = torch.empty(1, numel, dtype=dtype), torch.empty(1, numel)
        dequantize_rows(message[None], form, one)
        dequantize_rows(message[None], form, exact)
        assert torch.equal(one[0], got)
        total += exact[0]
    assert torch.equal(sum_rows(messages, numel, form), total)


def gathers(rank, world, bits, numel):
    levels = {8: 127, 4: 7}[bits]
    generator = torch.Generator().manual_seed(rank)
    mine = torch.randint(-levels, levels + 1, (numel,), generator=generator).float()
    mine[:: min(16, max(numel, 1))] = levels
    form = BlockFormat(bits, 16)
    output = torch.empty(world * numel)
    with dsx_comm.count_traffic() as traffic:
        dsx_comm.quantized_all_gather(output, mine, bits, 16)
    assert traffic.by_op() == {"quantized_all_gather": (1, (world - 1) * form.message_bytes(numel))}
    plain = torch.empty_like(output)
    dsx_comm.all_gather_into_tensor(plain, mine)
    assert torch.equal(output, plain)
    in_place = torch.zeros(world * numel, dtype=torch.bfloat16)
    part = in_place.view(world, -1)[rank]
    part.copy_(mine * 1.1)
    handle = dsx_comm.quantized_all_gather(in_place, part, bits, 16, async_op=True)
    handle.wait()
    everyone = [torch.empty_like(in_place) for _ in range(world)]
    dsx_comm.all_gather(everyone, in_place)
    assert all(torch.equal(one, in_place) for one in everyone)  # the sender too has what the codes say


@pytest.mark.parametrize(("world", "bits", "numel"), [(2, 8, 100), (3, 4, 33), (2, 4, 0), (1, 8, 5)])
def test_gathers(world, bits, numel):
    run_ranks(gathers, world, bits, numel)


def reduces(rank, world, devices, bits, numel, dtype):
    hierarchy = dsx_comm.make_hierarchy(devices)
    inputs = [torch.randn(world * numel, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
    output, form = torch.empty(numel, dtype=dtype), BlockFormat(bits, 64)
    with dsx_comm.count_traffic() as traffic:
        dsx_comm.quantized_reduce_scatter(output, inputs[rank], hierarchy, bits, 64)
    exact = torch.stack(inputs).double().mean(0)[rank * numel : (rank + 1) * numel]
    levels = {8: 127, 4: 7}[bits]
    # half a code of every message: one per rank in the node, one per node of the sums
    bound = 0.5 * (4.5 / levels) * (1 + 1) + (0.02 if dtype == torch.bfloat16 else 1e-5)
    if numel:
        assert (output.double() - exact).abs().max() < bound
        assert (output.double() - exact).abs().max() > 0 or world == 1
    intra = (devices - 1) * form.message_bytes(hierarchy.nodes * numel) if devices > 1 else 0
    inter = (hierarchy.nodes - 1) * form.message_bytes(numel) if hierarchy.nodes > 1 else 0
    assert traffic.sent_bytes() == intra + inter
    if hierarchy.intra is not None:
        assert traffic.sent_bytes(group=hierarchy.intra) == intra
    if hierarchy.inter is not None:
        assert traffic.sent_bytes(group=hierarchy.inter) == inter


@pytest.mark.parametrize(
    ("world", "devices", "bits", "numel", "dtype"),
    [(4, 2, 8, 300, torch.float32), (4, 2, 4, 7, torch.float32), (3, 1, 8, 50, torch.bfloat16),
     (2, 2, 4, 1000, torch.float32), (1, 1, 4, 6, torch.float32), (2, 1, 8, 0, torch.float32)],
)  # fmt: skip
def test_reduce_scatters_in_two_hops(world, devices, bits, numel, dtype):
    run_ranks(reduces, world, devices, bits, numel, dtype)


def routes(rank, world):
    """Codes that are exact in both hops: every element arrives at the rank it belongs to, once."""
    hierarchy = dsx_comm.make_hierarchy(2)
    numel = 10
    value = torch.zeros(world * numel)
    for owner in range(world):
        value[owner * numel : (owner + 1) * numel] = float(owner + 1)  # a block of one value has an exact code
    value = value if rank == 2 else torch.zeros_like(value)
    output = torch.empty(numel)
    dsx_comm.quantized_reduce_scatter(output, value, hierarchy, 8, 2, dsx_comm.ReduceOp.SUM)
    torch.testing.assert_close(output, torch.full((numel,), float(rank + 1)))
    assert (hierarchy.node, hierarchy.device) == divmod(rank, 2)


def test_every_part_arrives_at_its_owner():
    run_ranks(routes, 4)


def of_two_groups(rank, world):
    """Each of two groups has its hierarchy: each of its ranks is a node."""
    members = [rank % 2, rank % 2 + 2]
    group = dsx_comm.new_group(members, local=True)
    hierarchy = dsx_comm.make_hierarchy(1, group)
    output = torch.empty(4)
    dsx_comm.quantized_reduce_scatter(output, torch.full((8,), float(rank)), hierarchy, 8, 4, dsx_comm.ReduceOp.SUM)
    torch.testing.assert_close(output, torch.full((4,), float(sum(members))))


def test_disjoint_groups_make_their_hierarchies_at_the_same_time():
    run_ranks(of_two_groups, 4)


def volumes(rank, world):
    """Against a plain reduce-scatter in float16: 4 times less in all, and D times less than that between nodes."""
    hierarchy, numel = dsx_comm.make_hierarchy(2), 1 << 15
    output, whole = torch.empty(numel, dtype=torch.float16), torch.ones(world * numel, dtype=torch.float16)
    with dsx_comm.count_traffic() as traffic:
        dsx_comm.quantized_reduce_scatter(output, whole, hierarchy)
    inter = traffic.sent_bytes(group=hierarchy.inter)
    plain_inter = numel * 2 * 2  # the two parts of the other node
    assert plain_inter / inter == pytest.approx(4 * 2, rel=5e-3)
    with dsx_comm.count_traffic() as traffic:
        dsx_comm.quantized_all_gather(whole, output)
    assert traffic.sent_bytes() == pytest.approx((world - 1) * numel, rel=5e-3)  # half of float16


def test_volume_of_quantised_weights_and_gradients():
    run_ranks(volumes, 4)


def wrong(rank, world):
    x, y = torch.ones(4), torch.ones(8)
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="bits: got 3, expected 8, 4 or 2"):
        dsx_comm.quantized_all_gather(y, x, 3)
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="block_size: got 5, expected a positive even number"):
        dsx_comm.quantized_all_gather(y, x, 8, 5)
    with pytest.raises(dsx_comm.errors.CommArgumentError, match=r"expected one of torch\.float32"):
        dsx_comm.quantized_all_gather(y.int(), x.int())
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="3 devices per node, expected a divisor of 2"):
        dsx_comm.make_hierarchy(3)
    hierarchy = dsx_comm.make_hierarchy(2)
    with pytest.raises(dsx_comm.errors.CommArgumentError, match=r"op: got .*MAX.*, expected ReduceOp.SUM"):
        dsx_comm.quantized_reduce_scatter(x, y, hierarchy, op=dsx_comm.ReduceOp.MAX)
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="input has 4 elements, output 4"):
        dsx_comm.quantized_reduce_scatter(x, x.clone(), hierarchy)


def test_arguments_that_cannot_be():
    run_ranks(wrong, 2)
