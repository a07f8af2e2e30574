"""Marks of leaf modules: by class, qualified class name, module name and suffix; what is not found is an error only
if that is asked for.
"""

import dsx_zero
import pytest
import torch
from dsx_comm import RankSet
from dsx_testkit import run_ranks
from dsx_zero.plan.units import find_parameters, plan_units
from torch import nn


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


def model():
    return nn.ModuleDict({"first_expert": Expert(), "second": nn.Sequential(Expert(), nn.Linear(4, 4))})


def units(net):
    return {plan.module for plan in plan_units(net, find_parameters(net), stage=3, ranks_of=lambda _: RankSet(size=2))}


QUALIFIED = f"{Expert.__module__}.{Expert.__qualname__}"


@pytest.mark.parametrize("chosen", [[Expert], ["Expert"], [QUALIFIED], "Expert", ["first_expert", "second.0"]])
def test_by_class(chosen):
    net = model()
    before = units(net)
    found = dsx_zero.set_z3_leaf_modules(net, chosen)
    assert found == [net["first_expert"], net["second"][0]] == dsx_zero.get_z3_leaf_modules(net)
    assert {"first_expert", "second.0"} <= units(net) and not any(".parts." in name for name in units(net))
    assert dsx_zero.unset_z3_leaf_modules(net, chosen) == found and units(net) == before


def test_by_name_and_suffix():
    net = model()
    assert dsx_zero.set_z3_leaf_modules_by_name(net, ["second.0"]) == ([net["second"][0]], [])
    assert "second.0" in units(net) and "first_expert" not in units(net)
    assert dsx_zero.set_z3_leaf_modules_by_suffix(net, ["_expert", ".0"], flag=True)[1] == []
    assert {"first_expert", "second.0"} <= units(net)
    found, missing = dsx_zero.set_z3_leaf_modules_by_suffix(
        net, ["_expert", "nowhere"], flag=False, raise_if_not_found=False
    )
    assert found == [net["first_expert"]] and missing == ["nowhere"]
    assert not dsx_zero.z3_leaf_module(net["first_expert"])


def test_what_is_not_found():
    net = model()
    assert dsx_zero.set_z3_leaf_modules(net, [nn.Conv2d], raise_if_not_found=False) == []
    assert dsx_zero.unset_z3_leaf_modules(net, ["Nothing"], raise_if_not_found=False) == []
    assert dsx_zero.set_z3_leaf_modules_by_name(net, ["a", "second"], raise_if_not_found=False) == (
        [net["second"]],
        ["a"],
    )
    dsx_zero.unset_z3_leaf_modules(net, ["Sequential"])
    for call in (dsx_zero.set_z3_leaf_modules_by_name, dsx_zero.set_z3_leaf_modules_by_suffix):
        with pytest.raises(dsx_zero.ZeroModelError, match="'nowhere'"):
            call(net, ["second", "nowhere"])
    assert dsx_zero.get_z3_leaf_modules(net) == []  # nothing was marked


def parameters(rank, world):
    net = model()
    dsx_zero.set_z3_leaf_module(net["second"][0], True)
    early = net["second"][0].parts[0].weight
    assert dsx_zero.z3_leaf_parameter(early) and not dsx_zero.z3_leaf_parameter(net["second"][1].weight)
    for threshold in (0, 10**6):
        net, _ = dsx_zero.shard(
            net, lambda p: torch.optim.SGD(p, lr=0.1), stage=3, config={"stage3_param_persistence_threshold": threshold}
        )
        inside = set(map(id, net["second"][0].parameters()))
        assert [dsx_zero.z3_leaf_parameter(p) for p in net.parameters()] == [id(p) in inside for p in net.parameters()]


def test_parameters_of_leaf_modules():
    run_ranks(parameters, 2)
