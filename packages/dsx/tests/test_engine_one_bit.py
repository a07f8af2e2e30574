"""The optimizers that average in one bit, chosen by the configuration: training, refusals, and going on from
checkpoints.
"""

import dsx
import dsx_comm
import pytest
import torch
from dsx.errors import DsxConfigError
from dsx_testkit import run_ranks

PARAMS = {
    "OneBitAdam": {"lr": 1e-2, "freeze_step": 4, "comm_backend_name": "nccl", "cuda_aware": False},
    "zerooneadam": {
        "lr": 1e-3,
        "var_freeze_step": 4,
        "var_update_scaler": 2,
        "local_step_scaler": 2,
        "local_step_clipper": 4,
    },
    "OnebitLamb": {"lr": 1e-2, "freeze_step": 4, "weight_decay": 0.1},
}


def config(name, precision="fp32", params=None, **more):
    sections = {} if precision == "fp32" else {precision: {"enabled": True}}
    if precision == "fp16":
        sections["fp16"]["initial_scale_power"] = 4
    return {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "optimizer": {"type": name, "params": {**PARAMS[name], **(params or {})}}, **sections, **more,
    }  # fmt: skip


def build(name, precision="fp32", frozen=False, **more):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)
    )
    if frozen:
        model[2].requires_grad_(False)
    engine, *_ = dsx.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config=config(name, precision, **more),
    )
    return engine


def train(engine, rank, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            x = torch.randn(4, 6, generator=generator)
            loss = (
                (engine(x.to(next(engine.module.parameters()).dtype)).float() - x.sum(1, keepdim=True)).square().mean()
            )
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    return losses


def weights(engine):
    return torch.cat([p.detach().float().reshape(-1) for p in engine.module.parameters()])


def runs(rank, world, name, precision):
    engine = build(name, precision, frozen=True)
    untouched = engine.module[2].weight.detach().clone()
    inner = engine.optimizer.inner
    with dsx_comm.count_traffic() as traffic:
        losses = train(engine, rank, 10)
    assert engine.skipped_steps == 0
    kinds = traffic.by_op()
    assert torch.equal(engine.module[2].weight, untouched)
    engine.optimizer.synchronize()
    mine = weights(engine)
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dsx_comm.all_gather(everyone, mine)
    assert all(torch.equal(one, mine) for one in everyone)
    assert inner.clock.step == 10 and inner.clock.variance_steps < 10
    assert kinds["compressed_all_reduce"][0] >= 3
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    ("name", "precision"),
    [("OneBitAdam", "fp16"), ("OneBitAdam", "bf16"), ("zerooneadam", "bf16"), ("OnebitLamb", "fp16")],
)
def test_training_by_configuration(name, precision):
    losses = run_ranks(runs, 2, name, precision)
    assert all(one[-1] == one[-1] for one in losses)


def agrees(rank, world, name):
    """The engine, with accumulation, does what the optimizer does alone in a plain loop."""
    engine = build(name, gradient_clipping=0)
    train(engine, rank, 9)
    engine.optimizer.synchronize()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)
    )
    cls = {"OneBitAdam": dsx_comm.OneBitAdam, "zerooneadam": dsx_comm.ZeroOneAdam, "OnebitLamb": dsx_comm.OneBitLamb}[
        name
    ]
    optimizer = cls(model.parameters(), **PARAMS[name])
    for step in range(9):
        optimizer.zero_grad()
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            x = torch.randn(4, 6, generator=generator)
            ((model(x) - x.sum(1, keepdim=True)).square().mean() / 2).backward()
        optimizer.step()
    optimizer.synchronize()
    plain = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    torch.testing.assert_close(weights(engine), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PARAMS)
def test_the_engine_does_what_a_plain_loop_does(name):
    run_ranks(agrees, 2, name)


def silent(rank, world):
    """Compressed steps send one bit per element, local steps nothing at all: the engine reduces no gradients then."""
    engine = build("zerooneadam")
    train(engine, rank, 4)
    sent = {}
    for step in range(4, 16):
        with dsx_comm.count_traffic() as traffic:
            train(engine, rank, 1, step)
        kind = engine.optimizer.inner.last_traffic.kind.value
        sent.setdefault(kind, set()).add(traffic.sent_bytes())
        assert traffic.sent_bytes() == engine.optimizer.inner.last_traffic.sent
    assert sent["local"] == {0} and len(sent["sync"]) == 1
    assert engine.get_global_grad_norm() is None
    return sent


