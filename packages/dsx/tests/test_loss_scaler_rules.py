"""The loss scale as a state machine: trajectories against the rules written down, and their corners."""

from __future__ import annotations

import random

import pytest
from dsx.config import load_config
from dsx.errors import DsxConfigError, LossScaleError
from dsx.loss_scaler import DynamicScale, NullScale, StaticScale, build_loss_scale, load_loss_scale
from dsx.precision import Precision


def trajectory(scale, steps):
    """Return the scale each step was done with; ``.`` is a good step, ``x`` an overflow."""
    seen = []
    for step in steps:
        seen.append(scale.scale)
        scale.update(step == "x")
    return [*seen, scale.scale]


# (arguments, steps, the scale before each step and after the last)
TRAJECTORIES = [
    # Growth after good step window + 1 and every window steps after it: steps 4, 7, 10.
    ({"initial_power": 4, "window": 3}, "..........", [16, 16, 16, 16, 32, 32, 32, 64, 64, 64, 128]),
    ({"initial_power": 4, "window": 1}, "....", [16, 16, 32, 64, 128]),
    # Hysteresis 2: the first overflow only uses it up, the next halves, and so does every one after it.
    ({"initial_power": 4, "window": 3, "hysteresis": 2}, "xxx", [16, 16, 8, 4]),
    ({"initial_power": 4, "window": 3, "hysteresis": 1}, "xx", [16, 8, 4]),
    ({"initial_power": 4, "window": 3, "hysteresis": 3}, "xxxx", [16, 16, 16, 8, 4]),
    # Good steps do not refill it; a doubling does. After an overflow, again window + 1 good steps.
    ({"initial_power": 4, "window": 2, "hysteresis": 2}, "x..x", [16, 16, 16, 16, 8]),
    ({"initial_power": 4, "window": 2, "hysteresis": 2}, "x...x", [16, 16, 16, 16, 32, 32]),
    ({"initial_power": 4, "window": 2, "hysteresis": 2}, "x...xx", [16, 16, 16, 16, 32, 32, 16]),
    # consecutive_hysteresis refills at every good step, so only overflows in a row halve.
    ({"initial_power": 4, "window": 9, "hysteresis": 2, "consecutive_hysteresis": True}, "x.x.x.xx", [16] * 8 + [8]),
    # The minimum bounds from below, also when halving would pass it.
    ({"initial_power": 2, "window": 9, "hysteresis": 1, "min_scale": 3}, "x", [4, 3]),
    ({"initial_power": 0, "window": 9, "min_scale": 8}, ".", [8, 8]),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "steps", "expected"), TRAJECTORIES)
def test_trajectories(arguments, steps, expected):
    assert trajectory(DynamicScale(**arguments), steps) == expected


def test_an_overflow_at_the_minimum_is_a_named_error():
    scale = DynamicScale(initial_power=1, window=9, hysteresis=1, min_scale=1)
    scale.update(True)
    assert scale.scale == 1
    with pytest.raises(LossScaleError, match=r"minimum 1.*min_loss_scale"):
        scale.update(True)
    # The hysteresis is used up first, also at the minimum.
    patient = DynamicScale(initial_power=0, hysteresis=2, min_scale=1)
    patient.update(True)
    with pytest.raises(LossScaleError):
        patient.update(True)


def rules(outcomes, *, power, window, hysteresis, consecutive, minimum):
    """The rules once more, counted instead of remembered: by looking back over all outcomes at every step."""
    scale, left, seen = 2.0**power, hysteresis, []
    for number, overflow in enumerate(outcomes):
        seen.append(scale)
        if overflow:
            if left == 1:
                scale = max(scale / 2, minimum)
            else:
                left -= 1
            continue
        if consecutive:
            left = hysteresis
        good = 0
        while good <= number and not outcomes[number - good]:
            good += 1
        # `good` counts this step too. The first run begins as if an overflow had come just before it.
        if good - 1 > 0 and (good - 1) % window == 0:
            scale *= 2
            if not consecutive:
                left = hysteresis
    return seen


