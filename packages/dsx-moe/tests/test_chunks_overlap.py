"""The order in which chunks of rows are sent and computed: the link is one chunk ahead of the experts, in both passes.
Orders are recorded on an exchange that sends to itself, so that nothing depends on a clock.
"""

from collections import Counter

import pytest
import torch
from dsx_moe.dispatch import RankReport, run_exchanged
from dsx_moe.gating import top1_gating

EXPERTS, TOKENS, HIDDEN = 8, 32, 4


class Loopback:
    """One rank that sends to itself, and writes down when transfers begin and end."""

    size, rank = 1, 0

    def __init__(self, seen):
        self.seen = seen

    def start(self, rows, traffic):
        self.seen.append("begin")
        return Arriving(rows.clone(), self.seen)


class Arriving:
    def __init__(self, rows, seen):
        self.rows, self.seen = rows, seen

    def wait(self):
        self.seen.append("wait")


class Work(torch.autograd.Function):
    """Twice the rows; writes down when it runs."""

    @staticmethod
    def forward(ctx, rows, seen):
        ctx.seen = seen
        seen.append("experts")
        return rows * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append("experts")
        return grad * 2, None


def passes(chunks, during_transfer=None):
    """(events of the forward, events of the backward, output, gradient of the tokens)."""
    seen = []
    torch.manual_seed(0)
    routing = top1_gating(torch.randn(TOKENS, EXPERTS), drop_tokens=False).routing
    tokens = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    report = RankReport(torch.cat([routing.counts, torch.tensor([0, 1])]).view(1, -1))
    out = run_exchanged(
        tokens, routing, lambda rows, counts, first=0: Work.apply(rows, seen), Loopback(seen), report, chunks,
        during_transfer,
    )  # fmt: skip
    forward = list(seen)
    seen.clear()
    out.sum().backward()
    return forward, seen, out, tokens.grad


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8, 11])
def test_both_passes_have_one_chunk_more_on_the_link_than_the_experts_need(chunks):
    forward, backward, out, grad = passes(chunks)
    whole = passes(1)
    assert torch.equal(out, whole[2])
    assert torch.equal(grad, whole[3])
    for events in (forward, backward):
        assert Counter(events) == {"begin": 2 * chunks, "wait": 2 * chunks, "experts": chunks}
        # Of the first sends, those before the experts' first work are all that the link carries for nothing.
        assert events[: events.index("experts")].count("begin") == min(2, chunks)
        for done in range(1, chunks):  # before work number `done`: results of those before it, and one chunk ahead
            place = [i for i, event in enumerate(events) if event == "experts"][done]
            assert events[:place].count("begin") == done + min(done + 2, chunks)
    assert forward == backward


def test_work_that_needs_no_rows_is_done_behind_the_first_send():
    at = []
    forward, *_ = passes(3, lambda: at.append("shared"))
    assert at == ["shared"]
    assert forward[0] == "begin"
