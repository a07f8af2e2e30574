"""Costs of layers by the cost model, against formulas and against what measuring counts; a pipeline is planned with
them.
"""

from __future__ import annotations

import dsx_pipe
import dsx_pipe.errors
import psutil
import pytest
import torch
from dsx_plan import Machine, MachineError, layer_costs
from torch import nn

IN, OUT = 512, 2048
H100 = Machine.of("H100-SXM")


def layers():
    return [nn.Linear(IN, OUT), nn.GELU(), nn.Linear(OUT, IN)]


def test_seconds_are_those_of_the_machine():
    products = H100.flops["float32"] * H100.constants.products
    memory = H100.memory_bandwidth * H100.constants.memory
    first, middle, last = layer_costs(layers(), torch.zeros(64, IN), machine=H100)
    forward = 2 * IN * OUT / products + 4 * (IN + OUT) / memory
    assert first.forward == pytest.approx(forward, rel=1e-3)
    assert first.input_backward > 0.9 * 2 * IN * OUT / products and last.weight_backward > 0.9 * 2 * IN * OUT / products
    assert middle.forward == pytest.approx(8 * OUT / memory, rel=1e-3) and middle.weight_backward == 0.0
    assert middle.overhead >= 2 * H100.constants.operator_seconds
    slow = layer_costs(layers(), torch.zeros(64, IN), machine="T4")
    assert all(one.forward > 3 * other.forward for one, other in zip(slow, (first, middle, last)))


def test_bytes_are_those_that_measuring_counts_and_the_layers_stay_as_they_are():
    given = layers()
    before = [p.detach().clone() for layer in given for p in layer.parameters()]
    planned = layer_costs(given, torch.zeros(64, IN), machine=H100, state_bytes_per_parameter=12)
    measured = dsx_pipe.measure_layers(given, torch.zeros(64, IN), repeats=1, state_bytes_per_parameter=12)
    for one, other in zip(planned, measured):
        assert (one.activation_bytes, one.parameter_bytes) == (other.activation_bytes, other.parameter_bytes)
    assert all(torch.equal(p, q) for p, q in zip(before, (p for layer in given for p in layer.parameters())))
    assert all(p.grad is None for layer in given for p in layer.parameters())


def test_layers_take_address_space_and_no_memory():
    wide = [dsx_pipe.LayerSpec(nn.Linear, 1 << 15, 1 << 15, bias=False)]  # 4 GiB of parameters
    before = psutil.Process().memory_info().rss
    (cost,) = layer_costs(wide, torch.zeros(2, 1 << 15), machine="H100-SXM")
    assert cost.parameter_bytes == 16 << 30 and cost.forward + cost.overhead > (4 << 30) / H100.memory_bandwidth
    assert psutil.Process().memory_info().rss - before < 1 << 30


def test_a_pipeline_is_planned_with_them():
    costs = layer_costs([layer for _ in range(4) for layer in layers()], torch.zeros(64, IN), machine=H100)
    best = dsx_pipe.plan(costs, 2, 64, memory=1 << 34)
    assert best.seconds > 0 and best.parts[0] == 0 and best.parts[-1] == len(costs)


def test_mistakes_are_named():
    with pytest.raises(MachineError, match="no device"):
        layer_costs(layers(), torch.zeros(4, IN), machine="H1000")
    with pytest.raises(dsx_pipe.errors.PartitionError, match="two samples"):
        layer_costs(layers(), torch.zeros(1, IN), machine=H100)
