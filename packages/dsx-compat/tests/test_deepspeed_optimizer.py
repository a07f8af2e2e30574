"""What programs read from DeepSpeed's optimizers: the loss scale, the groups of parameters and the master weights."""

from __future__ import annotations

import dsx_compat
import pytest
import torch
from dsx_testkit import run_ranks

dsx_compat.activate()


def started(stage, fp16=None, **zero):
    import deepspeed

    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **zero},
        **({} if fp16 is None else {"fp16": {"enabled": True, **fp16}}),
    }
    return deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)[:2]


def step(engine, value):
    engine.backward(engine(torch.full((1, 2), value, dtype=torch.float16)).sum())
    engine.step()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_loss_scale_is_read_under_deepspeed_s_names(stage):
    engine, optimizer = started(stage, {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1})
    config, scaler = optimizer.loss_scale_config, optimizer.loss_scaler
    assert config.dynamic_loss_scale is True and scaler.dynamic is True and optimizer.needs_scaler() is True
    assert (config.cur_scale, config.scale_window, config.min_loss_scale, config.cur_iter) == (2**8, 2, 1.0, 0)
    assert config.use_grad_scaling and config.last_overflow_iter == -1 and config.scale_factor == 2.0
    step(engine, float("inf"))
    assert (scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter) == (2**7, 1, 0)
    for _ in range(3):
        step(engine, 0.1)
    assert (scaler.loss_scale, scaler.cur_iter, optimizer.loss_scale) == (2**8, 4, 2**8)
    scaler.cur_scale = 64.0
    assert optimizer.cur_scale == 64.0
    step(engine, 0.1)  # the gradients are divided by what the loss was multiplied by
    assert not optimizer.overflow and engine.get_global_grad_norm() < 10
    engine.destroy()


def test_a_constant_scale_and_none():
    engine, optimizer = started(1, {"loss_scale": 16.0})
    assert optimizer.loss_scaler.cur_scale == 16.0 and not optimizer.loss_scaler.dynamic
    assert not optimizer.needs_scaler() and not hasattr(optimizer.loss_scaler, "scale_window")
    with pytest.raises(AttributeError, match=r"fp16\.loss_scale"):
        optimizer.loss_scaler.cur_scale = 2.0
    engine.destroy()
    engine, optimizer = started(2)
    assert optimizer.loss_scale_config.cur_scale == 1.0 and not optimizer.loss_scale_config.use_grad_scaling
    engine.destroy()


def masters(rank, world, stage):
    engine, optimizer = started(stage)
    names = {"bit16_groups", "single_partition_of_fp32_groups"}, {"fp16_groups", "fp32_partitioned_groups_flat"}
    here, elsewhere = names if stage < 3 else names[::-1]
    assert not any(hasattr(optimizer, name) for name in elsewhere) and all(hasattr(optimizer, name) for name in here)
    groups, owned = (getattr(optimizer, name) for name in sorted(here, key=lambda name: "fp32" in name))
    assert [[p.shape for p in group] for group in groups] == [[(2, 2), (2,)]]
    assert all(t.dtype == torch.float32 and t.device.type == "cpu" for t in owned)
    whole = torch.cat([value.flatten() for value in engine.module_state_dict().values()])
    before = torch.cat([t.flatten() for t in owned])
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert not torch.equal(before, torch.cat([t.flatten() for t in owned]))  # they are the tensors that are updated
    return sorted(before.tolist()), sorted(whole.tolist())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_master_weights_are_those_that_the_rank_updates(stage):
    (first, whole), (second, _) = run_ranks(masters, 2, stage)
    assert (first == second == whole) if stage == 0 else sorted(first + second) == whole


def test_master_weights_on_disk_are_not_given_out_as_empty_tensors(tmp_path):
    engine, optimizer = started(2, offload_optimizer={"device": "nvme", "nvme_path": str(tmp_path)})
    with pytest.raises(RuntimeError, match="safe_get_local_fp32_param"):
        optimizer.single_partition_of_fp32_groups
    assert len(optimizer.bit16_groups) == 1
    engine.destroy()


def test_a_leaf_module_shows_its_mark():
    import deepspeed

    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    assert net._z3_leaf is False and net[0]._z3_leaf is False
    deepspeed.utils.set_z3_leaf_modules(net, [torch.nn.Linear])
    assert net[0]._z3_leaf is True and net[1]._z3_leaf is False
    net[1]._z3_leaf = True
    assert deepspeed.utils.get_z3_leaf_modules(net) == [net[0], net[1]]
    del net[1]._z3_leaf
    net[0]._z3_leaf = False
    assert deepspeed.utils.get_z3_leaf_modules(net) == []
    net[0]._z3_leaf = True
    x = torch.ones(2, 1)
    torch.testing.assert_close(torch.compile(net, backend="eager")(x), net(x))


def test_compatible_operators_are_found_by_the_names_of_their_builders():
    run_ranks(compatible_operators, 1)  # in a process of its own: it loads the native parts of all packages


def compatible_operators(rank, world):
    import deepspeed
    from deepspeed.ops.op_builder import AsyncIOBuilder, EvoformerAttnBuilder, FusedLambBuilder

    found = deepspeed.ops.__compatible_ops__
    assert found[FusedLambBuilder.NAME] == FusedLambBuilder().is_compatible()
    assert found[AsyncIOBuilder.NAME] == AsyncIOBuilder().is_compatible()
    assert found[EvoformerAttnBuilder.NAME] is False and found["deepspeed_not_implemented"] is False
    assert {"cpu_adam", "fused_adam", "transformer_inference", "quantizer"} <= set(found)