def test_local_steps_send_nothing():
    run_ranks(silent, 2)


def overflows(rank, world):
    """A gradient that is not finite on one rank skips the step on all, in compressed steps too."""
    engine = build("OneBitAdam", "fp16")
    train(engine, rank, 6)
    before = weights(engine)
    errors = engine.optimizer.inner._arenas[0].feedback.worker.clone()
    for _ in range(2):
        loss = engine(torch.ones(4, 6, dtype=torch.float16)).float().sum() * (float("inf") if rank == 1 else 1.0)
        engine.backward(loss)
        engine.step()
    assert engine.skipped_steps == 1 and torch.equal(weights(engine), before)
    assert torch.equal(engine.optimizer.inner._arenas[0].feedback.worker, errors)
    train(engine, rank, 1, 7)
    assert weights(engine).isfinite().all() and not torch.equal(weights(engine), before)


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    run_ranks(overflows, 2)


def saves(rank, world, name, folder):
    engine = build(name)
    train(engine, rank, 7)
    engine.save_checkpoint(folder, tag="a")
    train(engine, rank, 4, 7)
    engine.optimizer.synchronize()
    return weights(engine)


def loads(rank, world, name, folder, steps):
    engine = build(name)
    engine.load_checkpoint(folder, tag="a")
    train(engine, rank, steps, 7)
    engine.optimizer.synchronize()
    inner = engine.optimizer.inner
    errors = [a.feedback.worker.clone() for a in inner._arenas if a.feedback is not None]
    return weights(engine), inner.clock, errors


@pytest.mark.parametrize("name", PARAMS)
def test_a_checkpoint_goes_on_to_the_bit_and_moves_to_other_numbers_of_ranks(name, tmp_path):
    straight = run_ranks(saves, 2, name, str(tmp_path))
    for (resumed, clock, _), expected in zip(run_ranks(loads, 2, name, str(tmp_path), 4), straight):
        assert torch.equal(resumed, expected) and clock.step == 11
    (_, _, first), (_, _, second) = run_ranks(loads, 2, name, str(tmp_path), 0)
    three = run_ranks(loads, 3, name, str(tmp_path), 0)
    whole = lambda errors: errors[0][errors[0] != 0].sum()  # noqa: E731
    for _, clock, errors in three:
        assert clock.step == 7
        torch.testing.assert_close(whole(errors), (whole(first) + whole(second)) / 2, rtol=1e-4, atol=1e-5)
    alone, clock, errors = run_ranks(loads, 1, name, str(tmp_path), 2)[0]
    assert clock.step == 9 and not errors and alone.isfinite().all()


def from_adam(rank, world, folder):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    plain = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    first, *_ = dsx.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={**plain, "optimizer": {"type": "Adam", "params": {"lr": 1e-2}}},
    )
    train(first, rank, 5)
    first.save_checkpoint(folder, tag="adam")
    model = torch.nn.Linear(6, 1)
    settings = {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 5}}
    second, *_ = dsx.initialize(
        model=model, model_parameters=model.parameters(), config={**plain, "optimizer": settings}
    )
    second.load_checkpoint(folder, tag="adam")
    assert second.optimizer.inner.takes_local_gradients or world == 1 or second.optimizer.inner.clock.step == 0
    train(second, rank, 1, 5)
    return second.optimizer.inner.clock


def test_a_checkpoint_of_adam_is_the_warm_up(tmp_path):
    for clock in run_ranks(from_adam, 2, str(tmp_path)):
        assert clock.step == 6 and clock.variance_steps == 5


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"zero_optimization": {"stage": 1}}, "OneBitAdam does not work with ZeRO"),
        ({"gradient_allreduce_op": "sum"}, "OneBitAdam averages momenta"),
    ],
)
def test_what_the_algorithm_cannot_do_is_refused(more, text):
    from dsx.config import load_config

    with pytest.raises(DsxConfigError, match=text):
        load_config(config("OneBitAdam", **more), world_size=1)


