"""Going on from saved states: errors, intervals, masks and numbers continue; other numbers of ranks get the same
mean.
"""

import copy
import logging

import dsx_comm
import pytest
import torch
from dsx_testkit import run_ranks

SETTINGS = {
    "OneBitAdam": {"freeze_step": 3},
    "ZeroOneAdam": {"var_freeze_step": 4, "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 4},
    "OneBitLamb": {"freeze_step": 3, "weight_decay": 0.1},
}


def make(name, dtype=torch.float32, mask=None):
    torch.manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in ((9, 4), (50,), (3,))]
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 5e-3}]
    if mask is not None:
        groups[0]["exp_avg_mask"] = mask
    return params, getattr(dsx_comm, name)(groups, lr=1e-2, **SETTINGS[name])


def go(params, optimizer, rank, steps):
    for step in steps:
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + 10 * rank + i)).to(
                p.dtype
            )
        optimizer.step()


def resumes(rank, world, name, at, dtype):
    straight, a = make(name, dtype)
    go(straight, a, rank, range(14))
    params, b = make(name, dtype)
    go(params, b, rank, range(at))
    saved = copy.deepcopy(b.state_dict())
    again, c = make(name, dtype)
    for p, q in zip(again, params):
        p.data.copy_(q)
    c.load_state_dict(saved)
    go(again, c, rank, range(at, 14))
    assert c.clock == a.clock
    for p, q in zip(again, straight):
        assert torch.equal(p, q)


@pytest.mark.parametrize(("name", "at"), [("OneBitAdam", 2), ("OneBitAdam", 7), ("ZeroOneAdam", 7), ("OneBitLamb", 10)])
def test_a_loaded_state_dict_goes_on_to_the_bit(name, at):
    run_ranks(resumes, 2, name, at, torch.float32)


def test_states_of_16_bit_parameters_stay_float32():
    run_ranks(resumes, 2, "OneBitAdam", 7, torch.bfloat16)


def masks(rank, world, name):
    mask = torch.ones(9, 4)
    mask[5:] = 0
    params, a = make(name, mask=mask)
    go(params, a, rank, range(5))
    saved = copy.deepcopy(a.state_dict())
    for state in saved["state"].values():
        assert "exp_avg_mask" not in state
        state["exp_avg_mask"] = torch.zeros(state["exp_avg"].shape)  # as an earlier version saved it
    free, without = make(name)
    without.load_state_dict(copy.deepcopy(saved))
    other = 1 - mask
    own, with_own = make(name, mask=other)
    with_own.load_state_dict(saved)
    go(own, with_own, rank, range(5, 6))
    assert not any("exp_avg_mask" in group for group in without.param_groups)
    go(free, without, rank, range(5, 6))
    assert without.state[free[0]]["exp_avg"].all()  # no mask is left
    assert torch.equal(with_own.param_groups[0]["exp_avg_mask"], other)
    assert not with_own.state[own[0]]["exp_avg"][:5].any()  # the script's


@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLamb"])
def test_masks_come_from_the_script_and_never_from_saved_states(name):
    run_ranks(masks, 2, name)


def freezes(rank, world, name, key):
    params, optimizer = make(name)
    found = [getattr(optimizer, key)]
    for step in range(4):
        go(params, optimizer, rank, [step])
        found.append(getattr(optimizer, key))
    assert found == [False, False, False, True, True]  # freeze_step is 3
    _, again = make(name)
    again.load_state_dict(optimizer.state_dict())
    assert getattr(again, key) is True


@pytest.mark.parametrize(("name", "key"), [("OneBitAdam", "adam_freeze_key"), ("OneBitLamb", "lamb_freeze_key")])
def test_the_freeze_key_says_whether_the_variance_is_frozen(name, key):
    run_ranks(freezes, 2, name, key)


def exported(rank, world, name):
    """What ranks would write into a checkpoint: {(parameter, key): whole tensor} after a few compressed steps."""
    params, optimizer = make(name)
    go(params, optimizer, rank, range(8))
    optimizer.synchronize()
    whole = {}
    for i, p in enumerate(params):
        for key, start, values in optimizer.state_ranges(p):
            whole.setdefault((i, key), torch.zeros(p.numel()))[start : start + values.numel()] = values
    everyone = [None] * world
    dsx_comm.all_gather_object(everyone, whole)
    merged = {}
    for one in everyone:
        for key, values in one.items():
            merged[key] = merged[key] + values if key[1].startswith("server") and key in merged else values
    return merged


def imported(rank, world, name, merged):
    params, optimizer = make(name)
    for i, p in enumerate(params):
        keys = [key for number, key in merged if number == i]
        optimizer.load_state_ranges(p, keys, lambda key, a, b: merged[i, key][a:b])
    return {(i, key): v.clone() for i, p in enumerate(params) for key, _, v in optimizer.state_ranges(p)}


@pytest.mark.parametrize("name", SETTINGS)
def test_errors_move_to_another_number_of_ranks_without_changing_their_mean(name):
    merged = run_ranks(exported, 2, name)[0]
    assert any(values.any() for (_, key), values in merged.items() if key.startswith("worker"))
    back = run_ranks(imported, 2, name, merged)
    for rank, found in enumerate(back):
        for i in range(3):
            assert torch.equal(found[i, f"worker_error@{rank}"], merged[i, f"worker_error@{rank}"])
    three = run_ranks(imported, 3, name, merged)
    for i in range(3):
        old = torch.stack([merged[i, f"worker_error@{r}"] for r in range(2)]).mean(0)
        for rank, found in enumerate(three):
            torch.testing.assert_close(found[i, f"worker_error@{rank}"], old)
        server = torch.cat([found[i, "server_error@all"] for found in three])
        assert torch.equal(server, merged[i, "server_error@all"])


def other_ranks(rank, world):
    params, optimizer = make("OneBitAdam")
    go(params, optimizer, rank, range(5))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["error_feedback"][0]["world_size"] = 3
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("dsx_comm").addHandler(handler)
    _, again = make("OneBitAdam")
    again.load_state_dict(saved)
    assert again.error_bytes() and not again._arenas[0].feedback.worker.any()
    return lines


def test_errors_of_another_number_of_ranks_in_a_state_dict_are_dropped_with_a_warning():
    for lines in run_ranks(other_ranks, 2):
        assert len(lines) == 1 and "another number of ranks" in lines[0]


def test_states_of_torch_adam_are_taken_over():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(5))
    adam = torch.optim.Adam([p])
    for _ in range(4):
        p.grad = torch.randn(5)
        adam.step()
    ours = dsx_comm.OneBitAdam([p], freeze_step=4)
    ours.load_state_dict(
        {"state": copy.deepcopy(adam.state_dict())["state"], "param_groups": ours.state_dict()["param_groups"]}
    )
    before = adam.state[p]["exp_avg_sq"].clone()
    p.grad = torch.ones(5)
    ours.step()
    assert ours.clock.step == 5 and ours.clock.variance_steps == 4
    assert torch.equal(ours.state[p]["exp_avg_sq"], before)
