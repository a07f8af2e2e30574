"""Optimizers copied, pickled and filled from other implementations' states."""

import copy
import pickle

import dsx_ops
import pytest
import torch


def parameter(numel=300, dtype=torch.float32):
    return torch.nn.Parameter(torch.linspace(-1, 1, numel).to(dtype))


def step(optimizer, param, count=2, first=0):
    for i in range(first, first + count):
        param.grad = torch.sin(torch.arange(param.numel()) * (i + 1.0)).to(param.dtype)
        optimizer.step()


MAKERS = {
    "FusedAdam": lambda ps: dsx_ops.FusedAdam(ps, set_grad_none=False),
    "CPUAdam": dsx_ops.CPUAdam,
    "Adam8bit": lambda ps: dsx_ops.Adam8bit(ps, seed=5),
    "CPUAdagrad": dsx_ops.CPUAdagrad,
    "FusedLion": dsx_ops.FusedLion,
    "FusedLamb": dsx_ops.FusedLamb,
    "SGD": lambda ps: dsx_ops.SGD(ps, momentum=0.9),
}


@pytest.mark.parametrize("again", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_copy_goes_on_to_the_bit(name, again):
    param = parameter()
    optimizer = MAKERS[name]([param])
    step(optimizer, param)
    other = again(optimizer)
    (twin,) = other.param_groups[0]["params"]
    step(optimizer, param, first=2), step(other, twin, first=2)
    assert torch.equal(param, twin) and not torch.equal(param, parameter())
    optimizer.zero_grad(), other.zero_grad()
    assert (param.grad is None) == (twin.grad is None)
    assert optimizer.state_dict()["state"][0]["step"] == other.state_dict()["state"][0]["step"] == 4


def test_lion_takes_states_that_count_no_steps():
    param, straight = parameter(), parameter()
    whole = dsx_ops.FusedLion([straight])
    step(whole, straight, 4)
    first = dsx_ops.FusedLion([param])
    step(first, param, 2)
    saved = first.state_dict()
    saved["state"] = {i: {"exp_avg": s["exp_avg"]} for i, s in saved["state"].items()}
    second = dsx_ops.FusedLion([param])
    second.load_state_dict(saved)
    step(second, param, 2, first=2)
    assert torch.equal(param, straight)


def test_adam_takes_the_step_from_the_group_and_names_a_missing_one():
    param, straight = parameter(), parameter()
    step(dsx_ops.FusedAdam([straight]), straight, 4)
    first = dsx_ops.FusedAdam([param])
    step(first, param, 2)
    saved = copy.deepcopy(first.state_dict())
    del saved["state"][0]["step"]
    with pytest.raises(dsx_ops.errors.TensorError, match="exp_avg, exp_avg_sq but no step"):
        dsx_ops.FusedAdam([param]).load_state_dict(copy.deepcopy(saved))
    saved["param_groups"][0]["step"] = 2
    second = dsx_ops.FusedAdam([param])
    second.load_state_dict(saved)
    step(second, param, 2, first=2)
    assert torch.equal(param, straight)


def test_states_of_another_rule_are_refused():
    param = parameter()
    theirs = torch.optim.AdamW([param], amsgrad=True)
    step(theirs, param, 1)
    ours = dsx_ops.FusedAdam([param], lr=0.5)
    with pytest.raises(dsx_ops.errors.HyperparameterError, match="amsgrad"):
        ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.5 and not ours.state


def test_a_refused_step_leaves_no_states():
    param = parameter()
    optimizer = dsx_ops.CPUAdagrad([param])
    optimizer.param_groups[0]["lr_decay"] = 0.1  # as torch's groups may have
    param.grad = torch.ones(300)
    with pytest.raises(dsx_ops.errors.HyperparameterError, match="lr_decay"):
        optimizer.step()
    assert not optimizer.state
