"""A norm on a device that is not finite: the warning comes when the norm has arrived on the host, for which no step
waits.

There is no device here: norms are on "meta", and a list says which of them have arrived.
"""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from dsx_zero.step.nonfinite import NonFiniteWarning


class Device:
    """Brings norms to the host when `arrive` is called."""

    def __init__(self, values):
        self.values, self.sent, self.there = values, 0, 0

    def send(self, norm):
        place, self.sent = self.sent, self.sent + 1
        return lambda: self.values[place] if place < self.there else None


def looks(values, arrivals, caplog, rank=0, everywhere=True):
    """One step per entry of `arrivals`: how many norms have arrived when it looks. The warnings by step."""
    device, run = Device(values), SimpleNamespace(ranks=SimpleNamespace(rank=rank))
    warning, found = NonFiniteWarning(device.send), []
    for there in arrivals:
        device.there = there
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="dsx_zero"):
            warning.steps += 1
            warning.look(run, torch.empty((), device="meta"), everywhere=everywhere)
        found.append([record.getMessage() for record in caplog.records])
    return found, device


def test_the_warning_names_the_step_and_comes_once_per_run_of_steps(caplog):
    values = [1.0, math.inf, math.nan, 2.0, math.nan, 1.0]
    found, _ = looks(values, [0, 0, 1, 2, 3, 4, 6], caplog)
    said = [(step, line) for step, lines in enumerate(found, 1) for line in lines]
    assert [(step, line[: line.index(":")]) for step, line in said] == [(4, "step 2"), (7, "step 5")]
    assert "(inf), as the host has learned in step 4" in said[0][1] and "check_overflow=True" in said[0][1]


def test_nothing_is_waited_for_and_what_is_on_the_way_is_bounded(caplog):
    found, device = looks([math.nan] * 200, [0] * 100 + [16] * 2, caplog)
    assert device.sent == 16 + 2
    assert [len(lines) for lines in found] == [0] * 100 + [1, 0]


@pytest.mark.parametrize(("rank", "everywhere", "speaks"), [(1, True, False), (1, False, True), (0, True, True)])
def test_one_rank_speaks_for_all(rank, everywhere, speaks, caplog):
    found, device = looks([math.nan] * 3, [0, 1, 2], caplog, rank, everywhere)
    assert sum(map(len, found)) == speaks and (device.sent > 0) == speaks


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_cuda_device(caplog):
    import dsx_zero

    model = torch.nn.Linear(4, 4).cuda()
    model, optimizer = dsx_zero.shard(model, lambda p: torch.optim.SGD(p, lr=0.0), stage=1)
    with caplog.at_level(logging.WARNING, logger="dsx_zero"):
        for step in range(4):
            model(torch.full((1, 4), math.inf if step == 1 else 1.0, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
    assert [record.getMessage()[:6] for record in caplog.records] == ["step 2"]
