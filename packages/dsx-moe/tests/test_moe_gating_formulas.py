"""Gating against a slow float64 reference, which follows the published formulas one token at a time."""

import math

import pytest
import torch
from dsx_moe import top1_gating, top2_gating, topk_gating
from dsx_moe.errors import MoEConfigError
from dsx_moe.gating import expert_capacity, router_z_loss


def reference(logits, choices, capacity, *, order, normalise, first_only):
    """(dense weights [T, E], requests [E], balancing loss).

    `order(expert, route, gates)` is the sort key of a route (token, which of its choices); each expert keeps its first
    `capacity` routes.
    """
    T, E = logits.shape
    gates = [[math.exp(v - max(row)) for v in row] for row in logits.tolist()]
    gates = [[v / sum(row) for v in row] for row in gates]
    requested = [0] * E
    asked = [[(t, j) for t in range(T) for j, e in enumerate(choices[t]) if e == want] for want in range(E)]
    for e in range(E):
        requested[e] = len(asked[e])
    weights = torch.zeros(T, E, dtype=torch.float64)
    for e in range(E):
        for t, _ in sorted(asked[e], key=lambda route: order(e, route, gates))[:capacity]:
            weights[t, e] = gates[t][e]
    if normalise:
        weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).eps)
    loss = 0.0
    for e in range(E):
        mask = sum(1 for t in range(T) if e in (choices[t][:1] if first_only else choices[t]))
        loss += sum(g[e] for g in gates) / T * mask / T
    return weights, requested, loss * E


def by_score(logits, k):
    """The k experts of each token, largest logit first; of experts with equal logits the one with the lower index."""
    return [sorted(range(len(row)), key=lambda e: (-row[e], e))[:k] for row in logits.tolist()]


def case(name, T=23, E=5):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(T, E, generator=generator, dtype=torch.float64)
    if name == "ties":
        logits = (logits * 2).round() / 2
    if name == "all equal":
        logits = torch.zeros(T, E, dtype=torch.float64)
    if name == "one expert":
        logits[:, 3] += 50
    if name == "no tokens":
        logits = logits[:0]
    return logits


CASES = ["random", "ties", "all equal", "one expert"]


def check(gating, expected, capacity):
    weights, requested, loss = expected
    routing = gating.routing
    assert routing.requested.tolist() == requested
    assert torch.allclose(routing.combine_weights().sum(2), weights, atol=1e-12, rtol=0)
    assert gating.l_aux.item() == pytest.approx(loss, abs=1e-12)
    assert routing.counts.tolist() == [min(r, capacity) for r in requested]
    assert routing.expert.tolist() == sorted(routing.expert.tolist())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("drop", [True, False])
def test_top1_without_random_selection_keeps_the_earliest(name, drop):
    logits = case(name)
    capacity = expert_capacity(*logits.shape, 1.0, 2) if drop else 10**6
    expected = reference(
        logits, by_score(logits, 1), capacity, order=lambda e, r, g: r[0], normalise=False, first_only=True
    )
    check(top1_gating(logits, 1.0, 2, drop_tokens=drop, use_rts=False), expected, capacity)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("drop", [True, False])
def test_top2_second_choices_queue_behind_first_choices(name, drop):
    logits = case(name)
    capacity = expert_capacity(*logits.shape, 2 * 0.6, 2) if drop else 10**6
    expected = reference(
        logits, by_score(logits, 2), capacity, order=lambda e, r, g: (r[1], r[0]), normalise=True, first_only=True
    )
    check(top2_gating(logits, 0.6, 2, drop_tokens=drop, top2_2nd_expert_sampling=False), expected, capacity)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("k", [2, 3, 5])
def test_topk_drops_by_gate_or_by_position(name, policy, k):
    logits = case(name)
    capacity = expert_capacity(*logits.shape, k * 0.7, 2)
    orders = {"probs": lambda e, r, g: (-g[r[0]][e], r[0]), "position": lambda e, r, g: r[0]}
    weights, requested, loss = reference(
        logits, by_score(logits, k), capacity, order=orders[policy], normalise=True, first_only=False
    )
    check(topk_gating(logits, k, 0.7, 2, drop_policy=policy), (weights, requested, loss / k), capacity)


@pytest.mark.parametrize(
    "gate", [lambda x: top1_gating(x), lambda x: top2_gating(x), lambda x: topk_gating(x, 3)], ids=["1", "2", "3"]
)
def test_no_tokens_give_no_routes_and_a_loss_of_zero(gate):
    gating = gate(case("no tokens"))
    assert gating.routing.token.numel() == 0
    assert gating.l_aux.item() == 0.0
    assert gating.routing.dropped_share().item() == 0.0


