"""A program that patches its MLP and its loss with the tiled names of DeepSpeed's sequence parallelism trains as it did
before the patch, alone and at stage 3, and its activations exist for one piece at a time.
"""

import dsx_compat
import pytest
import torch
from dsx_testkit import assert_close_named, run_ranks
from torch import nn
from torch.nn import functional as F

TOKENS = 13


class MLP(nn.Module):
    """A feed-forward layer as in Hugging Face's models."""

    longest = 0
    """The largest number of tokens that one call has got."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        MLP.longest = max(MLP.longest, x.shape[-2])
        return self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mlp, self.head = MLP(), nn.Linear(8, 101, bias=False)

    def loss_of(self, x, y):
        return F.cross_entropy(self.head(x), y, reduction="sum")

    def forward(self, x, y):
        return self.loss_of((x + self.mlp(x)).flatten(0, 1), y.flatten()) / y.numel()


whole_mlp = MLP.forward


def tiled_mlp(self, x):
    """The forward with which DeepSpeed's documentation patches `LlamaMLP`."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    return TiledMLP.apply(whole_mlp, self, x, 4, [self.up.weight, self.down.weight])


def tiled_forward(self, x, y):
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    h = x + self.mlp(x)
    return TiledFusedLogitsLoss.apply(Net.loss_of, self, h, y, None, 4, [self.head.weight], "sum") / y.numel()


def example(seed, batch=2):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, TOKENS, 8, generator=generator)
    return x, torch.randint(0, 101, (batch, TOKENS), generator=generator)


@pytest.fixture
def patched(monkeypatch):
    """A function that patches the classes, as programs do before they build the model."""

    def patch():
        monkeypatch.setattr(MLP, "forward", tiled_mlp)
        monkeypatch.setattr(Net, "forward", tiled_forward)

    dsx_compat.activate()
    return patch


def test_values_and_gradients_equal_those_without_tiles(patched):
    found = []
    for tiled in (False, True):
        if tiled:
            patched()
        MLP.longest = 0
        model, (x, y) = Net(), example(1)
        x.requires_grad_()
        loss = model(x, y)
        loss.backward()
        found.append([loss.detach(), x.grad, *(p.grad for p in model.parameters())])
        assert MLP.longest == (4 if tiled else TOKENS)
    torch.testing.assert_close(found[1], found[0])


def test_two_dimensions_and_one_shard(patched):
    """Inputs of experts have two dimensions: (tokens, features)."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP, sequence_tiled_compute

    mlp = Net().mlp
    x = torch.randn(TOKENS, 8)
    want = whole_mlp(mlp, x)
    for shards in (1, 4, 100):
        torch.testing.assert_close(TiledMLP.apply(whole_mlp, mlp, x, shards, None), want)
    batch = x[None]
    got = sequence_tiled_compute(lambda x: whole_mlp(mlp, x), TOKENS, 3, {"x": batch}, {}, "x", output_reduction=None)
    torch.testing.assert_close(got, want[None])


def test_a_wrong_number_of_shards_is_refused(patched):
    import dsx_activations
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    for wrong in (0, 2.0, True):
        with pytest.raises(dsx_activations.ActivationArgumentError, match="expected a whole number of at least 1"):
            TiledMLP.apply(whole_mlp, Net().mlp, torch.randn(3, 8), wrong, None)


def trained(rank, world):
    dsx_compat.activate()
    import deepspeed

    MLP.forward, Net.forward = tiled_mlp, tiled_forward
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=Net(), config=config)
    for step in range(3):
        engine.backward(engine(*example(10 * step + rank)))
        engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {n: p.detach().clone() for n, p in engine.module.named_parameters()}


def test_training_at_stage_3_is_that_of_plain_pytorch():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        for rank in range(2):
            (model(*example(10 * step + rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    want = {n: p.detach() for n, p in model.named_parameters()}
    for found in run_ranks(trained, 2, timeout=120):
        assert_close_named(found, want, rtol=1e-4, atol=1e-6)
