"""The engine against plain torch in one process on the same global batch: accumulation, clipping, precision,
schedules.
"""

import contextlib
import functools

import pytest
import torch
from dsx_testkit import run_ranks, tiny

MICRO, WIDTH = 2, 6
PATTERNS = [(True, True, False), (True, False, True), (False, True, False)]


def model():
    return tiny.MLP(WIDTH, 10, 4, depth=2, seed=3)


def batch(index, size=MICRO):
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randn(size, WIDTH, generator=generator), torch.randn(size, 4, generator=generator)


def config(**changes):
    base = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "gradient_clipping": 0.0,
        "steps_per_print": None,
    }
    return {**base, **changes}


def zero(stage):
    return {"stage": stage, "stage3_param_persistence_threshold": 0}


def values(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def trained(rank, world, settings, steps=3):
    """Train through the engine; losses, whole weights, norms."""
    import dsx

    torch.manual_seed(rank)
    engine, *_ = dsx.initialize(model=model(), config=settings)
    gas = engine.gradient_accumulation_steps()
    losses, norms = [], []
    for step in range(steps):
        for micro in range(gas):
            x, y = batch((step * gas + micro) * world + rank)
            loss = torch.nn.functional.mse_loss(engine(x), y)
            returned = engine.backward(loss)
            torch.testing.assert_close(returned, loss.detach() / gas)
            assert engine.is_gradient_accumulation_boundary() == (micro == gas - 1)
            engine.step()
            assert engine.was_step_applied() == (micro == gas - 1)
            losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (steps, steps * gas, 0)
    assert engine.global_samples == steps * gas * world * MICRO == steps * engine.train_batch_size()
    weights = engine.module_state_dict()
    engine.destroy()
    return losses, weights, norms


def plain(world, gas, steps=3, *, max_norm=0.0):
    """The same in plain torch: one process, one big batch per update."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        parts = [batch(step * gas * world + i) for i in range(gas * world)]
        x, y = (torch.cat(both) for both in zip(*parts))
        torch.nn.functional.mse_loss(net(x), y).backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm or float("inf"))
        norms.append(float(norm))
        optimizer.step()
    return values(net), norms


CASES = [(stage, gas, clip) for stage in (0, 1, 2, 3) for gas in (1, 3) for clip in (0.0, 0.1)]


def settings_of(stage, gas, clip):
    return config(gradient_accumulation_steps=gas, gradient_clipping=clip, zero_optimization=zero(stage))


def all_cases(rank, world):
    return [trained(rank, world, settings_of(*case)) for case in CASES]


@functools.lru_cache
def results(world):
    """Every case in one start of the ranks: starting them is what costs time."""
    return run_ranks(all_cases, world, timeout=200)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage, gas, clip", CASES)
def test_updates_are_those_of_one_process(world, stage, gas, clip):
    expected, norms = plain(world, gas, max_norm=clip)
    assert max(norms) > 0.1, "the clipped cases must clip"
    for of_rank in results(world):
        _, weights, got_norms = of_rank[CASES.index((stage, gas, clip))]
        assert list(weights) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
        assert got_norms == pytest.approx(norms, rel=1e-5)


def other_cases(rank, world):
    without_clipping_key = config()
    del without_clipping_key["gradient_clipping"]
    return {
        "default clip": trained(rank, world, without_clipping_key)[1],
        **{kind: output_shape(kind) for kind in ("dict", "tuple", "tensor")},
        **{("by hand", stage): by_hand(rank, world, stage) for stage in (1, 2)},
        **{
            ("no_sync", stage, pattern): with_no_sync(rank, world, stage, pattern)
            for stage in (0, 1, 2, 3)
            for pattern in PATTERNS
        },
        "boundary by hand": boundary_by_hand(rank, world),
        **{("eval", stage): evaluate(rank, world, stage) for stage in (0, 2, 3)},
    }


@functools.lru_cache
def others():
    return run_ranks(other_cases, 2, timeout=200)


def assert_weights(key, expected):
    for of_rank in others():
        for name, value in expected.items():
            torch.testing.assert_close(of_rank[key][name], value, rtol=1e-5, atol=1e-6)


def test_default_clipping_is_one():
    expected, _ = plain(2, 1, max_norm=1.0)
    assert_weights("default clip", expected)


def output_shape(kind):
    """A loss that is a term of the output and one that never went through it, with accumulation."""
    import dsx

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((1,), 2.0))

        def forward(self, x):
            loss = (self.weight * x).sum()
            return {"dict": {"loss": loss, "logits": x}, "tuple": (loss, x), "tensor": loss}[kind]

    settings = config(gradient_accumulation_steps=4, optimizer={"type": "SGD", "params": {"lr": 1.0}})
    net = Net()
    engine, *_ = dsx.initialize(model=net, config=settings)
    for i in range(4):
        output = engine(torch.tensor([float(i)]))
        loss = {"dict": lambda o: o["loss"], "tuple": lambda o: o[0], "tensor": lambda o: o}[kind](output)
        engine.backward(loss + net.weight.sum())
        engine.step()
    return float(engine.module_state_dict()["weight"])


@pytest.mark.parametrize("kind", ["dict", "tuple", "tensor"])
def test_loss_is_scaled_once_whatever_the_model_returns(kind):
    # gradient: mean of 0, 1, 2, 3 through the output, and 1 beside it
    assert [of_rank[kind] for of_rank in others()] == [2.0 - (1.5 + 1.0)] * 2


def by_hand(rank, world, stage):
    import dsx

    engine, *_ = dsx.initialize(
        model=model(), config=config(gradient_accumulation_steps=3, zero_optimization=zero(stage))
    )
    for index in range(6):
        x, y = batch(index * world + rank)
        engine.scale(torch.nn.functional.mse_loss(engine(x), y)).backward()
        engine.step()
    return engine.module_state_dict()


@pytest.mark.parametrize("stage", [1, 2])
def test_backward_by_hand_on_the_scaled_loss(stage):
    assert_weights(("by hand", stage), plain(2, 3, steps=2)[0])


def with_no_sync(rank, world, stage, pattern):
    """`pattern` says for each micro-batch whether it runs inside no_sync()."""
    import dsx

    engine, *_ = dsx.initialize(
        model=model(), config=config(gradient_accumulation_steps=len(pattern), zero_optimization=zero(stage))
    )
    for step in range(2):
        for micro, quiet in enumerate(pattern):
            x, y = batch((step * len(pattern) + micro) * world + rank)
            with engine.no_sync() if quiet else contextlib.nullcontext():
                engine.backward(torch.nn.functional.mse_loss(engine(x), y))
            engine.step()
    return engine.module_state_dict()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_sync_changes_when_not_what_is_reduced(stage, pattern):
    assert_weights(("no_sync", stage, pattern), plain(2, 3, steps=2)[0])


def boundary_by_hand(rank, world):
    import dsx

    engine, *_ = dsx.initialize(model=model(), config=config(gradient_accumulation_steps=4))
    applied = []
    for index in range(4):
        engine.set_gradient_accumulation_boundary(index in (1, 3))
        x, y = batch(index * world + rank)
        engine.backward(torch.nn.functional.mse_loss(engine(x), y) / 2, scale_wrt_gas=False)
        engine.step()
        applied.append(engine.was_step_applied())
    assert applied == [False, True, False, True]
    return engine.module_state_dict()


def test_boundary_and_scale_by_hand():
    assert_weights("boundary by hand", plain(2, 2, steps=2)[0])


def evaluate(rank, world, stage):
    import dsx

    net = torch.nn.Sequential(model(), torch.nn.Dropout(0.5))
    engine, *_ = dsx.initialize(model=net, config=config(zero_optimization=zero(stage)))
    x, y = batch(rank)
    engine.eval()
    assert not engine.training and not net.training
    with torch.no_grad():
        before = engine(x)
        torch.testing.assert_close(before, model()(x))
    engine.train()
    engine.backward(torch.nn.functional.mse_loss(engine(x), y))
    engine.step()
    engine.eval()
    with torch.no_grad():
        assert not torch.equal(engine(x), before)
    return True


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_evaluation_between_steps(stage):
    assert [of_rank[("eval", stage)] for of_rank in others()] == [True, True]
