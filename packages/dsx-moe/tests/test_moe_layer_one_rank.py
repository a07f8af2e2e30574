"""An MoE layer on one rank against a loop over tokens in plain PyTorch."""

import copy
import pickle

import pytest
import torch
from dsx_moe import MoE, PackedExperts, has_moe_layers, is_moe_param, name_layers, update_router_bias
from dsx_moe.errors import MoEConfigError, RoutingError
from torch import nn


class FeedForward(nn.Module):
    def __init__(self, hidden=8, inner=12):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def by_hand(layer, x, k):
    """One token after the other: the outputs of its k best experts, weighted by their gates (normalised if k > 1)."""
    out = torch.zeros_like(x)
    gates = torch.softmax(x @ layer.gate.wg.weight.t(), dim=1)
    for t in range(x.shape[0]):
        best = gates[t].argsort(descending=True)[:k]
        weights = gates[t, best] if k == 1 else gates[t, best] / gates[t, best].sum()
        rows = [w * layer.experts[int(e)](x[t]) for e, w in zip(best, weights)]
        out[t] = torch.stack(rows).sum(0)
    return out


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_dropless_layer_is_the_sum_over_chosen_experts(k):
    torch.manual_seed(0)
    layer = MoE(8, lambda i: FeedForward(), 5, k=k, drop_tokens=False, top2_2nd_expert_sampling=False).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True)
    out, _, counts = layer(x)
    expected = by_hand(layer, x.view(-1, 8), k).view_as(x)
    assert torch.allclose(out, expected)
    assert counts.sum() == 18 * k
    mine = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()], allow_unused=True)
    other = torch.autograd.grad(expected.square().sum(), [x, *layer.parameters()], allow_unused=True)
    for got, want in zip(mine, other):
        assert torch.allclose(got, torch.zeros_like(got) if want is None else want)


def test_dropped_tokens_give_zeros_and_no_gradient():
    layer = MoE(8, FeedForward(), 4, capacity_factor=0.25, min_capacity=1, use_rts=False)
    x = torch.randn(16, 8, requires_grad=True)
    out = layer(x).output
    stats = layer.stats
    assert stats is not None
    assert stats.kept.max() == 1
    assert stats.dropped_share == 1 - int(stats.kept.sum()) / 16
    dropped = out.detach().abs().sum(1) == 0
    assert int(dropped.sum()) == 16 - int(stats.kept.sum())
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad[dropped], torch.zeros_like(grad[dropped]))


def test_an_infinite_row_does_not_reach_dropped_tokens():
    class Overflows(nn.Module):
        def forward(self, x):
            return x / 0

    layer = MoE(4, Overflows(), 2, capacity_factor=0.5, min_capacity=1, use_rts=False)
    out = layer(torch.ones(4, 4)).output
    assert int((out == 0).all(1).sum()) == 3


def test_experts_without_tokens_get_zero_gradients():
    layer = MoE(8, lambda i: FeedForward(), 4, drop_tokens=False)
    with torch.no_grad():
        layer.gate.wg.weight.zero_()
        layer.gate.wg.weight[2, 0] = 100.0
    x = torch.rand(6, 8) + 0.1
    layer(x).output.sum().backward()
    for number in range(4):
        total = sum(float(p.grad.abs().sum()) for p in layer.experts[number].parameters())
        assert (total > 0) == (number == 2)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_experts_equal_copies_of_a_module(gated, bias):
    packed = PackedExperts(3, 8, 12, activation="silu", gated=gated, bias=bias)
    rows, counts = torch.randn(7, 8), [4, 0, 3]
    out = packed(rows, counts)
    for e, part in zip((0, 1, 2), rows.split(counts)):
        inner = part @ packed.up[e].t() + (packed.up_bias[e] if bias else 0)
        inner = torch.nn.functional.silu(inner[:, :12]) * inner[:, 12:] if gated else torch.nn.functional.silu(inner)
        expected = inner @ packed.down_proj[e].t() + (packed.down_bias[e] if bias else 0)
        assert torch.allclose(out[sum(counts[:e]) : sum(counts[: e + 1])], expected, atol=1e-6)


def test_derivatives_of_second_order_exist():
    layer = MoE(4, PackedExperts(3, 4, 6, activation="silu", gated=True), 3, k=2, drop_tokens=False).double().eval()
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x).output, x)
    assert torch.autograd.gradgradcheck(lambda x: layer(x).output, x)


def test_residual_layers_mix_the_output_of_a_dense_expert_in():
    layer = MoE(8, FeedForward(), 2, use_residual=True, drop_tokens=False)
    x = torch.randn(5, 8)
    share = torch.softmax(layer.coefficient(x), -1)
    routed = by_hand(layer, x, 1)
    assert torch.allclose(layer(x).output, routed * share[:, :1] + layer.mlp(x) * share[:, 1:], atol=1e-6)
    assert not any(map(is_moe_param, layer.mlp.parameters()))


def test_an_expert_may_return_a_bias_beside_its_output():
    class Megatron(nn.Linear):
        def forward(self, x):
            return super().forward(x), None

    layer = MoE(8, Megatron(8, 8), 2, use_residual=True)
    assert layer(torch.randn(3, 8)).output.shape == (3, 8)


