"""`dsx_activations` in one process: values and gradients are those of the model without it, bit by bit, whatever
is kept where; random draws of every stream repeat in the recomputation.
"""

import copy
import itertools
import json
import logging

import dsx_activations
import pytest
import torch
from dsx_activations import ActivationConfigError, ActivationStateError
from dsx_comm.lanes import DeferringLane
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

POLICIES = {
    "plain": {},
    "divided": {"partition_activations": True},
    "host": {"checkpoint_in_cpu": True},
    "host, late": {"checkpoint_in_cpu": True, "lane": DeferringLane},
    "slots": {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 4},
    "host slots": {
        "partition_activations": True,
        "contiguous_checkpointing": True,
        "num_checkpoints": 4,
        "checkpoint_in_cpu": True,
        "lane": DeferringLane,
    },
}


@pytest.fixture(autouse=True)
def _settings_of_before():
    yield
    dsx_activations.configure()
    dsx_activations.get_cuda_rng_tracker().reset()


def use(policy):
    given = dict(POLICIES[policy])
    if "lane" in given:
        given["lane"] = given["lane"]()
    dsx_activations.configure(None, **given)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x, scale=None, extra=None):
        y = self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.3))
        with dsx_activations.get_cuda_rng_tracker().fork():
            y = F.dropout(y, 0.2)
        if scale is not None:
            y = y * scale
        return x + y + (0 if extra is None else extra["shift"][0])


class Model(nn.Module):
    def __init__(self, call, layers=3):
        super().__init__()
        self.call = call
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x, scale, shift):
        for block in self.blocks:
            x = self.call(block, x, scale=scale, extra={"shift": [shift], "word": "left alone"})
        return x


def train(call, **options):
    """Losses and gradients of two steps."""
    torch.manual_seed(0)
    model = Model(call, **options)
    dsx_activations.model_parallel_cuda_manual_seed(7)
    x, scale = torch.randn(5, 12), torch.randn(12, requires_grad=True)
    shift = torch.randn(12, requires_grad=True)
    found = []
    for _ in range(2):
        loss = model(x, scale, shift).square().mean()
        loss.backward()
        found.append(loss.detach())
    found += [p.grad for p in model.parameters()] + [scale.grad, shift.grad, torch.randn(3)]
    with dsx_activations.get_cuda_rng_tracker().fork():
        found.append(torch.randn(3))
    return found


def without(block, *args, **kwargs):
    return block(*args, **kwargs)


def equal(got, expected):
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_losses_gradients_and_streams_are_those_without_it(policy, reentrant):
    expected = train(without)
    use(policy)

    def call(block, *args, **kwargs):
        return dsx_activations.checkpoint(block, *args, use_reentrant=reentrant, **kwargs)

    equal(train(call), expected)


