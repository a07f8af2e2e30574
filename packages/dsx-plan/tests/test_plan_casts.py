"""On which side of the link casts are cheaper: exact seconds from a machine's rates."""

from __future__ import annotations

import dataclasses

import pytest
from dsx_plan import Machine
from dsx_plan.casts import Crossing, sides

GRADIENTS = Crossing("gradients", 10**9, 2, 4)
TAKEN = dataclasses.replace(GRADIENTS, taken=True)
PARAMETERS = Crossing("parameters", 10**9, 2, 4)


def machine(link, host, device=1e15):
    return dataclasses.replace(
        Machine.named("H100-SXM"), host_link_bandwidth=link, host_bandwidth=host, memory_bandwidth=device
    )


def test_the_seconds_are_those_of_the_bytes():
    found = sides([GRADIENTS, PARAMETERS], machine(1e9, 2e9, 4e9), 2)
    share = machine(1e9, 2e9).constants.memory
    assert found["gradients"] == pytest.approx({"host": 2 + 12, "device": 4 + 8 + 6 / (4 * share)})
    assert found["parameters"] == pytest.approx({"host": 2 + 8, "device": 4 + 4 + 6 / (4 * share)})
    assert sides([TAKEN], machine(1e9, 2e9), 2)["gradients"]["host"] == pytest.approx(2 + 4)
    twice = sides([GRADIENTS, GRADIENTS], machine(1e9, 2e9, 4e9), 2)
    assert twice["gradients"]["host"] == pytest.approx(2 * found["gradients"]["host"])
    assert sides([], machine(1e9, 2e9), 2) == {}


@pytest.mark.parametrize("name", ["A100-80", "H100-SXM", "GH200", "GB200"])
def test_a_kernel_that_takes_16_bits_makes_the_host_cheaper_everywhere(name):
    found = sides([TAKEN], Machine.named(name), Machine.named(name).ranks_per_host)
    assert found["gradients"]["host"] < found["gradients"]["device"]


@pytest.mark.parametrize(
    ("name", "ranks", "side"),
    [("GH200", 1, "device"), ("GB200", 72, "device"), ("H100-PCIE", 1, "host"), ("H100-PCIE", 8, "device")],
)
def test_where_the_host_widens_it_is_cheaper_if_its_memory_is_twice_as_fast_as_the_link(name, ranks, side):
    for seconds in sides([GRADIENTS, PARAMETERS], Machine.named(name), ranks).values():
        assert min(seconds, key=seconds.__getitem__) == side
