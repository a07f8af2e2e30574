"""The optimizer `shard` returns behaves as a torch optimizer; what it cannot do is refused with the reason."""

from __future__ import annotations

import logging
import pickle

import dsx_zero
import pytest
import torch
from dsx_testkit import assert_close_named, run_ranks, seed_all, tiny


def params(model):
    return {n: p.detach() for n, p in model.named_parameters()}


def step(model, optimizer, seed=0, **options):
    model.loss(*model.example(seed=seed)).backward()
    outcome = optimizer.step(**options)
    optimizer.zero_grad()
    return outcome


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_schedulers_take_it(stage):
    model, optimizer = dsx_zero.shard(tiny.MLP(), lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9), stage=stage)
    assert isinstance(optimizer, torch.optim.Optimizer)
    halving = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert halving.optimizer.param_groups is optimizer.inner.param_groups
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: pytest.fail(f"warned: {args[0]}"))
        step(model, optimizer)
        halving.step()
    assert optimizer.inner.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "NAdam"])
def test_unscaling_and_clipping_equal_torchs(name, fused, stage):
    if fused and name in ("RMSprop", "NAdam"):
        pytest.skip("torch has no fused one")
    make = lambda p: getattr(torch.optim, name)(p, lr=0.1, **({"fused": True} if fused else {}))  # noqa: E731
    reference = tiny.MLP()
    plain = make(reference.parameters())
    model, optimizer = dsx_zero.shard(tiny.MLP(), make, stage=stage)
    for seed in range(3):
        reference.loss(*reference.example(seed=seed)).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        plain.step()
        plain.zero_grad()
        (model.loss(*model.example(seed=seed)) * 1024).backward()
        outcome = optimizer.step(grad_scale=1024.0, max_norm=0.1)
        optimizer.zero_grad()
        assert outcome.grad_norm == pytest.approx(norm.item(), rel=1e-5) and not outcome.overflow
    assert_close_named(params(model), params(reference), rtol=1e-4, atol=1e-5)


def overflow(rank, world):
    for stage in range(4):
        for bad in (float("inf"), float("nan")):
            model = tiny.MLP().to(torch.bfloat16)
            model, optimizer = dsx_zero.shard(model, lambda p: torch.optim.AdamW(p), stage=stage)

            def backward(model, scale, only):
                x, y = model.example()
                (model.loss(x.bfloat16(), y) * (scale if rank == only else 1.0)).backward()

            backward(model, 1.0, 0)
            assert not optimizer.step().overflow
            optimizer.zero_grad()
            masters = [s.master.clone() for s in optimizer.slices()]
            backward(model, bad, world - 1)  # on one rank only
            outcome = optimizer.step(max_norm=1.0)
            assert outcome.overflow, (stage, bad)
            assert all(torch.equal(s.master, m) for s, m in zip(optimizer.slices(), masters))
            optimizer.zero_grad()
            backward(model, 1.0, 0)
            assert not optimizer.step().overflow


@pytest.mark.parametrize("world", [1, 2])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(world):
    run_ranks(overflow, world)


def test_fp32_lets_nan_through_as_torch_does_unless_told_to_check():
    for check, expected in ((None, False), (True, True)):
        precision = dsx_zero.Precision(check_overflow=check)
        model, optimizer = dsx_zero.shard(
            tiny.MLP(), lambda p: torch.optim.SGD(p, lr=0.1), stage=0, precision=precision
        )
        (model.loss(*model.example()) * float("nan")).backward()
        assert optimizer.step(max_norm=1.0).overflow is expected
        assert model.layers[0].weight.isnan().any().item() is not expected


def broadcast(rank, world):
    for stage in range(4):
        seed_all(rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        torch.nn.init.normal_(model[0].weight)
        model[1].running_mean.fill_(rank)
        seed_all(0)
        want = torch.nn.Linear(3, 4)
        torch.nn.init.normal_(want.weight)
        model, _ = dsx_zero.shard(model, lambda p: torch.optim.SGD(p, lr=0.1), stage=stage)
        weight = model[0].weight
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        torch.testing.assert_close(whole.detach(), want.weight.detach(), rtol=0, atol=0)
        assert (model[1].running_mean == 0).all()


def test_rank_0_gives_parameters_and_buffers():
    run_ranks(broadcast, 2)


@pytest.mark.parametrize("stage", [0, 1])
def test_an_optimizer_that_has_stepped_keeps_its_state(stage):
    reference, model = tiny.OddSizes(), tiny.OddSizes()
    plain, other = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (reference, model))
    for m, o in ((reference, plain), (model, other)):
        for p in m.parameters():
            p.grad = torch.ones_like(p)
        o.step()
        o.zero_grad()
    model, optimizer = dsx_zero.shard(model, other, stage=stage)
    for seed in range(2):
        reference.loss(*reference.example(seed=seed)).backward()
        plain.step()
        plain.zero_grad()
        step(model, optimizer, seed)
    assert_close_named(params(model), params(reference), rtol=1e-5, atol=1e-6)


