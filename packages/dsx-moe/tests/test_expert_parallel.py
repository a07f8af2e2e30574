"""Experts on several ranks against one process that holds all of them: outputs, losses, gradients, bytes."""

import copy

import dsx_comm
import dsx_moe
import pytest
import torch
from dsx_moe import MoE, PackedExperts
from dsx_moe.errors import MoEConfigError, RoutingError
from dsx_testkit import RankError, run_ranks
from torch import nn

HIDDEN, EXPERTS = 8, 4


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """A dense layer, experts, a dense layer. The output is a loss that includes the balancing loss."""

    def __init__(self, ep_size, packed=False, **options):
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        expert = (
            PackedExperts(EXPERTS, HIDDEN, 12, activation="silu", gated=True) if packed else lambda i: FeedForward()
        )
        self.moe = MoE(HIDDEN, expert, EXPERTS, ep_size, **options)
        self.last = nn.Linear(HIDDEN, 1)

    def forward(self, x):
        out, l_aux, _ = self.moe(self.first(x))
        return self.last(out).square().mean() + 0.1 * l_aux


def build(ep_size, **options):
    torch.manual_seed(7)
    return Model(ep_size, **options).double()


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    # uneven batches: no two ranks send equal counts, and one rank has no tokens in one step
    rows = 0 if (rank, step) == (1, 2) else 5 + 3 * rank
    x = torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64)
    return x if rows else torch.zeros(0, HIDDEN, dtype=torch.float64)


def loss_of(model, x):
    """The model's loss, and 0 for a batch without tokens (whose mean would be NaN); the experts run in both cases."""
    if x.shape[0]:
        return model(x)
    out, l_aux, _ = model.moe(model.first(x))
    return model.last(out).sum() + 0.1 * l_aux


def options_of(drop, k, **more):
    plain = {"k": k, "drop_tokens": drop, "use_rts": False, "top2_2nd_expert_sampling": False, "capacity_factor": 0.6}
    return {**plain, "min_capacity": 1, **more}


def oracle(world, steps, options):
    """One process with all experts; every rank's batch is routed by itself, as its ranks do."""
    model = build(1, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        each = [loss_of(model, batch(rank, step)) for rank in range(world)]
        (sum(each) / world).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses.append([loss.item() for loss in each])
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def train(rank, world, ep_size, steps, options, joined=True):
    if joined:
        dsx_comm.init_distributed()
    model = build(ep_size, **options)
    dsx_moe.broadcast_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(rank, step))
        loss.backward()
        dsx_moe.average_gradients(model)
        norms.append(dsx_moe.clip_grad_norm_(model, 0.5).item())
        optimizer.step()
        losses.append(loss.item())
    local = (model.moe.groups.expert.rank, model.state_dict())  # the names tell which experts this rank holds
    return losses, norms, local


def compare(world, ep_size, options, steps=4, joined=True):
    losses, norms, parameters = oracle(world, steps, {k: v for k, v in options.items() if k not in LAYOUT})
    results = run_ranks(train, world, ep_size, steps, options, joined, backend="gloo" if joined else None)
    for rank, (mine, my_norms, (expert_rank, local)) in enumerate(results):
        assert mine == pytest.approx([step[rank] for step in losses], rel=1e-9, abs=1e-12)
        assert my_norms == pytest.approx(norms, rel=1e-9)
        count = EXPERTS // ep_size
        if not options.get("packed"):
            numbers = {int(name.split(".")[2]) for name in local if name.startswith("moe.experts.")}
            assert numbers == set(range(expert_rank * count, (expert_rank + 1) * count))
        for name, value in local.items():
            expected = parameters[name]
            if options.get("packed") and name.startswith("moe.experts."):
                expected = expected[expert_rank * count : (expert_rank + 1) * count]
            assert torch.allclose(value, expected, rtol=1e-9, atol=1e-12), name


LAYOUT = ("overlap_chunks", "devices_per_node", "use_data_before_expert_parallel")
"""Options that say how tokens are sent; one process does not need them."""
SAMPLE = [
    (4, True, 1, {}),
    (2, False, 2, {}),
    (4, False, 2, {"overlap_chunks": 3, "packed": True}),
    (2, True, 2, {"overlap_chunks": 2, "use_data_before_expert_parallel": True}),
    (4, False, 2, {"devices_per_node": 2}),
]


