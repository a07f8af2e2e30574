"""Layer dropping: the published schedule, the same layers on every rank and in recomputation, expected values kept."""

import copy
import math

import pytest
import torch
from dsx_data import ProgressiveLayerDrop, RandomLTDScheduler, convert_to_layer_drop, convert_to_random_ltd
from dsx_data.errors import DataArgumentError
from dsx_data.routing import LayerDrop, find_layer_drop, remove_layer_drop
from dsx_testkit import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    def __init__(self, tuples=False):
        super().__init__()
        self.linear, self.tuples, self.runs = nn.Linear(6, 6), tuples, 0

    def forward(self, hidden, attention_mask=None):
        self.runs += 1
        out = hidden + torch.tanh(self.linear(hidden))
        return (out, "cache") if self.tuples else out


def stack(layers=6, tuples=False):
    torch.manual_seed(0)
    return nn.ModuleList(Layer(tuples) for _ in range(layers)).double()


def run(layers, x, wrap=lambda f, x: f(x)):
    for layer in layers:
        out = wrap(layer, x)
        x = out[0] if isinstance(out, tuple) else out
    return x


@pytest.mark.parametrize("theta, gamma", [(0.5, 0.001), (0.0, 0.1), (1.0, 0.5), (0.3, 0.0)])
def test_the_schedule_is_the_formula(theta, gamma):
    schedule = ProgressiveLayerDrop(theta, gamma)
    assert schedule.get_theta() == 1.0 and schedule.get_state() == {"progressive_layer_drop": True, "pld_theta": 1.0}
    drop = LayerDrop(schedule, 12)
    for step in range(0, 4000, 37):
        drop.update_state(step)
        expected = (1 - theta) * math.exp(-gamma * step) + theta
        assert schedule.get_theta() == pytest.approx(expected, abs=1e-12)
        for layer in range(12):
            assert drop.keep_probability(layer) == pytest.approx(1 - layer / 12 * (1 - expected))
    with pytest.raises(DataArgumentError, match=r"theta 1\.5"):
        ProgressiveLayerDrop(1.5)


def test_keep_probabilities_are_those_of_the_papers_algorithm():
    """Algorithm 1 of Zhang and He 2020: p begins at 1 and falls by (1 - theta) / L behind each layer."""
    drop = LayerDrop(ProgressiveLayerDrop(0.5, 0.01), 5)
    drop.update_state(70)
    theta, p = drop.schedule.get_theta(), 1.0
    for layer in range(5):
        assert drop.keep_probability(layer) == pytest.approx(p)
        p -= (1 - theta) / 5


@pytest.mark.parametrize("copied", [False, True])
def test_the_schedule_may_be_advanced_instead_of_the_layers(copied):
    layers, schedule = stack(), ProgressiveLayerDrop(0.2, 1.0)
    drop = convert_to_layer_drop(layers, Layer, schedule=schedule)
    if copied:
        layers = copy.deepcopy(layers)
        drop = find_layer_drop(layers)
        schedule = drop.schedule
    other = LayerDrop(ProgressiveLayerDrop(0.2, 1.0), 6)
    x = torch.randn(3, 6, dtype=torch.float64)
    run(layers, x)  # all run: a layer that is skipped first would run once, to see what it returns
    for step in range(1, 12):
        schedule.update_state(step)
        other.update_state(step)
        before = [layer.runs for layer in layers]
        run(layers, x)
        assert [layer.runs > runs for layer, runs in zip(layers, before)] == [other.keeps(i) for i in range(6)]
    drop.use_schedule(ProgressiveLayerDrop(1.0))
    schedule.update_state(13)
    assert drop.step == 11 and all(drop.keeps(i) for i in range(6)), "it follows the new schedule"


def test_layers_are_kept_with_their_probability():
    drop = LayerDrop(ProgressiveLayerDrop(0.4, 1.0), 4, seed=9)
    kept = [0] * 4
    for step in range(100, 4100):
        drop.update_state(step)
        kept = [count + drop.keeps(layer) for layer, count in enumerate(kept)]
    for layer, count in enumerate(kept):
        assert count / 4000 == pytest.approx(drop.keep_probability(layer), abs=0.03)
    other = LayerDrop(ProgressiveLayerDrop(0.4, 1.0), 4, seed=9)
    other.load_state_dict(drop.state_dict())
    assert [other.keeps(i) for i in range(4)] == [drop.keeps(i) for i in range(4)]


