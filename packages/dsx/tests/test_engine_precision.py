"""fp16 with loss scaling, bf16, autocast: the same updates as masters in plain torch; overflow skips everything."""

import math

import pytest
import torch
from dsx_testkit import run_ranks, tiny

WIDTH = 6


def model():
    return tiny.MLP(WIDTH, 8, 4, depth=1, seed=1)


def batch(index):
    generator = torch.Generator().manual_seed(50 + index)
    return torch.randn(2, WIDTH, generator=generator), torch.randn(2, 4, generator=generator)


def config(**changes):
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.25}},
        "gradient_clipping": 0.0,
        "steps_per_print": None,
    }
    return {**base, **changes}


def trained(rank, world, settings, poison=()):
    """Train; `poison` holds (step, rank) at which the loss is multiplied by infinity. Scales, lrs, whole weights,
    masters.
    """
    import dsx
    import dsx_zero

    engine, *_ = dsx.initialize(model=model(), config=settings)
    dtype = next(engine.module.parameters()).dtype
    trace = []
    for step in range(7):
        x, y = batch(step * world + rank)
        loss = torch.nn.functional.mse_loss(engine(x.to(dtype)).float(), y)
        if (step, rank) in poison:
            loss = loss * math.inf
        before = engine.module_state_dict()
        scale, lr = engine.loss_scale(), engine.get_lr()[0]
        engine.backward(loss)
        engine.step()
        after = engine.module_state_dict()
        changed = any(not torch.equal(before[name], after[name]) for name in before)
        assert changed == (engine.was_step_applied() and lr > 0)
        assert engine.was_step_applied() == (not engine.last_step.skipped)
        trace.append((scale, lr, engine.was_step_applied()))
    masters = {name: dsx_zero.safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
    return trace, engine.skipped_steps, masters


def masters_of(world, dtype, skipped=(), lrs=None, scales=None):
    """Plain torch: a model in `dtype`, fp32 masters, the loss scaled, micro-batches of all ranks averaged."""
    net = model().to(dtype)
    masters = [p.detach().clone().float() for p in net.parameters()]
    for step in range(7):
        if step in skipped:
            continue
        scale = scales[step] if scales else 1.0
        totals = [torch.zeros_like(m) for m in masters]
        for rank in range(world):
            x, y = batch(step * world + rank)
            (torch.nn.functional.mse_loss(net(x.to(dtype)).float(), y) * scale).backward()
            for total, p in zip(totals, net.parameters()):
                total += p.grad.float() / world
                p.grad = None
        with torch.no_grad():
            for master, total, p in zip(masters, totals, net.parameters()):
                master -= (lrs[step] if lrs else 0.25) * total / scale
                p.copy_(master)
    return dict(zip(dict(net.named_parameters()), masters))


def each(rank, world, all_settings, poison=()):
    return [trained(rank, world, settings, poison) for settings in all_settings]


def overflowing(stage):
    return config(
        fp16={"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1},
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
        communication_data_type="fp32",
        data_types={"grad_accum_dtype": "fp32"},
        scheduler={
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 0.25, "warmup_num_steps": 4, "warmup_type": "linear"},
        },
    )


@pytest.mark.parametrize("world, stages", [(1, (0, 2)), (2, (0, 1, 2, 3))])
def test_dynamic_scale_skips_and_recovers(world, stages):
    results = run_ranks(each, world, [overflowing(stage) for stage in stages], [(1, world - 1), (4, 0)])
    # overflow at steps 1 and 4 halves at once; doubling after window + 1 good steps never comes
    expected = [16.0, 16.0, 8.0, 8.0, 8.0, 4.0, 4.0]
    rates = [0.0, 0.0, 0.0, 0.0625, 0.125, 0.125, 0.1875]
    for trace, skipped, masters in [result for of_rank in results for result in of_rank]:
        assert [scale for scale, _, _ in trace] == expected
        assert [step for step, (_, _, applied) in enumerate(trace) if not applied] == [1, 4] and skipped == 2
        assert [lr for _, lr, _ in trace] == pytest.approx(rates)
        reference = masters_of(world, torch.float16, skipped=(1, 4), lrs=rates, scales=expected)
        for name, value in reference.items():
            torch.testing.assert_close(masters[name], value, rtol=1e-4, atol=1e-5)


def test_scales_of_a_good_run():
    growing = config(fp16={"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2})
    static = config(fp16={"enabled": True, "loss_scale": 1024})
    (((grown, skipped, after_growth), (fixed, _, after_static)),) = run_ranks(each, 1, [growing, static])
    # the update on the step at which the scale doubles is divided by the scale its backward used
    scales = [scale for scale, _, _ in grown]
    assert scales == [16, 16, 16, 32, 32, 64, 64] and skipped == 0
    for name, value in masters_of(1, torch.float16, scales=scales).items():
        torch.testing.assert_close(after_growth[name], value, rtol=1e-4, atol=1e-5)
    # stage 0 scales the loss as well as the gradients
    assert {scale for scale, _, _ in fixed} == {1024.0}
    for name, value in masters_of(1, torch.float16, scales=[1024.0] * 7).items():
        torch.testing.assert_close(after_static[name], value, rtol=1e-4, atol=1e-5)


def test_bf16_keeps_fp32_masters():
    settings = [
        config(
            bf16={"enabled": True},
            zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
            communication_data_type="fp32",
            data_types={"grad_accum_dtype": "fp32"},
        )
        for stage in (0, 2)
    ]
    reference = masters_of(2, torch.bfloat16)
    for trace, _, masters in [result for of_rank in run_ranks(each, 2, settings) for result in of_rank]:
        assert {scale for scale, _, _ in trace} == {1.0}
        for name, value in reference.items():
            torch.testing.assert_close(masters[name], value, rtol=1e-4, atol=1e-5)


def inputs(settings):
    import dsx

    class Echo(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x, mask=None, *, extra=None):
            return self.layer(x), x.dtype, mask.dtype, extra["y"].dtype

    engine, *_ = dsx.initialize(model=Echo(), config=settings)
    out, *dtypes = engine(torch.ones(1, 2), torch.ones(1, dtype=torch.int64), extra={"y": torch.ones(1)})
    return out.dtype, *dtypes


def test_inputs_are_cast_where_the_config_says_so():
    got = inputs(config(fp16={"enabled": True, "auto_cast": True}))
    assert got == (torch.float16, torch.float16, torch.int64, torch.float16)


def test_autocast_keeps_parameters_in_fp32():
    got = inputs(config(torch_autocast={"enabled": True, "dtype": "bfloat16"}))
    assert got == (torch.bfloat16, torch.float32, torch.int64, torch.float32)


def states_of(rank, world, settings, given):
    import dsx

    optimizer = (lambda p: torch.optim.AdamW(p)) if given else None
    engine, *_ = dsx.initialize(model=model(), config=settings, optimizer=optimizer)
    x, y = batch(rank)
    engine.backward(torch.nn.functional.mse_loss(engine(x.bfloat16()).float(), y))
    engine.step()
    states = [v for state in engine.optimizer.inner.state.values() for v in state.values()]
    return {str(v.dtype) for v in states if torch.is_tensor(v) and v.dim()}


@pytest.mark.parametrize("stage", [1, 3])
def test_states_beside_bf16_masters_are_fp32_unless_bf16_is_asked_for(stage):
    for asked, given, expected in ((False, False, "float32"), (True, False, "bfloat16"), (False, True, "bfloat16")):
        settings = config(
            optimizer={"type": "AdamW", "params": {"lr": 0.1}},
            bf16={"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": asked},
            zero_optimization={"stage": stage},
        )
        assert (
            run_ranks(states_of, 2, settings, given) == [{f"torch.{expected}"}] * 2
        )  # a given optimizer's are its own


SIXTEEN = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("layer", [torch.nn.Linear(6, 4), torch.nn.Conv1d(1, 2, 3), torch.nn.LSTM(6, 4)])
@pytest.mark.parametrize("name", SIXTEEN)
def test_inputs_of_another_dtype_are_cast_or_the_setting_is_named(name, layer):
    import copy

    import dsx
    from dsx.engine.errors import EngineError

    x = torch.randn(2, 1, 6)

    def engine(**section):
        settings = config(**{name: {"enabled": True, **section}})
        return dsx.initialize(model=copy.deepcopy(layer), config=settings)[0]

    with pytest.raises(EngineError, match=rf"got inputs of torch.float32[\s\S]*{name}\.auto_cast") as raised:
        engine()(x)
    assert "dtype" in str(raised.value.__cause__) or "should be the same" in str(raised.value.__cause__)
    found = engine(auto_cast=True)(x)
    plain = copy.deepcopy(layer).to(SIXTEEN[name])(x.to(SIXTEEN[name]))
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(engine()(x.to(SIXTEEN[name])), plain)


def test_other_errors_of_the_model_stay_as_they_are():
    import dsx

    engine = dsx.initialize(model=torch.nn.Linear(6, 4), config=config(bf16={"enabled": True}))[0]
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes cannot be multiplied"):
        engine(torch.randn(2, 5).bfloat16())
    plain = dsx.initialize(model=torch.nn.Linear(6, 4), config=config())[0]
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2 must have the same dtype"):
        plain(torch.randn(2, 6).double())


def test_a_model_that_takes_both_dtypes_is_left_alone():
    import dsx

    class Casts(torch.nn.Linear):
        def forward(self, x):
            assert x.dtype == torch.float32
            return super().forward(x.to(self.weight.dtype))

    engine = dsx.initialize(model=Casts(6, 4), config=config(bf16={"enabled": True}))[0]
    assert engine(torch.randn(2, 6)).dtype == torch.bfloat16
