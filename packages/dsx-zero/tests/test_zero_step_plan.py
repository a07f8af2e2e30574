"""The step as a plan: what is in it, what is refused, and that stepping in parts changes no bits."""

from __future__ import annotations

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from dsx_zero.step.plan import OVERLAP, Action, Kind, StepPlan, SubGroup, cut, make_plan
from torch import nn

MASTERS = [(0, 300), (0, 500), (1, 256), (2, 700), (2, 10)]
UNITS = [0, 1, 2]


def test_a_plan_says_what_happens_when():
    plan = make_plan(MASTERS, UNITS, most=800, moves=True)
    assert (
        str(plan) == "sub-group 0: masters 0-1, 800 elements\n"
        "sub-group 1: masters 2-2, 256 elements\n"
        "sub-group 2: masters 3-4, 710 elements\n"
        "fetch 0, fetch 1, step 0, write 0, store 0, publish unit 0, fetch 2, step 1, write 1, store 1, publish unit 1,"
        " step 2, write 2, store 2, publish unit 2"
    )
    assert str(make_plan(MASTERS, UNITS)).endswith("step 0, write 0, publish unit 0, publish unit 1, publish unit 2")


def test_units_without_masters_of_this_rank_are_published_in_their_place():
    plan = make_plan([(1, 5), (3, 5)], [0, 1, 2, 3, 4], most=5)
    published = [action.target for action in plan.actions if action.kind is Kind.PUBLISH]
    assert published == [0, 1, 2, 3, 4]
    assert plan.actions.index(Action(Kind.PUBLISH, 2)) < plan.actions.index(Action(Kind.STEP, 1))
    nothing = make_plan([], [0, 1])
    assert [str(action) for action in nothing.actions] == ["step 0", "write 0", "publish unit 0", "publish unit 1"]


def test_overlap_cuts_behind_units_only():
    masters = [(0, OVERLAP // 2), (0, OVERLAP), (1, OVERLAP // 2), (2, OVERLAP // 2), (3, 1)]
    plan = make_plan(masters, [0, 1, 2, 3], overlap=True)
    assert [(group.start, group.stop) for group in plan.sub_groups] == [(0, 2), (2, 4), (4, 5)]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a: a.remove(Action(Kind.WRITE, 1)), "store 1, but there was no write 1"),
        (lambda a: a.remove(Action(Kind.PUBLISH, 2)), "unit 2 is never published"),
        (lambda a: a.insert(0, a.pop(a.index(Action(Kind.STEP, 1)))), "step 1, but there was no fetch 1"),
        (lambda a: a.insert(0, a.pop(a.index(Action(Kind.PUBLISH, 2)))),
            "publish unit 2, but sub-group 2 of it is not written"),
        (lambda a: a.append(Action(Kind.STEP, 0)), "step 0, for the second time"),
        (lambda a: a.insert(2, a.pop(a.index(Action(Kind.FETCH, 2)))), "more than 2 sub-groups would be in memory"),
    ],
)  # fmt: skip
def test_a_wrong_plan_is_refused(change, text):
    plan = make_plan(MASTERS, UNITS, most=800, moves=True)
    actions = list(plan.actions)
    change(actions)
    with pytest.raises(ValueError, match=text):
        StepPlan(plan.sub_groups, tuple(actions)).validate([unit for unit, _ in MASTERS])


def test_sub_groups_that_do_not_cover_the_masters_are_refused():
    with pytest.raises(ValueError, match="begins at master 3, expected 2"):
        StepPlan((SubGroup(0, 2, 1), SubGroup(3, 5, 1)), ()).validate([0] * 5)


def test_pieces_cover_a_master_and_begin_at_multiples():
    for numel in (0, 1, 255, 256, 257, 10_000):
        for most in (1, 256, 300, 5000):
            pieces = cut(numel, most)
            assert [a for a, _ in pieces[1:]] == [b for _, b in pieces[:-1]]
            assert (pieces[0][0], pieces[-1][1]) == (0, numel)
            assert all(a % 256 == 0 for a, _ in pieces)


