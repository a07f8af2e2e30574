"""What cannot be planned is named, and nothing is left behind: no group, no environment, no changed model."""

import json
import os

import pytest
import torch
import torch.distributed as dist
from dsx import DsxConfigError
from dsx.planning import Machine, MachineError, Plan, PlanError, plan, search
from torch import nn

GOOD = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}


def small():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))


def ask(model=small, config=GOOD, world_size=2, machine="A100-80", batch=None, **options):
    batch = torch.zeros(2, 8) if batch is None else batch
    return plan(model, config, world_size=world_size, machine=machine, batch=batch, **options)


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        raise ValueError("this model wants a tree")


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"model": 3}, PlanError, "expected a torch.nn.Module"),
        ({"model": "no/such:thing"}, PlanError, "cannot be imported"),
        ({"model": "nonsense"}, PlanError, "file.py:function"),
        ({"model": "/nowhere/model.py:make"}, PlanError, "there is no file"),
        ({"model": lambda: 5}, PlanError, "returned int"),
        ({"model": Chooses}, PlanError, "wants a tree"),
        ({"config": {**GOOD, "train_batch_size": 7}}, DsxConfigError, "train_batch_size"),
        ({"config": {**GOOD, "zero_optimisation": {}}}, DsxConfigError, "zero_optimization"),
        ({"config": {**GOOD, "fp16": {"enabled": True}, "bf16": {"enabled": True}}}, DsxConfigError, "bf16"),
        ({"world_size": 0}, PlanError, "world_size"),
        ({"world_size": 6, "ranks_per_host": 4}, PlanError, "divisor"),
        ({"machine": "H100-SMX"}, MachineError, "did you mean H100-SXM"),
        ({"machine": "H100-PC"}, MachineError, "did you mean H100-PCIE"),
        ({"machine": "H100-SXM+token-ring"}, MachineError, "network"),
        ({"machine": "/nowhere/machine.json"}, MachineError, "cannot be read"),
        ({"batch": torch.zeros(2, 9)}, PlanError, "cannot be replayed"),
    ],
)
def test_named(given, error, words):
    with pytest.raises(error, match=words):
        ask(**given)
    assert not dist.is_initialized()


def test_a_machine_file_is_judged(tmp_path):
    good = Machine.named("H100-SXM").to_dict()
    for change, words in (
        ({"memory_bandwith": 1.0}, "unknown key memory_bandwith"),
        ({"memory_bytes": -1}, "above 0"),
        ({"device": "tpu"}, "cuda or cpu"),
        ({"constants": {"products": 7.0}}, "products"),
        ({"constants": {"speed": 1.0}}, "speed"),
    ):
        path = tmp_path / "machine.json"
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(MachineError, match=words):
            ask(machine=path)


def test_constants_of_another_machine_are_said(tmp_path):
    path = tmp_path / "machine.json"
    Machine.from_dict({**Machine.named("H100-SXM").to_dict(), "calibrated_on": "64 cores of somebody else"}).save(path)
    assert any("another machine" in note for note in ask(machine=path).notes)
    assert not any("another machine" in note for note in ask().notes)
    assert Machine.load(path).constants == Machine.named("H100-SXM").constants


def test_nothing_is_left_behind():
    variables, model = dict(os.environ), small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    ask(model=model, world_size=64)
    assert not dist.is_initialized() and dict(os.environ) == variables
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not hasattr(dist.Backend, "REHEARSAL")


def test_a_process_group_in_the_way_is_named():
    import dsx_comm

    dsx_comm.init_distributed(verbose=False)
    try:
        with pytest.raises(PlanError, match="process group"):
            ask()
    finally:
        dsx_comm.destroy_process_group()
    ask()


def test_a_plan_is_kept_as_json():
    found = ask()
    again = Plan.from_json(found.to_json())
    assert again == found
    with pytest.raises(PlanError, match="format"):
        Plan.from_json("{}")
    with pytest.raises(PlanError, match="JSON"):
        Plan.from_json("nonsense")


def test_a_search_sorts_and_leaves_out_contradictions():
    found = search(
        small,
        GOOD,
        {"zero_optimization.stage": [0, 1, 2, 3], "zero_optimization.offload_optimizer": [None, {"device": "cpu"}]},
        world_size=4,
        machine="A100-80",
        batch=torch.zeros(2, 8),
    )
    assert len(found) == 7  # stage 0 has nothing to offload
    speeds = [answer.tokens_per_second for answer in found]
    assert all(answer.fits for answer in found) and speeds == sorted(speeds, reverse=True)
    with pytest.raises(PlanError, match="none of the combinations"):
        search(small, GOOD, {"zero_optimization.stage": [7]}, world_size=4, machine="A100-80", batch=torch.zeros(2, 8))
    with pytest.raises(PlanError, match="space"):
        search(small, GOOD, {}, world_size=4)