@pytest.mark.parametrize("ep_size", [1, 2])
def test_layers_may_be_built_before_anybody_calls_init_distributed(ep_size):
    """Ranks of a launcher join; else each of them would train alone."""
    compare(2, ep_size, options_of(False, 2), joined=False)


@pytest.mark.parametrize(("ep_size", "drop", "k", "more"), SAMPLE)
def test_training_equals_one_process(ep_size, drop, k, more):
    compare(4, ep_size, options_of(drop, k, **more))


@pytest.mark.slow
@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_training_equals_one_process_in_every_combination(ep_size, drop, k, packed, chunks):
    compare(4, ep_size, options_of(drop, k, packed=packed, overlap_chunks=chunks))


@pytest.mark.slow
@pytest.mark.parametrize("ep_size", [2, 4])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("data_first", [True, False])
@pytest.mark.parametrize("chunks", [1, 2])
def test_two_hops_equal_one_process_in_every_combination(ep_size, devices, data_first, chunks):
    more = {"devices_per_node": devices, "use_data_before_expert_parallel": data_first, "overlap_chunks": chunks}
    compare(4, ep_size, options_of(False, 2, **more))


def _two_hops(rank, world):
    dsx_comm.init_distributed()
    torch.manual_seed(0)
    layer = MoE(HIDDEN, FeedForward(), EXPERTS, world, k=2, devices_per_node=2, drop_tokens=False)
    x = torch.randn(11, HIDDEN)
    direct = copy.copy(layer)
    direct.dispatch = MoE(HIDDEN, FeedForward(), EXPERTS, world).dispatch
    hops, plain = layer.eval()(x).output, direct.eval()(x).output
    return torch.equal(hops, plain), float(hops.detach().abs().min())


def test_two_hops_deliver_the_same_rows():
    for same, least in run_ranks(_two_hops, 4):
        assert same
        assert least > 0


def _sent_bytes(rank, world, chunks):
    dsx_comm.init_distributed()
    torch.manual_seed(rank)
    layer = MoE(256, nn.Linear(256, 256), 8, world, k=2, drop_tokens=False, overlap_chunks=chunks)
    with torch.no_grad():
        layer.gate.wg.weight[0] += 0.02  # skewed: most tokens go to expert 0
    x = torch.rand(512, 256)
    with dsx_comm.count_traffic() as traffic:
        layer(x)
    return traffic.sent_bytes("all_to_all_single"), traffic.sent_bytes(), layer.stats.kept.view(world, -1).sum(1)


class EventOrder:
    """Records in which order a forward sends tokens and calls its modules."""

    def __init__(self, layer):
        self.events = []
        start = layer.dispatch.exchange.start

        def started(rows, traffic):
            self.events.append("send")
            return start(rows, traffic)

        layer.dispatch.exchange.start = started
        layer.mlp.register_forward_hook(lambda *_: self.events.append("dense"))
        layer.experts.register_forward_hook(lambda *_: self.events.append("experts"))


def _residual(rank, world):
    dsx_comm.init_distributed()
    torch.manual_seed(0)
    layer = MoE(4, nn.Linear(4, 4), 2, world, k=1, use_residual=True, drop_tokens=False)
    order = EventOrder(layer)
    out, *_ = layer(torch.randn(6, 4))
    out.sum().backward()
    return order.events


def test_the_dense_expert_works_while_tokens_travel():
    for events in run_ranks(_residual, 2):
        assert events[:4] == ["send", "dense", "experts", "send"]


@pytest.mark.parametrize("chunks", [1, 3])
def test_exactly_the_routed_rows_travel(chunks):
    results = run_ranks(_sent_bytes, 4, chunks)
    for rank, (rows, everything, kept) in enumerate(results):
        there = int(kept.sum() - kept[rank])
        back = sum(int(other[2][rank]) for sender, other in enumerate(results) if sender != rank)
        exact = (there + back) * 256 * 4
        assert rows == exact
        assert everything <= 1.01 * exact  # ranks also send each other their counts
    assert results[0][2].max() > 1.5 * results[0][2].float().mean()  # it is skewed


def _no_finite_logits(rank, world):
    dsx_comm.init_distributed()
    layer = MoE(HIDDEN, FeedForward(), EXPERTS, world, name="blocks.3.moe")
    x = torch.randn(4, HIDDEN)
    if rank == 2:
        x[0, 0] = float("nan")
    try:
        layer(x)
    except RoutingError as error:
        return str(error)
    return None