@pytest.mark.parametrize(
    ("params", "path"),
    [
        ({"freeze_step": 0}, "optimizer.params.freeze_step"),
        ({"comm_backend_name": "tcp"}, "optimizer.params.comm_backend_name"),
        ({"compression": "maybe"}, "optimizer.params.compression"),
        ({"max_grad_norm": 1.0}, "optimizer.params.max_grad_norm"),
        ({"freeze_steps": 3}, "optimizer.params.freeze_steps"),
    ],
)
def test_arguments_are_judged_before_anything_is_built(params, path):
    from dsx.config import load_config

    broken = {"train_batch_size": 4, "optimizer": {"type": "onebitadam", "params": params}}
    with pytest.raises(DsxConfigError) as caught:
        load_config(broken, world_size=1)
    assert [problem.path for problem in caught.value.problems] == [path]


@pytest.mark.parametrize(("more", "norm"), [({}, 1), ({"gradient_clipping": 0.5}, 0.5), ({"gradient_clipping": 0}, 0)])
def test_one_line_says_what_clipping_means(more, norm):
    from dsx.config import load_config

    loaded = load_config(config("OneBitAdam", **more), world_size=1)
    assert loaded.gradient_clipping == norm
    said = [w for w in loaded.warnings if "clip" in w]
    assert len(said) == (norm > 0)
    if norm:
        text = f"gradient_clipping: gradients clipped to the norm {norm:g} with OneBitAdam: exact steps are clipped"
        assert said[0].startswith(text)
        assert "each rank clips its own gradient by its own norm" in said[0] and "\n" not in said[0]


def test_published_configurations_are_accepted():
    """What recipes for BERT and SQuAD write: 16-bit training, clipping to 1.0, either backend name, either spelling."""
    from dsx.config import load_config

    lamb = {
        "max_coeff": 0.3,
        "min_coeff": 0.01,
        "coeff_beta": 0.9,
        "factor_max": 4.0,
        "factor_min": 0.5,
        "factor_threshold": 0.1,
    }
    of_each = {
        "OneBitAdam": {"freeze_step": 23000}, "OnebitAdam": {"freeze_step": 400},
        "ZeroOneAdam": {"var_freeze_step": 12500, "var_update_scaler": 16, "local_step_scaler": 32678,
                        "local_step_clipper": 16},
        "OneBitLamb": {"freeze_step": 1000, **lamb},
    }  # fmt: skip
    for name, params in of_each.items():
        for backend in (
            {"cuda_aware": False, "comm_backend_name": "nccl"},
            {"cuda_aware": True, "comm_backend_name": "mpi"},
            {},
        ):
            common = {"lr": 4e-4, "weight_decay": 0.01, "bias_correction": False}
            loaded = load_config(
                {
                    "train_batch_size": 4096, "train_micro_batch_size_per_gpu": 16, "steps_per_print": 100,
                    "prescale_gradients": False, "optimizer": {"type": name, "params": {**common, **params, **backend}},
                    "gradient_clipping": 1.0, "wall_clock_breakdown": False,
                    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
                },
                world_size=8,
            )  # fmt: skip
            assert loaded.gradient_clipping == 1.0


def clips(rank, world, name, precision):
    """Exact steps are clipped by the norm of the mean gradient, the others by each rank's own: against a plain loop."""
    engine = build(name, precision, gradient_clipping=0.2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)
    )
    cls = {"OneBitAdam": dsx_comm.OneBitAdam, "zerooneadam": dsx_comm.ZeroOneAdam, "OnebitLamb": dsx_comm.OneBitLamb}[
        name
    ]
    optimizer, clipped = cls(model.parameters(), **PARAMS[name]), set()
    for step in range(9):
        train(engine, rank, 1, step)
        optimizer.zero_grad()
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            x = torch.randn(4, 6, generator=generator)
            ((model(x) - x.sum(1, keepdim=True)).square().mean() / 2).backward()
        local = optimizer.takes_local_gradients
        if not local:
            for p in model.parameters():
                dsx_comm.all_reduce(p.grad, dsx_comm.ReduceOp.AVG)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        if norm > 0.2:
            clipped.add(local)
        assert engine.get_global_grad_norm() == (None if local else pytest.approx(norm.item(), rel=1e-4))
        optimizer.step()
    optimizer.synchronize()
    engine.optimizer.synchronize()
    assert clipped == {True, False}, "clipping was to be seen in both kinds of step"
    plain = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    torch.testing.assert_close(weights(engine), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PARAMS)
