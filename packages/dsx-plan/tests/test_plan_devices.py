"""The table of devices: names as CUDA reports them, names as people say them, constants of their own."""

import pytest
from dsx_plan import Machine
from dsx_plan.devices import ALIASES, DEVICES, NETWORKS, Constants
from dsx_plan.machine import device_in_table


@pytest.mark.parametrize(("reported", "entry"), [
    ("NVIDIA H100 80GB HBM3", "H100-SXM"), ("NVIDIA H100 PCIe", "H100-PCIE"), ("NVIDIA H200", "H200-SXM"),
    ("NVIDIA GH200 480GB", "GH200"), ("NVIDIA GB200", "GB200"), ("NVIDIA B200", "B200"), ("NVIDIA L40S", "L40S"),
    ("NVIDIA A100-SXM4-80GB", "A100-80"), ("Tesla V100-SXM2-16GB", "V100-16"), ("AMD Instinct MI300X", "MI300X"),
    ("NVIDIA GeForce RTX 4090", "RTX-4090"), ("NVIDIA A1000", None),
])  # fmt: skip
def test_a_reported_name_is_read_word_by_word(reported, entry):
    assert device_in_table(reported) == entry


def test_every_alias_is_a_device_and_its_plan_says_which():
    assert set(ALIASES.values()) <= set(DEVICES)
    found = Machine.named("h100+ethernet-100")
    assert found.name == "H100-SXM+ethernet-100"
    assert found.network_bandwidth == NETWORKS["ethernet-100"].gbs * 1e9


def test_a_device_brings_the_constants_that_were_fitted_to_it():
    assert Machine.named("H100-SXM").constants == DEVICES["H100-SXM"].constants != Constants()
    assert DEVICES["H100-SXM"].constants_from and not DEVICES["GB300"].constants_from