def test_logits_of_one_rank_that_are_not_finite_stop_all_ranks():
    for text in run_ranks(_no_finite_logits, 4):
        assert "blocks.3.moe" in text
        assert "rank 2;" in text


def _all_to_one(rank, world):
    dsx_comm.init_distributed()
    torch.manual_seed(0)
    layer = MoE(HIDDEN, FeedForward(), EXPERTS, world, drop_tokens=False, overlap_chunks=2)
    with torch.no_grad():
        layer.gate.wg.weight.zero_()
        layer.gate.wg.weight[EXPERTS - 1] = 1.0
    x = torch.rand(6, HIDDEN)  # no gradient of the input is needed
    layer(x).output.sum().backward()
    return [float(p.grad.abs().sum()) for p in layer.experts.parameters()], layer.stats.kept.tolist()


def test_a_rank_without_tokens_has_zero_gradients_and_does_not_hang():
    results = run_ranks(_all_to_one, 4)
    for rank, (grads, kept) in enumerate(results):
        assert kept == [0, 0, 0, 6]
        assert all((g > 0) == (rank == 3) for g in grads)


def _frozen_below_on_one_rank(rank, world):
    dsx_comm.init_distributed()
    torch.manual_seed(0)
    layer = MoE(HIDDEN, FeedForward(), EXPERTS, world, k=2, drop_tokens=False)
    x = torch.randn(6, HIDDEN, requires_grad=rank == 0)
    layer(x).output.sum().backward()
    return None if x.grad is None else float(x.grad.abs().sum())


def test_one_rank_alone_may_need_the_gradient_of_its_tokens():
    assert run_ranks(_frozen_below_on_one_rank, 2)[0] > 0


def _second_order(rank, world):
    dsx_comm.init_distributed()
    torch.manual_seed(0)
    layer = MoE(4, PackedExperts(2, 4, 6, activation="silu"), 2, world, k=2, drop_tokens=False).double().eval()
    torch.manual_seed(1)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).output.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return second


def test_second_derivatives_equal_one_process():
    alone = run_ranks(_second_order, 1)[0]
    for second in run_ranks(_second_order, 2):
        assert torch.allclose(second, alone)


def _load_and_run(rank, world, ep_size, state, packed):
    dsx_comm.init_distributed()
    torch.manual_seed(99)
    model = Model(ep_size, packed=packed)
    model.load_state_dict(state)
    torch.manual_seed(5)
    return model.moe.eval()(torch.randn(7, HIDDEN)).output.detach()


@pytest.mark.parametrize("packed", [True, False])
def test_a_state_dict_of_one_process_loads_on_several(packed):
    model = Model(1, packed=packed)
    torch.manual_seed(5)
    expected = model.moe.eval()(torch.randn(7, HIDDEN)).output.detach()
    for out in run_ranks(_load_and_run, 2, 2, model.state_dict(), packed):
        assert torch.allclose(out, expected, atol=1e-6)


def _two_orders_of_ranks(rank, world):
    dsx_comm.init_distributed()
    MoE(HIDDEN, FeedForward(), EXPERTS, 2)
    MoE(HIDDEN, FeedForward(), EXPERTS, 2, use_data_before_expert_parallel=True)


def test_layers_of_one_ep_size_must_agree_on_the_order_of_ranks():
    with pytest.raises(RankError, match="exist already"):
        run_ranks(_two_orders_of_ranks, 4)


def _does_not_divide(rank, world):
    dsx_comm.init_distributed()
    for build_layer in (
        lambda: MoE(HIDDEN, FeedForward(), 6, 3),
        lambda: MoE(HIDDEN, FeedForward(), 4, 2, devices_per_node=3),
    ):
        with pytest.raises(MoEConfigError, match="expected a divisor"):
            build_layer()
    layer = MoE(HIDDEN, FeedForward(), 4, 2)
    with pytest.raises(MoEConfigError, match="was built with"):
        layer.set_deepspeed_parallelism(use_data_before_expert_parallel_=True)
    assert copy.deepcopy(layer).dispatch is layer.dispatch


def test_sizes_that_do_not_divide_are_refused():
    run_ranks(_does_not_divide, 2)
