"""Names of DeepSpeed's checkpoint files by rank, and how the states of two ranks are joined."""

from __future__ import annotations

from collections import OrderedDict

import dsx_compat
import pytest
import torch

dsx_compat.activate()
from deepspeed.checkpoint import (  # noqa: E402
    get_layer_ckpt_name_for_rank,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
    merge_state,
)


def test_files_are_named_as_deepspeed_names_them():
    assert get_model_ckpt_name_for_rank("run/step3", "01") == "run/step3/mp_rank_01_model_states.pt"
    assert get_zero_ckpt_name_for_rank("run", 12, 3) == "run/zero_pp_rank_12_mp_rank_03_optim_states.pt"
    assert get_layer_ckpt_name_for_rank("run", "layer_04", 1) == "run/layer_04-model_01_model_states.pt"


def test_the_names_are_those_of_files_that_are_read(tmp_path):
    from deepspeed.utils.zero_to_fp32 import get_model_state_file, get_optim_files

    model, optimizer = get_model_ckpt_name_for_rank(str(tmp_path), "00"), get_zero_ckpt_name_for_rank(tmp_path, 0, 0)
    for name in (model, optimizer):
        open(name, "w").close()
    assert get_model_state_file(tmp_path, 1) == model and get_optim_files(tmp_path) == [optimizer]


def test_states_of_two_ranks_are_joined():
    a = {"w": torch.ones(2, 3), "step": torch.tensor(4), "groups": [{"lr": 0.1, "m": torch.zeros(1)}], "only_a": 1}
    b = {"w": torch.zeros(1, 3), "step": torch.tensor(4), "groups": [{"lr": 0.2, "m": torch.ones(2)}], "only_b": 2}
    found = merge_state(OrderedDict(a), OrderedDict(b))
    assert type(found) is OrderedDict and set(found) == {"w", "step", "groups", "only_a", "only_b"}
    assert torch.equal(found["w"], torch.cat([a["w"], b["w"]])) and found["step"] == 4
    assert found["groups"][0]["lr"] == 0.1 and found["groups"][0]["m"].tolist() == [0, 1, 1]
    assert merge_state((torch.ones(1),), (torch.ones(1),))[0].tolist() == [1, 1]
    assert set(a) == {"w", "step", "groups", "only_a"}  # the given states are not changed


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ({"x": {"y": [1]}}, {"x": {"y": [1, 2]}}, r"x\.y: got 1 and 2 elements"),
        ({"x": 1}, {"x": "1"}, "x: got a int and a str"),
        ([1], (1,), "the state itself: got a list and a tuple"),
    ],
)
def test_states_that_do_not_fit_are_refused_by_place(a, b, text):
    with pytest.raises(ValueError, match=text):
        merge_state(a, b)


def test_launchers_have_the_names_that_the_command_takes():
    from deepspeed.launcher import constants
    from dsx_launch.runners import BUILDERS

    names = {getattr(constants, name) for name in dir(constants) if name.endswith("_LAUNCHER")}
    assert names | {"ssh"} == set(BUILDERS)


def test_a_mark_of_a_sliced_layer_is_seen():
    from deepspeed.runtime.utils import is_model_parallel_parameter

    parameter = torch.nn.Parameter(torch.ones(2))
    assert not is_model_parallel_parameter(parameter)
    parameter.tensor_model_parallel = True
    assert is_model_parallel_parameter(parameter)
    parameter.tensor_model_parallel, parameter.model_parallel = False, True
    assert is_model_parallel_parameter(parameter)


def test_a_record_of_sub_parameters():
    from deepspeed.checkpoint import SubparamShape
    from deepspeed.checkpoint.universal_checkpoint import SubparamShape as same

    found = SubparamShape(patterns=[".*qkv"], shape=((4, 2, 2), 8), partition_dim=0)
    assert same is SubparamShape and found.partition_dim == 0 and found == SubparamShape([".*qkv"], ((4, 2, 2), 8), 0)