def test_random_runs_follow_the_rules():
    random_ = random.Random(0)
    for _ in range(200):
        arguments = {
            "power": random_.randrange(20, 40),
            "window": random_.randrange(1, 6),
            "hysteresis": random_.randrange(1, 4),
            "consecutive": random_.random() < 0.5,
            "minimum": 1e-30,
        }
        outcomes = [random_.random() < 0.25 for _ in range(60)]
        scale = DynamicScale(
            initial_power=arguments["power"],
            window=arguments["window"],
            hysteresis=arguments["hysteresis"],
            consecutive_hysteresis=arguments["consecutive"],
            min_scale=1e-30,
        )
        seen = trajectory(scale, ["x" if overflow else "." for overflow in outcomes])[:-1]
        assert seen == rules(outcomes, **arguments), arguments


def test_a_state_continues_where_it_was_taken():
    arguments = {"initial_power": 8, "window": 3, "hysteresis": 2}
    steps = "..x....x.xx....."
    for cut in range(len(steps)):
        first = DynamicScale(**arguments)
        trajectory(first, steps[:cut])
        second = DynamicScale(**arguments)
        second.load_state_dict(first.state_dict())
        assert trajectory(second, steps[cut:]) == trajectory(DynamicScale(**arguments), steps)[cut:]


def test_states_are_plain_numbers_and_build_a_scale_alone():
    for scale in (NullScale(), StaticScale(128.0), DynamicScale(initial_power=5)):
        state = scale.state_dict()
        assert all(isinstance(value, (str, int, float)) for value in state.values())
        assert load_loss_scale(state).scale == scale.scale
        assert type(load_loss_scale(state)) is type(scale)


def test_states_of_another_kind():
    dynamic = DynamicScale(initial_power=5)
    dynamic.load_state_dict(NullScale().state_dict())
    assert dynamic.scale == 32
    dynamic.load_state_dict(StaticScale(64.0).state_dict())
    assert dynamic.scale == 64
    static = StaticScale(8.0)
    static.load_state_dict(dynamic.state_dict())
    assert static.scale == 8


def test_static_and_null_do_not_move():
    assert trajectory(StaticScale(128.0), "xx..x") == [128.0] * 6
    assert trajectory(NullScale(), "x.") == [1.0] * 3
    assert StaticScale(2.0).checks_overflow and not NullScale().checks_overflow


@pytest.mark.parametrize("arguments", [{"window": 0}, {"hysteresis": 0}, {"min_scale": 0}])
def test_arguments_that_make_no_sense(arguments):
    with pytest.raises(DsxConfigError, match="greater than 0"):
        DynamicScale(**arguments)


CHOICES = [
    ({}, NullScale, 1.0),
    ({"bf16": {"enabled": True}}, NullScale, 1.0),
    ({"fp16": {"enabled": True}}, DynamicScale, 65536.0),
    ({"fp16": {"enabled": True, "initial_scale_power": 4}}, DynamicScale, 16.0),
    ({"fp16": {"enabled": True, "loss_scale": 1024}}, StaticScale, 1024.0),
    ({"torch_autocast": {"enabled": True}}, NullScale, 1.0),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, DynamicScale, 65536.0),
    ({"amp": {"enabled": True}}, DynamicScale, 65536.0),
    ({"amp": {"enabled": True, "loss_scale": 256.0}}, StaticScale, 256.0),
    ({"amp": {"enabled": True, "opt_level": "O0"}}, NullScale, 1.0),
]


@pytest.mark.parametrize(("section", "kind", "scale"), CHOICES)
def test_the_configuration_chooses_the_scale(section, kind, scale):
    config = load_config({"train_batch_size": 1, **section}, world_size=1)
    chosen = build_loss_scale(config.precision, config.fp16, config.amp)
    assert type(chosen) is kind
    assert chosen.scale == scale


def test_a_record_alone_gives_the_default_scale():
    assert build_loss_scale(Precision(params="fp16", compute="fp16")).scale == 65536.0
    assert build_loss_scale(Precision()).scale == 1.0
