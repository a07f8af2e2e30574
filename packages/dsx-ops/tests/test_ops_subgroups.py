"""CPUAdam's steps by subgroup and their undoing, and rollback_flat of all Adams with full states."""

import copy

import dsx_ops
import pytest
import torch
from torch import nn

CASES = {
    "adamw": {"weight_decay": 0.1},
    "l2": {"weight_decay": 0.1, "adam_w_mode": False},
    "plain": {"bias_correction": False},
    "maximize": {"maximize": True, "weight_decay": 0.01},
}


def grad_of(step, n=1000, dtype=torch.float32):
    return torch.randn(n, generator=torch.Generator().manual_seed(step)).to(dtype)


def copied(state):
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_step_is_undone_to_rounding(case, steps):
    optimizer = dsx_ops.FusedAdam([nn.Parameter(torch.ones(1))], lr=0.01, **CASES[case])
    flat = grad_of(99)
    state = optimizer.new_flat_state(flat)
    for step in range(steps - 1):
        optimizer.step_flat(flat, grad_of(step), state, grad_scale=2.0)
    before, flat_before = copied(state), flat.clone()
    optimizer.step_flat(flat, grad_of(50), state, grad_scale=4.0)
    after, moments = flat.clone(), copied(state)
    assert not torch.allclose(flat, flat_before)
    optimizer.rollback_flat(flat, grad_of(50), state, grad_scale=4.0)
    assert state["step"] == steps - 1
    torch.testing.assert_close(flat, flat_before, rtol=1e-5, atol=1e-6)
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(state[name], before[name], rtol=1e-5, atol=1e-6)
    optimizer.step_flat(flat, grad_of(50), state, grad_scale=4.0)
    torch.testing.assert_close(flat, after, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state["exp_avg_sq"], moments["exp_avg_sq"], rtol=1e-5, atol=1e-7)


def test_split_masters_come_back_to_fp32_rounding():
    optimizer = dsx_ops.FusedAdam([nn.Parameter(torch.ones(1).bfloat16())], lr=0.01, split_master=True)
    flat = grad_of(99, dtype=torch.bfloat16)
    state, before = optimizer.new_flat_state(flat), flat.clone()
    grad = grad_of(1, dtype=torch.bfloat16)
    optimizer.step_flat(flat, grad, state)
    optimizer.rollback_flat(flat, grad, state)
    assert torch.equal(flat, before) or (flat.float() - before.float()).abs().max() < 1e-2
    master = (flat.view(torch.int16).int() << 16) + state["low_bits"].int()
    torch.testing.assert_close(master.view(torch.float32), before.float(), rtol=1e-5, atol=1e-6)


def test_subgroups_keep_their_states_apart_and_survive_a_state_dict():
    """One optimizer for buffers that take turns gives what an optimizer per buffer gives."""
    buffers = [grad_of(7, n) for n in (5, 1000, 33)]
    wanted = [nn.Parameter(b.clone()) for b in buffers]
    oracles = [torch.optim.AdamW([p], lr=0.01, weight_decay=0.1) for p in wanted]
    place = nn.Parameter(torch.ones(1))
    optimizer = dsx_ops.CPUAdam([place], lr=0.01, weight_decay=0.1)
    for step in range(4):
        for number, buffer in enumerate(buffers):
            place.data, place.grad = buffer, None
            place.grad = grad_of(step, buffer.numel())
            optimizer.step_subgroup(number)
            wanted[number].grad = grad_of(step, buffer.numel())
            oracles[number].step()
        if step == 1:
            saved = copy.deepcopy(optimizer.state_dict())
            place = nn.Parameter(torch.ones(1))
            optimizer = dsx_ops.CPUAdam([place], lr=0.01, weight_decay=0.1)
            optimizer.load_state_dict(saved)
    for a, b in zip(buffers, wanted):
        torch.testing.assert_close(a, b.detach(), rtol=2e-6, atol=1e-6)
    assert saved["state"]["subgroup 1"]["step"] == 2  # what was loaded is not what is stepped
    assert optimizer.state[1] is optimizer.state["subgroup 1"] and 1 not in optimizer.state  # as scripts read it


def test_a_subgroup_is_rolled_back():
    place = nn.Parameter(grad_of(3))
    optimizer = dsx_ops.CPUAdam([place], lr=0.01)
    before = place.detach().clone()
    place.grad = grad_of(1)
    assert optimizer.step_subgroup(2, closure=lambda: 7) == 7
    optimizer.rollback_subgroup(2)
    torch.testing.assert_close(place.detach(), before, rtol=1e-5, atol=1e-6)
    with pytest.raises(dsx_ops.errors.HyperparameterError, match="got a state of 0 steps"):
        optimizer.rollback_subgroup(2)
    with pytest.raises(dsx_ops.errors.HyperparameterError, match="got a state of 0 steps"):
        optimizer.rollback_subgroup(0)


def test_what_cannot_be_undone_is_refused_before_anything_is_written():
    flat = torch.ones(300)
    for optimizer, text in (
        (dsx_ops.FusedAdam([nn.Parameter(torch.ones(1))], betas=(0.0, 0.9)), r"betas\[0\] = 0"),
        (dsx_ops.FusedAdam([nn.Parameter(torch.ones(1))], lr=0.5, weight_decay=2.0), r"1 - lr \* weight_decay"),
        (dsx_ops.Adam8bit([nn.Parameter(torch.ones(1))]), "rounded at random or in codes"),
    ):
        state = optimizer.new_flat_state(flat)
        optimizer.step_flat(flat, torch.ones(300), state)
        before = flat.clone()
        with pytest.raises(dsx_ops.errors.HyperparameterError, match=text):
            optimizer.rollback_flat(flat, torch.ones(300), state)
        assert torch.equal(flat, before) and state["step"] == 1


def test_a_subgroup_step_wants_one_gradient():
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = dsx_ops.CPUAdam(params)
    with pytest.raises(dsx_ops.errors.TensorError, match="got 0 parameters with a gradient, expected one"):
        optimizer.step_subgroup(0)
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(dsx_ops.errors.TensorError, match="got 2 parameters"):
        optimizer.step_subgroup(0)
    assert not optimizer.state


def test_rollback_shows_in_the_version():
    place = nn.Parameter(torch.ones(3))
    optimizer = dsx_ops.CPUAdam([place])
    place.grad = torch.ones(3)
    optimizer.step_subgroup(0)
    score = (place * place).sum()
    optimizer.rollback_subgroup(0)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        score.backward()