def test_parameters_without_optimizer_are_frozen_for_it():
    model = tiny.MLP()
    kept = model.layers[0].weight.detach().clone()
    model, optimizer = dsx_zero.shard(model, torch.optim.SGD([model.layers[1].weight], lr=0.1), stage=2)
    step(model, optimizer)
    assert torch.equal(model.layers[0].weight, kept)
    assert {s.name for s in optimizer.slices() if s.trainable} == {"layers.1.weight"}


def test_no_optimizer_is_for_forward_only():
    model, optimizer = dsx_zero.shard(tiny.MLP(), None, stage=2)
    assert not [s for s in optimizer.slices() if s.trainable]
    assert model.loss(*model.example()).item() == tiny.MLP().loss(*model.example()).item()
    with pytest.raises(dsx_zero.ZeroOptimizerError, match="without an optimizer"):
        optimizer.step()


def test_closures_run_once_with_gradients():
    model, optimizer = dsx_zero.shard(tiny.MLP(), lambda p: torch.optim.SGD(p, lr=0.1), stage=1)
    calls = []

    def closure():
        calls.append(1)
        loss = model.loss(*model.example())
        loss.backward()
        return loss

    assert optimizer.step(closure).loss.item() == tiny.MLP().loss(*model.example()).item() and calls == [1]


def test_what_is_refused():
    other = tiny.MLP()
    with pytest.raises(dsx_zero.ZeroOptimizerError, match=r"param_groups\[0\]"):
        dsx_zero.shard(tiny.MLP(), torch.optim.SGD(other.parameters(), lr=0.1), stage=1)
    with pytest.raises(dsx_zero.ZeroOptimizerError, match="expected a torch"):
        dsx_zero.shard(tiny.MLP(), lambda p: None, stage=1)
    with pytest.raises(dsx_zero.ZeroModelError, match="meta"):
        dsx_zero.shard(torch.nn.Linear(2, 2, device="meta"), lambda p: torch.optim.SGD(p, lr=0.1), stage=1)
    model, optimizer = dsx_zero.shard(tiny.MLP(), lambda p: torch.optim.SGD(p, lr=0.1), stage=1)
    with pytest.raises(dsx_zero.ZeroOptimizerError, match="is not a parameter of the model"):
        optimizer.add_param_group({"params": list(other.parameters())})
    with pytest.raises(dsx_zero.ZeroOptimizerError, match="pickled"):
        pickle.dumps(optimizer)
    with pytest.raises(dsx_zero.ZeroOptimizerError, match="already"):
        dsx_zero.shard(model, optimizer, stage=1)


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"stage": 4}, "zero_optimization.stage"),
        ({"stag": 2}, "zero_optimization.stag"),
        ({"reduce_bucket_size": -1}, "zero_optimization.reduce_bucket_size"),
        ({"offload_optimizer": {"device": "cpu"}}, "zero_optimization.offload_optimizer"),
        ({"zero_quantized_weights": True}, "zero_optimization.zero_quantized_weights"),  # at stage 0
        ({"legacy_stage1": True}, "zero_optimization.legacy_stage1"),
    ],
)
def test_settings_that_are_wrong_or_not_there_yet(config, path):
    with pytest.raises(dsx_zero.ZeroConfigError) as caught:
        dsx_zero.shard(tiny.MLP(), None, config=config)
    assert caught.value.path.startswith(path) and path in str(caught.value)


def test_settings_people_write():
    from dsx_zero.config import ZeroConfig

    config = ZeroConfig.model_validate({"stage": 3, "reduce_bucket_size": 5e8, "prefetch_bucket_size": "auto",
                                        "offload_optimizer": {"device": "none"}})  # fmt: skip
    config.check_available()
    assert config.size("stage3_prefetch_bucket_size") == 500_000_000 and config.reduce_bucket_size == 500_000_000
    assert ZeroConfig.model_validate(True).stage == 1
    assert ZeroConfig.model_validate({"round_robin_gradients": True}).notices()[0].startswith("zero_optimization.round")
    assert not ZeroConfig().notices()


def test_settings_without_effect_are_said_once(caplog):
    with caplog.at_level(logging.WARNING, logger="dsx_zero"):
        dsx_zero.shard(tiny.MLP(), None, config={"stage": 1, "contiguous_gradients": False})
    assert [r.message for r in caplog.records if "contiguous_gradients" in r.message]