@pytest.mark.parametrize("tuples", [False, True])
def test_a_kept_layer_is_rescaled_and_a_dropped_one_does_nothing(tuples):
    layers = stack(tuples=tuples)
    plain = copy.deepcopy(layers)
    drop = convert_to_layer_drop(layers, Layer, schedule=ProgressiveLayerDrop(0.2, 1.0))
    assert find_layer_drop(layers) is drop and find_layer_drop(plain) is None
    x = torch.randn(3, 6, dtype=torch.float64)
    dropped = 0
    for step in range(20, 60):
        drop.update_state(step)
        expected = x
        for number, layer in enumerate(plain):
            if drop.keeps(number):
                out = layer(expected)
                change = (out[0] if tuples else out) - expected
                expected = expected + change / drop.keep_probability(number)
            else:
                dropped += 1
        assert torch.allclose(run(layers, x), expected, atol=1e-12)
    assert dropped > 20
    assert [layer.runs for layer in layers] <= [layer.runs + 1 for layer in plain], "what is dropped is not computed"
    layers.eval()
    assert torch.equal(run(layers, x), run(plain, x))
    remove_layer_drop(layers)
    assert {type(layer) for layer in layers} == {Layer}


def test_the_mean_over_many_steps_is_the_full_model():
    layers = stack(2)  # the first always runs, so that the second has one input
    x = torch.randn(1, 6, dtype=torch.float64)
    full = run(copy.deepcopy(layers), x)
    drop = convert_to_layer_drop(layers, Layer, schedule=ProgressiveLayerDrop(0.5, 1.0))
    total = torch.zeros_like(full)
    for step in range(50, 4050):
        drop.update_state(step)
        total += run(layers, x).detach()
    assert torch.allclose(total / 4000, full, atol=0.06)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_drops_the_same_layers(reentrant):
    layers = stack()
    drop = convert_to_layer_drop(layers, Layer, schedule=ProgressiveLayerDrop(0.2, 1.0))
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)

    def grads(wrap):
        layers.zero_grad()
        x.grad = None
        first, second = run(layers, x, wrap), run(layers, x * 2, wrap)  # two micro-batches in flight
        (first.square().sum() + second.sum()).backward()
        return [x.grad.clone(), *(p.grad.clone() for p in layers.parameters() if p.grad is not None)]

    for step in range(20, 26):
        drop.update_state(step)
        plain = grads(lambda f, x: f(x))
        # No state of random generators is kept: the decision must not need it.
        again = grads(lambda f, x: checkpoint(f, x, use_reentrant=reentrant, preserve_rng_state=False))
        assert len(plain) == len(again) and all(map(torch.allclose, plain, again))


def decisions(rank, world):
    torch.manual_seed(rank)  # the ranks' own generators differ
    layers = stack()
    torch.manual_seed(100 + rank)
    drop = convert_to_layer_drop(layers, Layer, schedule=ProgressiveLayerDrop(0.3, 1.0))
    found = []
    for step in range(30):
        drop.update_state(step)
        torch.rand(rank + 1)
        found.append([drop.keeps(i) for i in range(6)])
    return found


def test_all_ranks_drop_the_same_layers():
    one, two = run_ranks(decisions, 2)
    assert one == two and any(not all(row) for row in one)


def test_it_goes_together_with_random_ltd_and_is_removed_in_turn():
    layers = stack(2)
    kinds = type(layers[0])
    ltd = {"total_layer_num": 2, "random_ltd_layer_id": [0], "random_ltd_schedule": {
        "min_value": 2, "max_value": 4, "schedule_config": {"require_steps": 9, "seq_per_step": 1}}}  # fmt: skip
    convert_to_random_ltd(layers, Layer, config=RandomLTDScheduler(ltd))
    convert_to_layer_drop(layers, Layer, schedule=ProgressiveLayerDrop(1.0))
    x = torch.randn(1, 4, 6, dtype=torch.float64)
    assert ((run(layers[:1], x) != x).any(-1).sum() == 2) and run(layers, x).shape == x.shape
    with pytest.raises(DataArgumentError, match="convert a model once"):
        convert_to_layer_drop(layers, Layer, schedule=ProgressiveLayerDrop())
    remove_layer_drop(layers)
    from dsx_data.routing import remove_random_ltd

    remove_random_ltd(layers)
    assert type(layers[0]) is kinds


def test_hugging_face_models_by_rule_and_others_by_class():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=4, intermediate_size=32, vocab_size=40
    )
    model = transformers.BertForMaskedLM(config)
    drop = convert_to_layer_drop(model, schedule=ProgressiveLayerDrop(0.1, 1.0))
    assert drop.layers == 4
    ids = torch.randint(0, 40, (2, 8))
    model.gradient_checkpointing_enable()
    for step in range(10, 16):
        drop.update_state(step)
        model.train()(input_ids=ids).logits.sum().backward()
    with pytest.raises(DataArgumentError, match="finds none; pass the class"):
        convert_to_layer_drop(stack(), schedule=ProgressiveLayerDrop())
    with pytest.raises(DataArgumentError, match="got no layers"):
        convert_to_layer_drop(stack(), [], schedule=ProgressiveLayerDrop())
