"""AutoTP as DeepSpeed's public examples write it: `tp_model_init`, an mpu and an optimizer beside the configuration."""

from __future__ import annotations

import types

import dsx_compat
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

dsx_compat.activate()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


SPECS = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*up\.weight$"], "partition_type": "column", "shape": (1, -1), "partition_dim": 0},
        {"patterns": [r".*down\.weight$"], "partition_type": "row"},
    ],
}


def batch(step):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def plain():
    net, norms = model(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(3):
        net(batch(step)).square().mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def groups():
    """The smallest mpu: two ranks that share one model."""
    rank = torch.distributed.get_rank()
    alone = [torch.distributed.new_group([r]) for r in range(2)][rank]
    both = torch.distributed.new_group([0, 1])
    values = {"model_parallel_group": both, "data_parallel_group": alone, "model_parallel_world_size": 2,
              "data_parallel_world_size": 1, "model_parallel_rank": rank, "data_parallel_rank": 0}  # fmt: skip
    return types.SimpleNamespace(**{f"get_{name}": (lambda value=value: value) for name, value in values.items()})


def as_the_example(rank, world, recorded, with_mpu):
    import deepspeed
    from deepspeed.module_inject.layers import set_autotp_mode

    deepspeed.init_distributed()
    net, mpu = model(), groups() if with_mpu else None
    section = {"partition_config": SPECS} if recorded else {"partition_config": SPECS, "autotp_size": 2}
    config = {
        "train_batch_size": 3,
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {"stage": 2},
        "tensor_parallel": section,
        "data_parallel_size": 1,
    }
    if recorded:
        set_autotp_mode(training=True)
        group = mpu.get_model_parallel_group() if with_mpu else None
        assert deepspeed.tp_model_init(net, tp_size=2, dtype=torch.float32, tp_group=group) is net
        assert net[0].up.weight.shape == (8, 4)  # nothing is cut yet
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    with pytest.warns(dsx_compat.CompatWarning, match="data_parallel_size"):
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config, mpu=mpu)
    assert net[0].up.weight.shape == (4, 4)
    norms = []
    for step in range(3):
        engine.backward(engine(batch(step)).square().mean())
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


@pytest.mark.parametrize(("recorded", "with_mpu"), [(False, True), (True, True), (True, False)])
def test_slices_train_as_plain_pytorch(recorded, with_mpu):
    expected = plain()
    for norms in run_ranks(as_the_example, 2, recorded, with_mpu):
        assert norms == pytest.approx(expected, rel=1e-5)


def contradictions(rank, world):
    import deepspeed

    deepspeed.init_distributed()
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    net = model()
    with pytest.raises(ValueError, match=r"tp_size.*got 2, expected 4"):
        deepspeed.tp_model_init(net, 2, torch.float32, config={"tensor_parallel": {"autotp_size": 4}})
    with pytest.raises(ValueError, match="at least 1"):
        deepspeed.tp_model_init(net, 0)
    deepspeed.tp_model_init(net, 2, torch.bfloat16)
    with pytest.raises(ValueError, match=r"got torch\.bfloat16, expected torch\.float32"):
        deepspeed.initialize(model=nn.Sequential(net), config=config)  # a part of the model
    deepspeed.tp_model_init(net, 2)
    with pytest.raises(ValueError, match="got 2, expected 4"):
        deepspeed.initialize(model=net, config=config | {"tensor_parallel": {"autotp_size": 4}})
    alone = [torch.distributed.new_group([r]) for r in range(2)][rank]
    deepspeed.tp_model_init(net, 2, tp_group=alone)
    with pytest.raises(ValueError, match=r"got the ranks \[\d\], expected \[0, 1\]"):
        deepspeed.initialize(model=net, config=config)
    with pytest.raises(dsx_compat.NotSupportedError, match="no inference engine"):
        deepspeed.set_autotp_mode()
    assert all(p.shape == q.shape for p, q in zip(net.parameters(), model().parameters()))


def test_contradictions_are_refused_before_anything_is_cut():
    run_ranks(contradictions, 2)
