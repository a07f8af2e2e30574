"""2-bit codes, error feedback of quantised messages, and collectives of two phases."""

import dsx_comm
import pytest
import torch
from dsx_comm.compressed.blocks import BlockFormat, dequantize_rows, quantize_rows, sum_rows
from dsx_testkit import Nodes, run_ranks


def through(x, form):
    messages, out = quantize_rows(x[None], form), torch.empty(1, x.numel())
    dequantize_rows(messages, form, out)
    return messages[0], out[0]


def test_two_bits_have_the_least_error_for_normal_values_and_never_more_than_the_values():
    form = BlockFormat(2, 64)
    torch.manual_seed(0)
    x = torch.randn(64 * 400)
    message, back = through(x, form)
    assert message.numel() == 400 * (4 + 64 * 2 // 8)
    assert 0.10 < ((x - back) ** 2).mean() < 0.125  # 0.1188 for the uniform quantiser of four levels (Max, 1960)
    one = torch.zeros(64)
    one[7] = 5.0  # a scale that follows the spread alone would send more noise than values here
    for values in (one, torch.ones(64), torch.zeros(64), torch.randn(64) ** 5, torch.randn(13), torch.ones(1)):
        _, found = through(values, form)
        assert (values - found).norm() <= values.norm() * (1 + 1e-6)
        assert values.any() or not found.any()
    broken = torch.randn(130)
    broken[70] = float("nan")
    _, found = through(broken, form)
    assert found[:64].isfinite().all() and not found[64:128].isfinite().any() and found[128:].isfinite().all()
    rows = torch.randn(5, 77)
    messages, out = quantize_rows(rows, form), torch.empty(5, 77)
    dequantize_rows(messages, form, out)
    torch.testing.assert_close(sum_rows(messages, 77, form), out.sum(0))


@pytest.mark.parametrize("bits", [2, 4])
def test_what_a_message_leaves_out_comes_with_the_next_ones(bits):
    torch.manual_seed(0)
    value, form = torch.randn(1, 300), BlockFormat(bits, 64)

    def mean_of(feedback, times=200):
        total = torch.zeros_like(value)
        for _ in range(times):
            out = torch.empty_like(value)
            if feedback is None:
                messages = quantize_rows(value, form)
            else:
                feedback.advance()
                messages = feedback.encode(0, value, form)
            dequantize_rows(messages, form, out)
            total += out
        return (total / times - value).abs().max()

    without = mean_of(None)
    assert mean_of(dsx_comm.QuantizationFeedback()) < 0.05 * without
    # LoCo's average of errors makes up for less than all of them, and forgets them now and then
    assert mean_of(dsx_comm.QuantizationFeedback(decay=0.8, period=64)) < 0.9 * without
    assert mean_of(dsx_comm.QuantizationFeedback(period=1)) == pytest.approx(without.item(), rel=1e-4)


def test_equal_messages_until_the_values_change_and_no_error_that_is_not_finite():
    form, feedback = BlockFormat(4, 64), dsx_comm.QuantizationFeedback()
    x = torch.randn(1, 128)
    first = feedback.encode(0, x, form)
    assert torch.equal(first, feedback.encode(0, x, form))
    feedback.advance()
    assert not torch.equal(first, feedback.encode(0, x, form))
    bad = x.clone()
    bad[0, 3] = float("inf")
    feedback.encode(0, bad, form)
    feedback.advance()
    out = torch.empty_like(x)
    dequantize_rows(feedback.encode(0, x, form), form, out)
    assert out.isfinite().all()
    assert feedback.tensors()
    feedback.reset()
    assert torch.equal(first, feedback.encode(0, x, form)) and x.isfinite().all()
    for wrong in ({"decay": 1.0}, {"decay": -0.1}, {"period": -1}):
        with pytest.raises(dsx_comm.errors.CommArgumentError):
            dsx_comm.QuantizationFeedback(**wrong)


def reduced(rank, world):
    with Nodes(world, 2).environment(rank):
        hierarchy = dsx_comm.make_hierarchy(2)
        inputs = [torch.randn(world * 100, generator=torch.Generator().manual_seed(r)) for r in range(world)]
        exact = torch.stack(inputs).mean(0)[rank * 100 : (rank + 1) * 100]
        errors = []
        for feedback in (None, dsx_comm.QuantizationFeedback()):
            total = torch.zeros(100)
            for _ in range(60):
                out = torch.empty(100)
                handle = dsx_comm.quantized_reduce_scatter(
                    out, inputs[rank], hierarchy, 2, 64, async_op=True, feedback=feedback
                )
                handle.wait()
                total += out
            errors.append((total / 60 - exact).norm())
        assert errors[1] < 0.2 * errors[0]  # both hops make up for what they left out


def test_both_hops_of_a_reduction_feed_back():
    run_ranks(reduced, 4)


def two_phases(rank, world):
    copy, place = divmod(rank, 2)
    shards = [dsx_comm.new_group([2 * c, 2 * c + 1]) for c in range(2)][copy]
    copies = [dsx_comm.new_group([p, 2 + p]) for p in range(2)][place]
    inputs = [torch.randn(20, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    for op, want in ((dsx_comm.ReduceOp.SUM, sum(inputs)), (dsx_comm.ReduceOp.AVG, sum(inputs) / world)):
        out, later = torch.empty(10), torch.empty(10)
        dsx_comm.hybrid_reduce_scatter(out, inputs[rank], copies, op, shards)
        first = dsx_comm.hybrid_reduce_scatter(later, inputs[rank], copies, op, shards, async_op=True)
        second = dsx_comm.hybrid_reduce_scatter(out, inputs[rank], copies, op, shards, async_op=True)
        for handle in (first, second) if rank % 2 else (second, first):  # in whichever order they are waited for
            handle.wait()
        for found in (out, later):
            torch.testing.assert_close(found, want[place * 10 : place * 10 + 10])
    with Nodes(world, 2).environment(rank):
        hierarchy = dsx_comm.make_hierarchy()
    mine = torch.arange(6.0) + 10 * rank
    want, found = torch.empty(24), torch.empty(24)
    dsx_comm.all_gather_into_tensor(want, mine)
    handle = dsx_comm.hierarchical_all_gather(found, mine, hierarchy, async_op=True)
    handle.wait()
    assert torch.equal(found, want)
    with dsx_comm.count_traffic() as traffic:
        dsx_comm.hierarchical_all_gather(found, mine, hierarchy)
    assert traffic.sent_bytes(group=hierarchy.inter) == mine.nbytes  # to the one other node
    with pytest.raises(dsx_comm.errors.CommArgumentError):
        dsx_comm.hierarchical_all_gather(found[:-1], mine, hierarchy)


def test_collectives_of_two_phases():
    run_ranks(two_phases, 4)
