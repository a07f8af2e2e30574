"""A model with float8 linears of torchao (emulated on the CPU) trains sharded as it does in plain PyTorch."""

import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

pytest.importorskip("torchao.float8", reason="torchao is not installed")


def model(gather=False):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    return convert_to_float8_training(
        net, config=Float8LinearConfig(enable_fsdp_float8_all_gather=gather, emulate=True)
    )


def train(rank, world, stage, gather):
    import dsx_zero
    from torchao.float8.float8_linear import Float8Linear

    plain = model(gather)
    assert any(isinstance(module, Float8Linear) for module in plain.modules())
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    sharded, optimizer = dsx_zero.shard(
        model(gather),
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
        assert losses[1] == losses[0], (step, losses)
    hooked = [group for unit in optimizer.runtime.units for group in unit.groups if group.key.hooked]
    assert len(hooked) == (2 if gather and stage == 3 else 0)


@pytest.mark.parametrize(("stage", "gather"), [(1, False), (3, False), (0, True), (2, True), (3, True)])
def test_float8_linears_train(stage, gather):
    """Bit for bit, with `enable_fsdp_float8_all_gather` or without."""
    run_ranks(train, 2, stage, gather)
