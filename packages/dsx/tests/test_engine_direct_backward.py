"""`loss.backward()` under an engine trains as `engine.backward(loss)` does, or is refused before it has changed
anything.
"""

import contextlib
import functools

import pytest
import torch
from dsx_testkit import run_ranks, tiny

FP16 = {"fp16": {"enabled": True, "loss_scale": 1024.0}}


def build(stage, gas=1, **settings):
    import dsx

    model = tiny.MLP(6, 10, 4, depth=2, seed=3)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return dsx.initialize(model=model, config={**config, **settings})[0]


def loss_of(engine, index, penalty=0.0):
    generator = torch.Generator().manual_seed(index)
    x, y = torch.randn(2, 6, generator=generator), torch.randn(2, 4, generator=generator)
    loss = torch.nn.functional.mse_loss(engine(x.to(engine.precision.dtype("params"))).float(), y)
    return loss + penalty * sum(p.float().square().sum() for p in engine.module.parameters()) if penalty else loss


def weights(engine):
    return engine.module_state_dict()


def plain(world, gas, updates, penalty):
    """One process, all ranks' batches."""
    model = tiny.MLP(6, 10, 4, depth=2, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for update in range(updates):
        for index in range(update * gas * world, (update + 1) * gas * world):
            generator = torch.Generator().manual_seed(index)
            x, y = torch.randn(2, 6, generator=generator), torch.randn(2, 4, generator=generator)
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss = loss + penalty * sum(p.square().sum() for p in model.parameters())
            (loss / (gas * world)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train_directly(rank, world, gas, changes):
    for stage in range(4):
        penalty = 0.01 if stage < 3 else 0.0  # at stage 3 parameters cannot be read outside of a forward
        engine = build(stage, gas, **changes)
        for index in range(2 * gas):
            loss_of(engine, index * world + rank, penalty).backward()
            engine.step()
        assert engine.global_steps == 2 and engine.micro_steps == 2 * gas and engine.last_step.loss is None
        wanted = plain(world, gas, 2, penalty)
        close = dict(rtol=1e-5, atol=1e-6) if not changes else dict(rtol=3e-2, atol=3e-2)
        for name, value in weights(engine).items():
            torch.testing.assert_close(
                value.float(), wanted[name], msg=lambda m: f"stage {stage}, {name}: {m}", **close
            )
        engine.destroy()


@pytest.mark.parametrize("changes", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("world", "gas"), [(1, 3), (2, 1), (2, 3)])
def test_gradients_are_those_of_engine_backward(world, gas, changes):
    run_ranks(train_directly, world, gas, changes)


def refuse(rank, world):
    from dsx.errors import DsxError

    for stage in range(4):
        engine = build(stage, 2, **FP16)
        engine.backward(loss_of(engine, rank))
        engine.step()
        with pytest.raises(DsxError, match=r"engine\.backward\(loss\)"):
            loss_of(engine, 10 + rank).backward()
        # What was there is as it was: the update is that of the two losses the engine was given.
        engine.backward(loss_of(engine, 20 + rank))
        engine.step()
        found = weights(engine)
        engine.destroy()
        engine = build(stage, 2, **FP16)
        for index in (0, 20):
            engine.backward(loss_of(engine, index + rank))
            engine.step()
        assert all(torch.equal(found[name], value) for name, value in weights(engine).items()), f"stage {stage}"
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_a_loss_scale_cannot_be_made_up_for(world):
    run_ranks(refuse, world)


def ways(rank, world, stage):
    """Everything that is no `loss.backward()` stays what it was."""
    engine, other = build(stage, 2), build(stage, 2)
    for index in range(4):
        loss = loss_of(engine, index)
        extra = loss_of(engine, 50 + index) * 0.5
        (engine.scale(loss) + engine.scale(extra)).backward()
        engine.step()
        other.backward(loss_of(other, index), retain_graph=True)
        other.backward(loss_of(other, 50 + index) * 0.5)
        other.step()
    for name, value in weights(engine).items():
        torch.testing.assert_close(value, weights(other)[name])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_scaled_losses_may_be_added_up(stage):
    run_ranks(ways, 2, stage)


def test_autograd_grad_is_not_judged():
    for changes in (FP16, {"gradient_accumulation_steps": 4}):
        engine = build(2, **changes)
        x = torch.randn(2, 6, dtype=engine.precision.dtype("params"), requires_grad=True)
        weight = engine.module.layers[0].weight
        for wanted in (x, weight):
            output = engine(x).float().sum()
            (grad,) = torch.autograd.grad(output, wanted, create_graph=True)
            reference = tiny.MLP(6, 10, 4, depth=2, seed=3).to(x.dtype)
            of = x if wanted is x else reference.layers[0].weight
            assert torch.allclose(grad, torch.autograd.grad(reference(x).float().sum(), of)[0], atol=1e-3)
        engine.backward(grad.float().square().mean())
        engine.step()


def test_the_number_of_micro_batches_may_change():
    found = []
    for direct in (True, False):
        engine = build(0)
        for steps in (1, 3):
            engine.set_train_batch_size(2 * steps)
            for index in range(steps):
                loss = loss_of(engine, index)
                loss.backward() if direct else engine.backward(loss)
                engine.step()
        found.append(weights(engine))
    assert all(torch.allclose(value, found[1][name], atol=1e-6) for name, value in found[0].items())


def failing(rank, world):
    def fail(grad):
        raise ZeroDivisionError

    for stage in (0, 1, 2):
        engines = [build(stage, 2) for _ in range(2)]
        for engine, fails in zip(engines, (True, False)):
            if fails:
                loss = loss_of(engine, 7)
                handle = next(engine.module.parameters()).register_hook(fail)
                with contextlib.suppress(ZeroDivisionError):
                    engine.backward(loss)
                handle.remove()
                engine.forget_micro_batches()
            for index in range(2):
                loss_of(engine, index * world + rank).backward()
                engine.step()
        first, second = map(weights, engines)
        assert all(torch.allclose(value, second[name], atol=1e-6) for name, value in first.items()), f"stage {stage}"


@pytest.mark.parametrize("world", [1, 2])
def test_an_error_in_backward_ends_it(world):
    run_ranks(failing, world)


def test_what_needs_the_loss_refuses():
    from dsx.errors import DsxError

    engine = build(0, eigenvalue={"enabled": True, "layer_name": "layers", "layer_num": 2})
    with pytest.raises(DsxError, match="CurvatureSession has to know"):
        loss_of(engine, 0).backward()
    engine.backward(loss_of(engine, 0))
    engine.step()
    engine.destroy()


def bytes_sent(rank, world, direct):
    import dsx_comm

    sent = 0

    class Count:
        def begin(self, call):
            nonlocal sent
            sent += call.sent / call.per

        def end(self, *rest):
            pass

    engine = build(1, 4)
    stop = dsx_comm.observe(Count())
    for index in range(4):
        loss = loss_of(engine, index)
        loss.backward() if direct else engine.backward(loss)
        engine.step()
    stop()
    return sent


def test_gradients_travel_once_per_update_at_stage_1():
    run = functools.partial(run_ranks, bytes_sent, 2)
    assert run(True) == run(False)