def test_evaluation_is_deterministic_and_uses_its_own_capacity():
    layer = MoE(8, FeedForward(), 4, k=2, capacity_factor=0.25, eval_capacity_factor=4.0, min_capacity=1).eval()
    x = torch.randn(32, 8)
    assert torch.equal(layer(x).output, layer(x).output)
    assert layer.stats.dropped_share == 0
    layer.train()(x)
    assert layer.stats.dropped_share > 0


def test_jitter_changes_training_only():
    layer = MoE(8, FeedForward(), 4, noisy_gate_policy="Jitter", drop_tokens=False)
    x = torch.randn(32, 8)
    assert not torch.equal(layer.gate.logits(x), layer.gate.logits(x))
    layer.eval()
    assert torch.equal(layer.gate.logits(x), layer.gate.logits(x))


def test_logits_are_float32_under_autocast_and_bfloat16():
    layer = MoE(8, PackedExperts(4, 8, 16), 4, k=2, drop_tokens=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.gate.logits(torch.randn(3, 8)).dtype == torch.float32
        assert layer(torch.randn(3, 8)).output.dtype == torch.float32
    half = layer.to(torch.bfloat16)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    out = half(x)
    assert (out.output.dtype, half.gate.logits(x).dtype, out.l_aux.dtype) == (
        torch.bfloat16, torch.float32, torch.float32,
    )  # fmt: skip


def test_a_batch_without_tokens_gives_zero_gradients():
    layer = MoE(8, FeedForward(), 4, k=2)
    out = layer(torch.randn(0, 8))
    assert out.output.shape == (0, 8)
    out.output.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in layer.experts.parameters())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_name_the_layer(bad):
    model = nn.ModuleDict({"block": nn.ModuleDict({"moe": MoE(8, FeedForward(), 2)})})
    name_layers(model)
    x = torch.randn(3, 8)
    x[1, 2] = bad
    with pytest.raises(RoutingError, match=r"block\.moe.*not finite"):
        model["block"]["moe"](x)


def test_marks_of_expert_parameters_survive_copying_and_pickling():
    layer = MoE(8, FeedForward(), 2)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        marked = {name for name, p in other.named_parameters() if is_moe_param(p)}
        assert marked == {name for name, _ in layer.named_parameters() if name.startswith("experts.")}
        assert all(p.group_name == "ep_size_1" for p in other.experts.parameters())
        x = torch.randn(4, 8)
        assert torch.equal(other.eval()(x).output, layer.eval()(x).output)
    assert has_moe_layers(nn.Sequential(layer)) == (True, 2)
    assert has_moe_layers(nn.Linear(2, 2)) == (False, 0)


def test_the_router_bias_evens_out_the_load():
    torch.manual_seed(0)
    layer = MoE(8, FeedForward(), 4, k=2, bias_update_rate=0.005, drop_tokens=False)
    with torch.no_grad():
        layer.gate.wg.weight.mul_(3)
        layer.gate.wg.weight[0] += 0.5
    x = torch.randn(512, 8) + 1.0
    layer(x)
    before = layer.stats.load.max()
    for _ in range(200):
        layer(x)
        assert update_router_bias(layer) == 1
    layer(x)
    assert layer.stats.load.max() < 1.3 < before
    assert update_router_bias(nn.Sequential(MoE(8, FeedForward(), 4))) == 0
    assert "gate.expert_bias" in layer.state_dict()


def test_the_z_loss_is_added_with_its_weight():
    layer = MoE(8, FeedForward(), 4, z_loss_weight=0.5, drop_tokens=False).eval()
    x = torch.randn(6, 8)
    with_z = layer(x).l_aux
    layer.gate.z_loss_weight = 0.0
    z = layer.gate.logits(x).logsumexp(1).square().mean()
    assert torch.allclose(with_z, layer(x).l_aux + 0.5 * z)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: MoE(8, FeedForward(), 3, ep_size=2), "multiple of ep_size"),
        (lambda: MoE(8, FeedForward(), 4, ep_size=2), "init_distributed"),
        (lambda: MoE(8, FeedForward(), 2, k=3), "k: got 3"),
        (lambda: MoE(8, FeedForward(), 2, noisy_gate_policy="jitter"), "noisy_gate_policy"),
        (lambda: MoE(8, FeedForward(), 2, k=2, noisy_gate_policy="RSample"), "RSample"),
        (lambda: MoE(8, FeedForward(), 2, capacity_factor=0), "capacity"),
        (lambda: MoE(8, lambda i: 3, 2), "expected a module"),
        (lambda: MoE(8, PackedExperts(3, 8, 4), 2), "packed experts"),
        (lambda: MoE(8, PackedExperts(2, 8, 4), 2, use_residual=True), "no dense form"),
        (lambda: MoE(8, nn.Linear(8, 4), 2)(torch.randn(3, 8)), "expert 0 returned"),
        (lambda: MoE(8, FeedForward(), 2)(torch.randn(3, 4)), "hidden states"),
        (lambda: MoE(8, FeedForward(), 2)(torch.zeros(3, 8, dtype=torch.int64)), "floating point"),
        (lambda: MoE(8, FeedForward(), 2, overlap_chunks=0), "overlap_chunks"),
    ],
)
def test_wrong_arguments_are_refused_and_named(build, words):
    with pytest.raises(MoEConfigError, match=words):
        build()


def test_tutel_is_accepted_with_a_warning():
    with pytest.warns(UserWarning, match="use_tutel"):
        MoE(8, FeedForward(), 2, use_tutel=True)