class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))
        self.last = nn.Linear(40, 3)
        self.to(dtype)

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x).float().square().mean()


def fused(parameters):
    import dsx_ops

    return dsx_ops.FusedAdam(parameters, lr=1e-2, weight_decay=0.1)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused": fused,
}


def trained(rank, world, stage, kind, dtype, sub_group_size, steps=4):
    """Whole values, the optimizer's states, and the number of sub-groups."""
    config = {"stage": stage, "stage3_param_persistence_threshold": 100}
    if sub_group_size is not None:
        config["sub_group_size"] = sub_group_size
    model, optimizer = dsx_zero.shard(Net(dtype), OPTIMIZERS[kind], config=config)
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        if step == 2:  # states go out and come back
            optimizer.load_state_dict(optimizer.state_dict())
        model(torch.randn(6, 40, generator=generator).to(dtype)).backward()
        optimizer.step(max_norm=0.5)
        optimizer.zero_grad()
    key = "momentum_buffer" if kind == "sgd" else "exp_avg"
    found = []
    for name, _ in model.named_parameters():
        found.append(dsx_zero.safe_get_full_fp32_param(name, optimizer=optimizer))
        found.append(dsx_zero.safe_get_full_optimizer_state(name, key, optimizer=optimizer))
    with dsx_zero.GatheredParameters(model):
        found += [p.detach().clone() for p in model.parameters()]
    return found, len(optimizer.step_plan.sub_groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", "fused"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_pieces_give_the_same_bits(stage, kind, dtype):
    if kind == "fused":
        pytest.importorskip("dsx_ops")
    at_once = run_ranks(trained, 2, stage, kind, dtype, None)
    in_pieces = run_ranks(trained, 2, stage, kind, dtype, 512)
    for (want, one), (got, several) in zip(at_once, in_pieces, strict=True):
        assert one == 1
        assert several > 4
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def hooked(rank, world):
    """Hooks on the optimizer, and optimizers that are not known to work in parts."""
    calls = []
    config = {"stage": 2, "sub_group_size": 512}
    model, optimizer = dsx_zero.shard(Net(torch.float32), OPTIMIZERS["adamw"], config=config)
    assert len(optimizer.step_plan.sub_groups) > 4
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    for _ in range(2):
        model(torch.ones(2, 40)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert calls == ["step", "step"]
    handle.remove()
    optimizer.release()

    class Counting(torch.optim.SGD):
        """Counts its steps in the group, as some optimizers do."""

        def step(self, closure=None):
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + 1
            return super().step(closure)

    model, optimizer = dsx_zero.shard(Net(torch.float32), lambda p: Counting(p, lr=0.1), config=config)
    assert len(optimizer.step_plan.sub_groups) == 1
    model(torch.ones(2, 40)).backward()
    optimizer.step()
    assert optimizer.param_groups[0]["steps"] == 1


def test_one_call_of_step_where_somebody_counts_them():
    run_ranks(hooked, 2)


def failing(rank, world):
    """An optimizer that raises in the middle leaves no gradients behind, and its groups are as they were."""

    class Breaks(torch.optim.SGD):
        steps_in_parts = True
        left = 2

        def step(self, closure=None):
            self.left -= 1
            if not self.left:
                raise RuntimeError("broken")
            return super().step(closure)

    model, optimizer = dsx_zero.shard(
        Net(torch.float32), lambda p: Breaks(p, lr=0.1), config={"stage": 1, "sub_group_size": 512}
    )
    before = list(optimizer.param_groups[0]["params"])
    model(torch.ones(2, 40)).backward()
    with pytest.raises(RuntimeError, match="broken"):
        optimizer.step()
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], before, strict=True))
    assert all(m.tensor.grad is None for name, _ in model.named_parameters() for m in optimizer.layout.masters_of(name))


def test_an_error_inside_the_optimizer():
    run_ranks(failing, 2)
