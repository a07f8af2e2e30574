"""A model with float8 linears of torchao (emulated on the CPU) trains sharded as it does in plain PyTorch."""

import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

pytest.importorskip("torchao.float8", reason="torchao is not installed")


def model():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    return convert_to_float8_training(net, config=Float8LinearConfig(emulate=True))


def train(rank, world, stage):
    import dsx_zero
    from torchao.float8.float8_linear import Float8Linear

    plain = model()
    assert any(isinstance(module, Float8Linear) for module in plain.modules())
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    sharded, optimizer = dsx_zero.shard(
        model(),
        lambda p: torch.optim.SGD(p, lr=0.1),
        config={"stage": stage, "stage3_param_persistence_threshold": 0},
    )
    for step in range(3):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))  # the same on all ranks
        losses = []
        for net, step_of in ((plain, reference), (sharded, optimizer)):
            loss = net(x).square().mean()
            loss.backward()
            step_of.step()
            step_of.zero_grad()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-4), (step, losses)


@pytest.mark.parametrize("stage", [1, 3])
def test_float8_linears_train(stage):
    run_ranks(train, 2, stage)
