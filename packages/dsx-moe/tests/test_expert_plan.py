"""Plans of expert parallelism, which are arithmetic and so are tested at large sizes; segments against a loop."""

import pytest
import torch
from dsx_moe.plan import plan_experts
from dsx_moe.segments import repeat_per_segment, segment_matmul, segment_outer, segment_sum


def counts_of(ranks, experts, empty=False):
    generator = torch.Generator().manual_seed(ranks + experts)
    counts = torch.randint(0, 9, (ranks, experts), generator=generator)
    return counts * (torch.rand(ranks, experts, generator=generator) < 0.2) if empty else counts


@pytest.mark.parametrize(("ranks", "experts"), [(1, 3), (2, 2), (4, 12), (8, 8)])
@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
@pytest.mark.parametrize("empty", [True, False])
def test_chunks_send_every_row_once_and_ranks_agree(ranks, experts, chunks, empty):
    counts = counts_of(ranks, experts, empty)
    plans = [plan_experts(counts, rank, chunks) for rank in range(ranks)]
    local = experts // ranks
    for c in range(chunks):
        for plan in plans:
            assert torch.equal(plan.chunks[c].traffic, plans[0].chunks[c].traffic)
    for rank, plan in enumerate(plans):
        assert sum(plan.sizes) == int(counts[rank].sum())
        if plan.order is not None:
            assert sorted(plan.order.tolist()) == list(range(int(counts[rank].sum())))
        arrived = torch.zeros(local, dtype=torch.int64)
        for c, chunk in enumerate(plan.chunks):
            assert plan.sizes[c] == int(chunk.traffic[rank].sum())
            assert chunk.arrivals.sum(1).tolist() == chunk.traffic[:, rank].tolist()
            arrived[chunk.first : chunk.first + chunk.arrivals.shape[1]] += chunk.arrivals.sum(0)
        assert arrived.tolist() == counts[:, rank * local : (rank + 1) * local].sum(0).tolist()


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_received_rows_are_ordered_by_expert(chunks):
    """Rows are pairs (sender, expert). In the order of the plan they must form one segment for each expert."""
    ranks, experts, me = 4, 12, 2
    counts = counts_of(ranks, experts)
    rows = [[(s, e) for e in range(experts) for _ in range(int(counts[s][e]))] for s in range(ranks)]
    plans = [plan_experts(counts, rank, chunks) for rank in range(ranks)]
    for c in range(chunks):
        received = []
        for s, plan in enumerate(plans):
            mine = rows[s] if plan.order is None else [rows[s][i] for i in plan.order.tolist()]
            start = sum(plan.sizes[:c]) + int(plan.chunks[c].traffic[s, :me].sum())
            received += mine[start : start + int(plan.chunks[c].traffic[s, me])]
        chunk = plans[me].chunks[c]
        order = chunk.order_by_expert()
        sorted_rows = received if order is None else [received[i] for i in order.tolist()]
        expected = [me * 3 + chunk.first + i for i, n in enumerate(chunk.counts) for _ in range(n)]
        assert [e for _, e in sorted_rows] == expected


def test_a_plan_of_1024_ranks_is_quick_arithmetic():
    counts = counts_of(1024, 2048)
    plan = plan_experts(counts, 1000, 2)
    assert sum(plan.sizes) == int(counts[1000].sum())
    assert sum(sum(chunk.counts) for chunk in plan.chunks) == int(counts[:, 2000:2002].sum())


@pytest.mark.parametrize("counts", [[3, 0, 2], [0, 0, 5], [0, 0, 0]])
def test_segments_equal_a_loop_to_the_second_derivative(counts):
    generator = torch.Generator().manual_seed(1)

    def made(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    rows, other, weights, values = made(sum(counts), 4), made(sum(counts), 3), made(3, 4, 3), made(3, 4)
    parts = list(zip(rows.split(counts), other.split(counts)))
    torch.testing.assert_close(
        segment_matmul(rows, weights, counts), torch.cat([x @ w for (x, _), w in zip(parts, weights)])
    )
    torch.testing.assert_close(segment_outer(rows, other, counts), torch.stack([x.t() @ y for x, y in parts]))
    torch.testing.assert_close(segment_sum(rows, counts), torch.stack([x.sum(0) for x, _ in parts]))
    bias = made(3, 3)
    torch.testing.assert_close(
        segment_matmul(rows, weights, counts, bias),
        torch.cat([x @ w + b for (x, _), w, b in zip(parts, weights, bias)]),
    )
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x, w: segment_matmul(x, w, counts), (rows, weights))
        assert check(lambda x, w, b: segment_matmul(x, w, counts, b), (rows, weights, bias))
        assert check(lambda x, y: segment_outer(x, y, counts), (rows, other))
        assert check(lambda v: repeat_per_segment(v, counts).square(), (values,))