@pytest.mark.parametrize(("inner", "outer"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("policy", ["plain", "divided", "host, late"])
def test_nested(policy, inner, outer):
    expected = train(lambda block, x, **kw: block(block(x, **kw), **kw))
    use(policy)

    def both(block, x, **kw):
        def again(x, **kw):
            return dsx_activations.checkpoint(block, block(x, **kw), use_reentrant=inner, **kw)

        return dsx_activations.checkpoint(again, x, use_reentrant=outer, **kw)

    # A parameter that is used twice in one re-entered part has its gradients added in another order.
    got = train(both)
    equal(got[:1], expected[:1])
    if outer or inner:
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    else:
        equal(got, expected)


def test_inside_a_checkpoint_of_torch():
    expected = train(lambda block, x, **kw: block(block(x, **kw), **kw))
    use("divided")

    def both(block, x, **kw):
        def again(x):
            return dsx_activations.checkpoint(block, block(x, **kw), **kw)

        return torch_checkpoint(again, x, use_reentrant=False)

    got = train(both)
    # torch's own checkpoint knows nothing of the tracked stream: its recomputation draws from it again
    equal(got[:1], expected[:1])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", ["plain", "divided"])
def test_frozen_inputs_and_frozen_blocks(policy, reentrant):
    use(policy)
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.requires_grad_(False)
    x = torch.randn(3, 4)

    def run(call):
        for parameter in first.parameters():
            parameter.grad = None
        call(second, call(first, call(second, x))).sum().backward()
        return [p.grad.clone() for p in first.parameters()]

    got = run(lambda f, x: dsx_activations.checkpoint(f, x, use_reentrant=reentrant))
    equal(got, run(lambda f, x: f(x)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_outputs_in_containers_and_other_values(reentrant):
    use("divided")
    x = torch.randn(3, 4, requires_grad=True)

    def function(x, n, *, flag):
        return {"sum": [x * 2, n], "flag": flag, "index": torch.arange(3)}

    out = dsx_activations.checkpoint(function, x, 5, flag="yes", use_reentrant=reentrant)
    assert out["flag"] == "yes" and out["sum"][1] == 5 and torch.equal(out["index"], torch.arange(3))
    out["sum"][0].sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_graph_can_be_kept_and_differentiated_again(policy):
    use(policy)
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    y = dsx_activations.checkpoint(lambda x: layer(x).tanh(), x).square().sum()
    (first,) = torch.autograd.grad(y, [x], retain_graph=True)
    (second,) = torch.autograd.grad(y, [x])
    (expected,) = torch.autograd.grad(layer(x).tanh().square().sum(), [x])
    assert torch.equal(first, expected) and torch.equal(second, expected)


@pytest.mark.parametrize("policy", ["plain", "divided", "host"])
def test_autocast_is_that_of_the_forward_pass(policy):
    use(policy)
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)

    def run(call):
        layer.weight.grad = x.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            y = call(lambda x: layer(x).tanh(), x)
        y.float().square().sum().backward()
        return [layer.weight.grad, x.grad, y.detach()]

    equal(run(dsx_activations.checkpoint), run(lambda f, x: f(x)))


@pytest.mark.parametrize("policy", ["divided", "host"])
def test_strides_come_back(policy):
    use(policy)
    seen = []

    def function(x, y, mask):
        seen.append((x.stride(), y.stride(), mask.stride()))
        return (x * x + y.transpose(0, 1)).tanh() * mask.to(x.dtype)

    x, y = torch.randn(3, 6, requires_grad=True).t(), torch.randn(3, 12, requires_grad=True)[:, ::2]
    mask = torch.ones(1, 3).expand(6, 3)
    function(x, y, mask).sum().backward(retain_graph=True)
    dsx_activations.checkpoint(function, x, y, mask).sum().backward()
    plain, first, recomputed = seen
    assert first == plain
    assert recomputed[0] == plain[0] and recomputed[2] == plain[2]


@pytest.mark.parametrize("policy", ["plain", "host", "host, late"])
def test_an_input_changed_in_place_is_named(policy):
    use(policy)
    leaf = torch.randn(3, 4, requires_grad=True)
    x = leaf * 1
    y = dsx_activations.checkpoint(torch.tanh, x)
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
        y.sum().backward()


def test_a_slice_is_a_copy_of_its_own():
    use("divided")
    leaf = torch.randn(3, 4, requires_grad=True)
    x = leaf * 1
    y = dsx_activations.checkpoint(torch.tanh, x)
    x.add_(1)
    y.sum().backward()
    assert torch.allclose(leaf.grad, 1 - torch.tanh(leaf.detach()) ** 2)


def test_a_generator_of_the_users_own_is_tracked():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, requires_grad=True)

    def drop(x):
        return (x * x) * (torch.rand(64, generator=generator) > 0.5)

    tracker = dsx_activations.get_cuda_rng_tracker()
    tracker.track("mine", generator)
    y = dsx_activations.checkpoint(drop, x)
    kept, after = (y != 0).detach(), generator.get_state()
    y.sum().backward()
    assert torch.equal(x.grad != 0, kept)
    assert torch.equal(generator.get_state(), after)


@pytest.mark.parametrize("reentrant", [False, True])
def test_running_statistics_are_updated_once(reentrant):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    model, x = copy.deepcopy(plain), torch.randn(6, 4, requires_grad=True)
    plain(x).sum().backward()
    dsx_activations.checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    equal(list(model.buffers()), list(plain.buffers()))
    equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_streams():
    tracker = dsx_activations.get_cuda_rng_tracker()
    with pytest.raises(ActivationStateError, match="model_parallel_cuda_manual_seed"), tracker.fork():
        pass
    dsx_activations.model_parallel_cuda_manual_seed(11)
    assert torch.equal(torch.randn(2), torch.randn(2, generator=torch.Generator().manual_seed(11)))
    of_own = torch.Generator().manual_seed(11 + 2718)
    before = torch.get_rng_state()
    with tracker.fork():
        assert torch.equal(torch.randn(2), torch.randn(2, generator=of_own))
    assert torch.equal(torch.get_rng_state(), before)
    states = tracker.get_states()
    with tracker.fork():
        first = torch.randn(2)
    tracker.set_states(states)
    with tracker.fork():
        assert torch.equal(torch.randn(2), first)
    dsx_activations.model_parallel_reconfigure_tp_seed(11)
    with tracker.fork():
        assert torch.equal(torch.randn(2), torch.randn(2, generator=torch.Generator().manual_seed(11 + 2718)))
    with pytest.raises(ActivationStateError, match="same numbers"):
        tracker.add("other", 11 + 2718)


def test_configuring(tmp_path):
    section = {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 2}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"activation_checkpointing": section}))
    from dsx_activations.configured import current

    dsx_activations.configure(None, str(file), profile=True)
    assert dsx_activations.is_configured()
    assert current().settings == dsx_activations.CheckpointingSettings(True, False, True, 2, False, True)
    dsx_activations.configure()
    assert current().settings == dsx_activations.CheckpointingSettings()
    with pytest.raises(ActivationConfigError, match="number_checkpoints"):
        dsx_activations.configure(None, partition_activations=True, contiguous_checkpointing=True)
    with pytest.raises(ActivationConfigError, match="partition_activations"):
        dsx_activations.configure(None, contiguous_checkpointing=True, num_checkpoints=2)
    with pytest.raises(ActivationConfigError, match="number_checkpoint"):
        dsx_activations.configure(None, {"activation_checkpointing": {"number_checkpoint": 2}})
    assert current().settings == dsx_activations.CheckpointingSettings(), "a refused call changed the settings"
    dsx_activations.set_num_layers(3)
    dsx_activations.configure(None, partition_activations=True, contiguous_checkpointing=True)
    assert current().settings.number_checkpoints == 3
    with pytest.raises(ActivationConfigError, match="partition_activations"):
        dsx_activations.partition_activations_in_checkpoint(False)
    dsx_activations.configure()
    dsx_activations.partition_activations_in_checkpoint(True)
    assert current().settings.partition_activations
    current().num_layers = None


def test_profile_logs_each_checkpoint(caplog):
    dsx_activations.configure(None, profile=True)
    x = torch.randn(3, requires_grad=True)
    with caplog.at_level(logging.INFO, "dsx_activations"):
        dsx_activations.checkpoint(torch.tanh, x).sum().backward()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and ": forward " in lines[0] and ": recomputation " in lines[1]