def test_clipping_by_the_mean_gradients_norm_then_by_each_ranks_own(name):
    run_ranks(clips, 2, name, "fp32")


def clips_in_16_bits(rank, world):
    """With a loss scale: an overflow on one rank still skips the step on all, and clipping sees unscaled gradients."""
    engine = build("OneBitAdam", "fp16", gradient_clipping=0.2)
    train(engine, rank, 7)
    before = weights(engine)
    for _ in range(2):
        loss = engine(torch.ones(4, 6, dtype=torch.float16)).float().sum() * (float("inf") if rank == 1 else 1.0)
        engine.backward(loss)
        engine.step()
    assert engine.skipped_steps == 1 and torch.equal(weights(engine), before)
    train(engine, rank, 2, 7)
    mine = weights(engine)
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dsx_comm.all_gather(everyone, mine)
    assert mine.isfinite().all() and all(torch.equal(one, mine) for one in everyone)
    assert not torch.equal(mine, before)


def scales(rank, world):
    import dsx_zero

    results = []
    for scale in (1.0, 64.0):
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 4)
        model, optimizer = dsx_zero.shard(
            model, dsx_comm.OneBitAdam(model.parameters(), lr=0.01, freeze_step=3), stage=0
        )
        for step in range(6):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            (model(x).square().sum() * scale).backward()
            optimizer.step(grad_scale=scale, max_norm=0.2)
            optimizer.zero_grad()
        results.append(model.weight.detach().clone())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_clipping_under_a_loss_scale():
    run_ranks(clips_in_16_bits, 2)
    run_ranks(scales, 2)


def client(rank, world):
    """An optimizer object of the caller's: clipped as one that the configuration names, and refused with ZeRO."""
    import logging

    import dsx_zero

    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("dsx_zero").addHandler(handler)
    base = {"train_micro_batch_size_per_gpu": 4}
    model = torch.nn.Linear(3, 1)
    mine = dsx_comm.OneBitAdam(model.parameters(), freeze_step=1)
    engine, *_ = dsx.initialize(model=model, optimizer=mine, config={**base, "gradient_clipping": 0.5})
    assert engine.gradient_clipping() == 0.5 and not heard
    for _ in range(4):
        engine.backward(engine(torch.ones(4, 3)).square().mean())
        engine.step()
    # when local gradients come, rank 0 says once what happens with them
    assert len(heard) == (rank == 0) and all("each rank clips its own gradient" in line for line in heard)
    model = torch.nn.Linear(3, 1)
    with pytest.raises(dsx_zero.ZeroOptimizerError, match="OneBitAdam cannot be used at stage 2"):
        dsx_zero.shard(model, dsx_comm.OneBitAdam(model.parameters()), stage=2)
    with pytest.raises(dsx_zero.ZeroConfigError, match="OneBitAdam averages momenta"):
        dsx_zero.shard(model, dsx_comm.OneBitAdam(model.parameters()), stage=0, reduction=dsx_zero.Reduction(op="sum"))
    model = torch.nn.Linear(3, 1)
    model, optimizer = dsx_zero.shard(model, dsx_comm.OneBitAdam(model.parameters(), freeze_step=1), stage=0)
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step(max_norm=1.0)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)


def test_optimizer_objects_of_the_caller():
    run_ranks(client, 2)


def lines(rank, world):
    """With steps_per_print, rank 0 says what was sent."""
    engine = build("OneBitAdam", steps_per_print=3)
    train(engine, rank, 6)


def test_the_log_says_what_was_sent(capfd):
    run_ranks(lines, 2)
    text = capfd.readouterr()
    found = [line for line in (text.out + text.err).splitlines() if "compression: " in line]
    assert len(found) == 2 and "compression: exact, sent" in found[0], text
    assert "compression: one_bit, sent" in found[1]
