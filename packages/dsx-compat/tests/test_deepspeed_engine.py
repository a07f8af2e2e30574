"""A script that says `import deepspeed` trains as plain PyTorch does, and the engine has the names that clients use."""

from __future__ import annotations

import copy
import inspect
import warnings

import dsx_compat
import pytest
import torch
from dsx_testkit import run_ranks

dsx_compat.activate()


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def settings(stage, **more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.0,
        "steps_per_print": float("inf"),
        **more,
    }


def batch(rank, step):
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def plain_curve(world, steps):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    curve = []
    for step in range(steps):
        losses = [net(batch(rank, step)).square().mean() for rank in range(world)]
        (sum(losses) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append([loss.item() for loss in losses])
    return curve


def train(rank, world, stage):
    import deepspeed

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model(), config_params=settings(stage))
    assert isinstance(engine, deepspeed.DeepSpeedEngine) and isinstance(engine, torch.nn.Module)
    assert isinstance(optimizer, deepspeed.runtime.base_optimizer.DeepSpeedOptimizer)
    assert loader is None and scheduler is None
    curve = []
    for step in range(6):
        loss = engine(batch(rank, step)).square().mean()
        engine.backward(loss, scale_wrt_gas=False)
        engine.step()
        curve.append(loss.item())
    assert engine.global_steps == 6 and optimizer.overflow is False
    return curve


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_script_trains_as_plain_pytorch(stage):
    curves = run_ranks(train, 2, stage)
    expected = plain_curve(2, 6)
    for rank, curve in enumerate(curves):
        torch.testing.assert_close(curve, [step[rank] for step in expected], rtol=1e-5, atol=0)


def use_names_of_clients(rank, world, stage):
    """Use the engine as Accelerate, transformers, trl and Lightning do."""
    import deepspeed

    engine, optimizer, _, _ = deepspeed.initialize(model=model(), config=settings(stage))
    assert engine.config.get("zero_optimization")["stage"] == stage
    assert engine.config["train_batch_size"] == 2 * world
    assert "exclude_frozen_parameters" in inspect.signature(engine.save_checkpoint).parameters
    assert {"load_module_strict", "load_optimizer_states", "load_lr_scheduler_states"} <= set(
        inspect.signature(engine.load_checkpoint).parameters
    )
    assert engine.zero_gather_16bit_weights_on_model_save() is False
    assert engine.get_global_grad_norm() is None
    assert not hasattr(engine, "_hf_hook")
    whole = engine._zero3_consolidated_16bit_state_dict()
    if rank:
        assert whole is None
    else:
        expected = model().state_dict()
        assert list(whole) == list(expected)
        assert all(torch.equal(whole[name], value) for name, value in expected.items())
    for name in ("param_groups", "defaults", "state", "step", "state_dict", "load_state_dict"):
        assert hasattr(engine, name)
    assert len(engine.param_groups) == 1 and optimizer.optimizer.__class__ is torch.optim.AdamW
    assert not hasattr(optimizer, "train") and not hasattr(optimizer, "eval")
    engine.set_gradient_accumulation_boundary(is_boundary=True)
    engine.backward(engine(batch(rank, 0)).square().mean())
    engine.step()
    assert engine.get_global_grad_norm() > 0
    engine.destroy()
    return True


def averages(rank, world):
    import deepspeed

    for op, default in (("mean", True), ("sum", False)):
        engine, *_ = deepspeed.initialize(model=model(), config={**settings(1), "gradient_allreduce_op": op})
        assert engine.gradient_average is default
        engine.gradient_average = default
        other = "sum" if default else "mean"
        with pytest.raises(ValueError, match=f'"gradient_allreduce_op": "{other}"'):
            engine.gradient_average = not default
        engine.destroy()
    return True


def test_whether_gradients_are_averaged_is_asked_and_cannot_be_changed():
    assert all(run_ranks(averages, 2))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_engine_has_the_names_that_clients_use(stage):
    assert all(run_ranks(use_names_of_clients, 2, stage))


