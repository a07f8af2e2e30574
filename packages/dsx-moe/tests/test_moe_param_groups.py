"""Expert parameters are told apart from others by the functions that scripts written for DeepSpeed call."""

import pytest
import torch
from dsx_moe import (
    MoE,
    is_moe_param,
    split_params_grads_into_shared_and_expert_params,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)
from dsx_moe.errors import MoEConfigError
from dsx_moe.marks import configure_moe_param_groups, is_moe_param_group
from torch import nn


def model():
    return nn.Sequential(nn.Linear(4, 4), MoE(4, nn.Linear(4, 4), 2))


def test_groups_are_split_by_experts_and_keep_their_settings():
    net = model()
    decay = {"name": "decay", "params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1}
    plain = {"name": "plain", "params": [p for p in net.parameters() if p.dim() == 1], "weight_decay": 0.0}
    before = len(decay["params"])
    groups = split_params_into_different_moe_groups_for_optimizer([decay, plain])
    assert [(g["name"], g["weight_decay"], is_moe_param_group(g), len(g["params"])) for g in groups] == [
        ("decay", 0.1, False, 2), ("plain", 0.0, False, 1), ("ep_size_1", 0.1, True, 2), ("ep_size_1", 0.0, True, 2),
    ]  # fmt: skip
    assert len(decay["params"]) == before
    torch.optim.AdamW(groups)
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in net.parameters()}


def test_large_groups_are_divided():
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"name": "all", "params": list(model().parameters())}, max_group_size=20
    )
    sizes = [[p.numel() for p in g["params"]] for g in groups if is_moe_param_group(g)]
    assert sizes == [[16, 4], [16, 4]]
    tiny = split_params_into_different_moe_groups_for_optimizer(
        {"name": "all", "params": list(model().parameters())}, max_group_size=1
    )
    assert [len(g["params"]) for g in tiny if is_moe_param_group(g)] == [1, 1, 1, 1]


def test_parameters_become_groups_and_groups_stay_as_they_are():
    net = model()
    groups = configure_moe_param_groups(list(net.parameters()))
    assert [g["name"] for g in groups] == ["dense-params", "ep_size_1"]
    assert configure_moe_param_groups(groups) == groups


def test_parameters_and_gradients_are_split():
    net = model()
    shared, expert = split_params_into_shared_and_expert_params(net.parameters())
    assert [is_moe_param(p) for p in expert] == [True] * 4
    assert len(shared) == 3
    net[1].experts[0](torch.randn(2, 4)).sum().backward()
    dense_grads, expert_grads = split_params_grads_into_shared_and_expert_params(net.parameters())
    assert (len(dense_grads), len(expert_grads)) == (0, 2)


def test_experts_in_a_group_without_a_name_are_refused():
    with pytest.raises(MoEConfigError, match="needs a 'name'"):
        split_params_into_different_moe_groups_for_optimizer({"params": list(model().parameters())})
    with pytest.raises(MoEConfigError, match="expected a dict"):
        split_params_into_different_moe_groups_for_optimizer([list(model().parameters())])  # type: ignore[list-item]
