"""What PyTorch users do with optimizers and schedules, on a sharded model as on a plain one: a row of the README's
table each.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from dsx_testkit import run_ranks
from dsx_testkit.torch_calls import Net, Row, Training, misdocumented, outcomes, unexpected, worse
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

README = Path(__file__).resolve().parents[1] / "README.md"
SHARDED = (1, 2, 3)


def at(text, *stages):
    return dict.fromkeys(stages, text)


def schedule(make, *step_arguments):
    def run(t: Training) -> None:
        made = make(t.optimizer)
        for index in range(4):
            t.train(1, first=index)
            made.step(*step_arguments)

    return run


def resumed(t):
    made = schedules.LambdaLR(t.optimizer, lambda epoch: 0.5**epoch)
    t.train(1)
    made.step()
    again = schedules.LambdaLR(t.optimizer, lambda epoch: 0.5**epoch)
    again.load_state_dict(made.state_dict())
    t.train(1)
    again.step()
    t.train(1)


def sequence(optimizer):
    parts = [schedules.LinearLR(optimizer, 0.1, total_iters=2), schedules.ExponentialLR(optimizer, 0.5)]
    return schedules.SequentialLR(optimizer, parts, milestones=[2])


def settings(t):
    group = t.optimizer.param_groups[0]
    group["lr"], group["weight_decay"], group["mine"] = 0.01, 0.1, 3
    t.train()
    assert t.optimizer.param_groups[0]["mine"] == 3


def members(t):
    (group,) = t.optimizer.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in t.model.parameters()]
    for p in group["params"]:
        p.data.mul_(0.9)
    t.train()
    assert sum(p.numel() for p in group["params"]) == 155


def without_head(parameters):
    *first, _, _ = parameters
    return torch.optim.SGD(first, lr=0.1, momentum=0.9)


def add_group(t):
    t.train()
    t.model.zero_grad()  # plain torch gathers gradients for what no optimizer holds
    t.optimizer.add_param_group({"params": t.model.head.parameters(), "lr": 0.05})
    t.train()


def add_stranger(t):
    t.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def append(t):
    t.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
    t.train()


def state_of_parameter(t):
    t.train()
    state = t.optimizer.state[t.model.head.weight]
    assert state["momentum_buffer"].shape == (3, 8)


def set_state_of_parameter(t):
    t.train()
    t.optimizer.state[t.model.head.weight] = {"momentum_buffer": torch.zeros(3, 8)}
    t.train()


def forget_state(t):
    t.train()
    t.optimizer.state = defaultdict(dict)
    t.train()
    t.optimizer.state.clear()
    t.train()


def load_plain(t):
    t.train()
    other = torch.optim.SGD(Net().parameters(), lr=0.1, momentum=0.9)
    t.optimizer.load_state_dict(other.state_dict())


def hooks(t):
    seen = []
    t.optimizer.register_step_pre_hook(lambda *arguments: seen.append("pre"))
    t.optimizer.register_step_post_hook(lambda *arguments: seen.append("post"))
    t.train()
    assert seen == ["pre", "post"] * 2


def closure(t):
    for index in range(2):

        def evaluate(index=index):
            t.optimizer.zero_grad()
            loss = t.loss(index)
            loss.backward()
            return loss

        outcome = t.optimizer.step(evaluate)
        assert (outcome.loss if t.sharded else outcome).item() > 0


def second_optimizer(t):
    other = torch.optim.SGD(t.model.head.parameters(), lr=0.5)
    t.loss(0).backward()
    t.optimizer.step()
    other.step()
    t.optimizer.zero_grad()
    t.train()


def later_optimizer(make):
    def run(t: Training) -> None:
        other = make(t.model.parameters())
        for index in range(2):
            t.loss(index).backward()
            other.step()
            other.zero_grad()

    return run


def lbfgs(t):
    other = torch.optim.LBFGS(t.model.parameters(), lr=0.1, max_iter=2)

    def evaluate():
        other.zero_grad()
        loss = t.loss(0)
        loss.backward()
        return loss

    other.step(evaluate)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=torch.tensor(0.3), momentum=0.9)


def groups_of_names(parameters):
    first, *rest = parameters
    return torch.optim.AdamW([{"params": [first], "lr": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=0.02)


NO_VALUES = "no rank holds its values"
ROWS = [
    Row("`param_groups`: rates and other settings, new keys", settings),
    Row("`param_groups`: the parameters (membership, counts, loops over them)", members),
    Row("parameter groups and a tensor rate given before sharding", lambda t: t.train(4), optimizer=groups_of_names),
    Row("parameter groups and a tensor rate given before sharding", schedule(lambda o: schedules.StepLR(o, 1, 0.5)),
        optimizer=sgd, variant="tensor"),
    Row("`add_param_group` of parameters of the model", add_group, optimizer=without_head),
    Row("`add_param_group` of other tensors", add_stranger,
        at("is not a parameter of the model that was sharded", 0, *SHARDED)),
    Row("tensors added to a group", append, at("was changed: got 7 tensors", 0, *SHARDED)),
    Row("`optimizer.state[p]`", state_of_parameter, at("safe_get_full_optimizer_state", *SHARDED)),
    Row("`optimizer.state[p] = {...}`", set_state_of_parameter, at("safe_set_full_optimizer_state", *SHARDED)),
    Row("`optimizer.state = defaultdict(dict)`, `optimizer.state.clear()`", forget_state),
    Row("`optimizer.load_state_dict` of a plain optimizer", load_plain),
    Row("`copy.deepcopy(optimizer)`, `pickle`", lambda t: copy.deepcopy(t.optimizer),
        at("cannot be copied or pickled", 0, *SHARDED)),
    Row("`register_step_pre_hook`, `register_step_post_hook`", hooks),
    Row("`register_state_dict_post_hook` and its kin",
        lambda t: t.optimizer.register_state_dict_post_hook(lambda o, d: d),
        at("change the dict that state_dict() returns", 0, *SHARDED)),
    Row("`optimizer.step(closure)`", closure),
    Row("schedules of torch", schedule(lambda o: schedules.StepLR(o, 2, 0.5))),
    Row("schedules of torch", schedule(lambda o: schedules.OneCycleLR(o, 0.5, total_steps=10)), variant="OneCycleLR"),
    Row("schedules of torch", schedule(lambda o: schedules.CosineAnnealingWarmRestarts(o, 3)), variant="warm restarts"),
    Row("schedules of torch", schedule(sequence), variant="SequentialLR"),
    Row("schedules of torch", schedule(lambda o: schedules.ReduceLROnPlateau(o, patience=0), 1.0),
        variant="ReduceLROnPlateau"),
    Row("schedules of torch", schedule(lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=2)), variant="SWALR"),
    Row("schedules of torch", resumed, variant="resumed"),
    Row("a second, plain optimizer over parameters of the model", second_optimizer, at(NO_VALUES, *SHARDED)),
    Row("a plain optimizer made after sharding", later_optimizer(lambda p: torch.optim.Adam(p, lr=0.1)),
        at(NO_VALUES, *SHARDED)),
    Row("a plain optimizer made after sharding", later_optimizer(lambda p: torch.optim.AdamW(p, lr=0.1, fused=True)),
        {**at(NO_VALUES, 1, 2), 3: "is partitioned over the ranks"}, variant="fused"),
    Row("a plain optimizer made after sharding", lbfgs, at(NO_VALUES, *SHARDED), variant="LBFGS"),
    Row("LBFGS and others that need whole tensors, given to `shard`", lambda t: None,
        at("needs the whole gradient", *SHARDED),
        optimizer=lambda parameters: torch.optim.LBFGS(parameters)),
]  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_optimizers_mean_what_they_mean_in_torch(stage):
    assert not (wrong := unexpected(ROWS, stage, run_ranks(outcomes, 2, ROWS, stage))), "\n".join(wrong)


def test_with_masters_of_their_own():
    assert not (wrong := unexpected(ROWS, 2, run_ranks(outcomes, 3, ROWS, 2, torch.bfloat16))), "\n".join(wrong)


def test_one_rank():
    rows = [dataclasses.replace(row, raises={} if row.expected(0) == "same" else row.expected(0)) for row in ROWS]
    rows = [row for row in rows if "whole tensors" not in row.name]  # refused from stage 1 on for any number of ranks
    assert not (wrong := unexpected(rows, 1, run_ranks(outcomes, 1, rows, 1))), "\n".join(wrong)
    assert not (wrong := worse(ROWS, 3, run_ranks(outcomes, 1, ROWS, 3)[0])), "\n".join(wrong)


def test_the_readme_says_what_is_tested():
    assert not (wrong := misdocumented(ROWS, README.read_text(), "Optimizers and schedules")), "\n".join(wrong)