@pytest.mark.parametrize("optimizer", [None, lambda parameters: torch.optim.SGD(parameters, lr=0.1)])
def test_an_optimizer_over_no_parameters_is_refused(optimizer):
    import deepspeed

    net = model()
    before = [p.data_ptr() for p in net.parameters()]
    used_up = (p for p in [])
    with pytest.raises(ValueError, match="got no parameters, expected those that the optimizer trains"):
        deepspeed.initialize(model=net, config=settings(1), model_parameters=used_up, optimizer=optimizer)
    assert [p.data_ptr() for p in net.parameters()] == before


def forward_only(rank, world, stage):
    """trl's reference model has no optimizer; its config has flat keys, and at stage 0 an offload section left over."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_optimization.reduce_bucket_size": 0.9 * 64 * 64,
        "zero_optimization.stage3_prefetch_bucket_size": 3686.4,
    }
    if stage == 0:
        config["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    before = copy.deepcopy(config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, *_ = deepspeed.initialize(model=model(), config=config, model_parameters=[])
    assert config == before
    (warning,) = [w for w in caught if issubclass(w.category, dsx_compat.CompatWarning)]
    assert "zero_optimization.reduce_bucket_size" in str(warning.message)
    engine.eval()
    with torch.no_grad():
        torch.testing.assert_close(engine(batch(rank, 0)), model()(batch(rank, 0)))
    if stage != 3:
        assert engine.optimizer is None
        return True
    offload = engine.optimizer  # the object from which programs remove hooks
    with deepspeed.zero.GatheredParameters(engine.parameters()):
        for _, parameter in [*offload.module.named_parameters(), *offload.module.ds_external_parameters()]:
            parameter.ds_active_sub_modules.clear()
        for hook in offload.forward_hooks:
            hook.remove()
        with torch.no_grad():
            if rank == 0:  # without hooks a rank may call the model alone
                torch.testing.assert_close(engine.module(batch(0, 1)), model()(batch(0, 1)))
        offload._register_deepspeed_module(offload.module)
    with torch.no_grad():
        torch.testing.assert_close(engine(batch(rank, 2)), model()(batch(rank, 2)))
    assert all(p.ds_status is deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE for p in engine.parameters())
    return True


@pytest.mark.parametrize("stage", [0, 3])
def test_a_forward_only_engine(stage):
    assert all(run_ranks(forward_only, 2, stage))


def with_schedule(rank, world):
    import deepspeed

    def make(optimizer):
        return deepspeed.runtime.lr_schedules.WarmupLR(optimizer, 0.0, 0.1, warmup_num_steps=4, warmup_type="linear")

    engine, _, _, scheduler = deepspeed.initialize(model=model(), config=settings(1), lr_scheduler=make)
    rates = []
    for step in range(3):
        engine.backward(engine(batch(rank, step)).square().mean())
        engine.step()
        rates.append(engine.get_lr()[0])
    torch.testing.assert_close(rates, [0.0, 0.025, 0.05])
    engine.lr_scheduler = None  # Lightning steps it itself
    assert engine.lr_scheduler is None
    engine.backward(engine(batch(rank, 3)).square().mean())
    engine.step()
    assert engine.get_lr() == [0.05]
    scheduler.step()
    assert engine.get_lr() == [pytest.approx(0.075)]
    with pytest.raises(ValueError, match=r"step\(\)"):
        engine.lr_scheduler = 3
    return True


def test_a_schedule_made_by_a_callable_may_be_taken_from_the_engine():
    assert all(run_ranks(with_schedule, 2))


def test_deepspeed_config_is_read_and_checked():
    import deepspeed

    config = deepspeed.DeepSpeedConfig(settings(2))
    assert config.zero_optimization.stage == 2
    with pytest.raises(deepspeed.runtime.config.DeepSpeedConfigError, match="stage3_gather"):
        deepspeed.DeepSpeedConfig(
            settings(2)
            | {"stage3_gather_16bit_weights_on_model_sav": True}
            | {"zero_optimization": {"stage3_gather": 1}}
        )