def test_random_token_selection_keeps_equally_many_tokens_but_not_always_the_same():
    logits = torch.zeros(40, 2).index_fill_(1, torch.tensor([1]), 5.0)
    kept = {tuple(top1_gating(logits, 0.5, 4, use_rts=True).routing.token.tolist()) for _ in range(8)}
    assert all(len(tokens) == expert_capacity(40, 2, 0.5, 4) for tokens in kept)
    assert len(kept) > 1


def test_unused_tokens_are_not_routed_and_take_no_capacity():
    logits = torch.zeros(10, 2, dtype=torch.float64)
    used = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1, 1])
    for gating in (
        top1_gating(logits, 1.0, 5, used_token=used, use_rts=False),
        topk_gating(logits, 1, 1.0, 5, used_token=used, drop_policy="position"),
    ):
        assert gating.routing.token.tolist() == [3, 4, 5, 6, 7]
        assert gating.routing.requested.tolist() == [7, 0]
        assert gating.l_aux.item() == pytest.approx(2 * 0.5 * 0.7)
    assert top2_gating(logits, used_token=used).routing.requested.sum() == 14


def test_rsample_and_the_second_expert_follow_the_softmax():
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(40000, 1)
    share = torch.softmax(logits[0], 0)
    drawn = top1_gating(logits, noisy_gate_policy="RSample", drop_tokens=False).routing.requested / 40000
    assert torch.allclose(drawn, share, atol=0.02)
    before = logits.clone()
    second = top2_gating(logits, drop_tokens=False).routing.requested / 40000
    assert torch.allclose(second[:2], share[:2] / share[:2].sum(), atol=0.02)
    assert second[2] == 1
    assert torch.equal(before, logits)  # gating does not write its noise into the logits


def test_gradients_of_weights_and_losses_are_those_of_the_formulas():
    logits = case("random").requires_grad_()

    def values(logits):
        gating = topk_gating(logits, 2, drop_tokens=False)
        return gating.routing.weight, gating.l_aux, router_z_loss(logits)

    assert torch.autograd.gradcheck(values, logits)
    assert router_z_loss(logits).item() == pytest.approx(logits.logsumexp(1).square().mean().item())


def test_two_experts_of_a_row_of_minus_infinity_stay_distinct():
    logits = torch.tensor([[1.0, float("-inf"), float("-inf")]])
    routing = top2_gating(logits, drop_tokens=False, top2_2nd_expert_sampling=False).routing
    assert sorted(routing.expert.tolist()) == [0, 1]
    assert routing.combine_weights().sum(2)[0].tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: top1_gating(torch.zeros(3)), "logits"),
        (lambda: top1_gating(torch.zeros(3, 2, dtype=torch.int64)), "logits"),
        (lambda: topk_gating(torch.zeros(3, 2), 3), "k: got 3"),
        (lambda: topk_gating(torch.zeros(3, 2), 1, drop_policy="x"), "drop_policy"),  # type: ignore[arg-type]
        (lambda: top1_gating(torch.zeros(3, 2), used_token=torch.ones(2)), "used_token"),
        (lambda: top2_gating(torch.zeros(3, 1)), "k: got 2"),
    ],
)
def test_wrong_arguments_are_named(call, words):
    with pytest.raises(MoEConfigError, match=words):
        call()


@pytest.mark.parametrize("gate", [top1_gating, top2_gating, lambda x, **more: topk_gating(x, 3, **more)])
def test_routes_that_are_cut_later_are_the_same(gate):
    """Dropped routes may stay until the host knows their number; values and gradients do not change."""
    results = []
    for cut in (True, False):
        torch.manual_seed(0)
        logits = torch.randn(20, 4, dtype=torch.float64).requires_grad_()
        used = torch.arange(20) % 5 != 0
        routing = gate(logits, capacity_factor=0.5, min_capacity=1, used_token=used, cut=cut).routing
        assert routing.uncut is not cut
        total = int(routing.counts.sum())
        assert 0 < total < int(routing.requested.sum()) and (routing.token.numel() == total) is cut
        dense = routing.combine_weights()
        routing = routing.cut(total)
        dense.square().sum().backward()
        fields = (routing.token, routing.expert, routing.weight, routing.slot, routing.counts, routing.requested)
        results.append((routing.uncut, *fields, dense, logits.grad))
    for one, other in zip(*results, strict=True):
        assert one == other if isinstance(one, bool) else torch.equal(one, other)
