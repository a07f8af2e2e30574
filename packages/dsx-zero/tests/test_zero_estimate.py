"""The estimators are the published formulas, digit for digit."""

from __future__ import annotations

import dsx_zero
import pytest
from dsx_testkit import tiny

P, L = 2_851_000_000, 32_000_000


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_formulas(gpus, nodes, factor):
    total = gpus * nodes
    two = dsx_zero.estimate_zero2_model_states_mem_needs
    assert two(P, gpus, nodes, True, factor) == (int(P * max(4 * total, 16) * factor), 2 * P)
    assert two(P, gpus, nodes, False, factor) == (int(P * 4 * gpus * factor), 2 * P + int(18 * P / total))
    three, largest = dsx_zero.estimate_zero3_model_states_mem_needs, 4 * L
    cases = {
        (False, False, True): (4 * L * gpus * factor, largest + int(18 * P / total)),
        (False, False, False): (4 * P * gpus * factor, largest + int(18 * P / total)),
        (True, False, True): (16 * P / nodes * factor, largest + int(2 * P / total)),
        (True, False, False): (P * max(4 * gpus, 16 / nodes) * factor, largest + int(2 * P / total)),
        (True, True, True): (18 * P / nodes * factor, largest),
        (True, True, False): (P * max(4 * gpus, 18 / nodes) * factor, largest),
    }
    for (offload, offload_params, init), (cpu, gpu) in cases.items():
        got = three(P, L, gpus, nodes, offload, offload_params, init, factor)
        assert got.cpu == pytest.approx(cpu, abs=1) and got.gpu == gpu and got.largest_layer == largest


def test_tables_of_a_model():
    model = tiny.MLP()
    count = sum(p.numel() for p in model.parameters())
    assert f"{count:,} parameters" in dsx_zero.estimate_zero2_model_states_mem_needs_all_live(model)
    table = dsx_zero.estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=2)
    assert "272 in its largest layer" in table and table.count("\n") == 7
