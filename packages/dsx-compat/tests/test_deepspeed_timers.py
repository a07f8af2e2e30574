"""Timers and autocast, as programs that time and compute parts of a step themselves use them (ArcticTraining)."""

from __future__ import annotations

import logging

import dsx_compat
import pytest
import torch

dsx_compat.activate()


def test_a_timer_adds_up_waits_for_the_device_and_refuses_a_second_start(monkeypatch):
    from deepspeed.utils.timer import SynchronizedWallClockTimer
    from dsx_compat import timer as module

    now = iter(range(100))
    monkeypatch.setattr(module, "_now", lambda: float(next(now)))
    timers = SynchronizedWallClockTimer()
    one = timers("forward")
    assert timers("forward") is one and timers.has_timer("forward") and not timers.has_timer("step")
    for _ in range(3):
        one.start()
        one.stop()
    assert one.elapsed(reset=False) == one.elapsed() == 3000.0 and one.elapsed() == 0.0 and one.mean() == 1000.0
    one.start()
    with pytest.raises(dsx_compat.CompatError, match=r"'forward'.*runs already"):
        one.start()
    assert one.elapsed() == 1000.0 and one.started_  # goes on
    one.stop(record=False)
    assert timers.get_mean(["forward", "step"], normalizer=2.0) == {"forward": 500.0} and one.mean() == 0.0
    with pytest.raises(dsx_compat.CompatError, match="does not run"):
        SynchronizedWallClockTimer().Timer("alone").stop()


def test_a_timer_logs_on_the_ranks_that_are_asked_for(caplog):
    from deepspeed.utils.timer import SynchronizedWallClockTimer

    timers = SynchronizedWallClockTimer()
    timers("step").start()
    timers("step").stop()
    with caplog.at_level(logging.INFO, logger="dsx.compat"):
        timers.log(["step", "unknown"], ranks=[1])
        assert not caplog.records
        timers.log(["step", "unknown"])
    assert "step: 0." in caplog.text and "unknown" not in caplog.text
    with pytest.raises(dsx_compat.CompatError, match="above 0"):
        timers.log(["step"], normalizer=0)


@pytest.mark.parametrize("enabled", [False, True])
def test_a_loss_outside_of_the_engine_computes_as_it_does(enabled):
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "torch_autocast": {"enabled": enabled, "dtype": "bfloat16"}}
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
    with deepspeed.runtime.engine.autocast_if_enabled(engine):
        found = engine.module.weight @ torch.ones(4, 1)
    assert found.dtype == (torch.bfloat16 if enabled else torch.float32)
