"""`ds_shape`, `ds_numel`, `ds_status` and so on: computed for parameters that stage 3 manages, absent elsewhere."""

from __future__ import annotations

import copy

import dsx_compat
import pytest
import torch
from dsx_testkit import run_ranks
from torch.nn.utils import parametrize

dsx_compat.activate()
NAMES = ("ds_id", "ds_numel", "ds_shape", "ds_status", "ds_tensor", "ds_active_sub_modules", "partition_numel")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))
        self.seen = []

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        self.seen.append([(p.ds_status.name, p.ds_id) for p in self.layers[1].parameters()])
        return x


def stage3(rank, world, threshold):
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    torch.manual_seed(0)
    net = Net()
    given = list(net.parameters())
    assert not any(hasattr(p, name) for p in given for name in NAMES)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": threshold},
    }
    engine, *_ = deepspeed.initialize(model=net, config=config)
    kept = threshold > 0
    ids = {}
    for name, p in net.named_parameters():
        assert p.ds_shape == p.shape and p.ds_numel == p.numel() and p.numel() in (36, 6)
        assert (p.ds_status is ZeroParamStatus.AVAILABLE) == kept
        assert p.ds_tensor.numel() == p.partition_numel()
        assert p.partition_numel() == p.numel() if kept else p.partition_numel() <= p.numel()
        assert vars(p).keys().isdisjoint(NAMES) and p.is_external_param is False
        p.ds_active_sub_modules.clear()
        ids[name] = p.ds_id
    assert len(set(ids.values())) == 4
    for p, old in zip(net.parameters(), given):  # what the program held before
        assert old.ds_id == p.ds_id and torch.equal(old.ds_tensor, p.ds_tensor) and old.ds_shape == p.shape
        whole = deepspeed.utils.safe_get_full_fp32_param(old)
        assert torch.equal(whole, deepspeed.utils.safe_get_full_fp32_param(p))
    with deepspeed.zero.GatheredParameters(net.parameters()):
        assert all(p.ds_status is ZeroParamStatus.AVAILABLE for p in net.parameters())
        assert {name: p.ds_id for name, p in net.named_parameters()} == ids
    engine.backward(engine(torch.ones(1, 6)).sum())
    engine.step()
    assert [found for _, found in net.seen[0]] == [ids["layers.1.weight"], ids["layers.1.bias"]]
    return [p.ds_tensor.numel() for p in net.parameters()]


@pytest.mark.parametrize("threshold", [0, 10**6])
def test_parameters_that_stage_3_manages_have_the_attributes(threshold):
    sizes = [sum(found) for found in zip(*run_ranks(stage3, 2, threshold))]
    assert sizes == [36, 6, 36, 6] if threshold == 0 else [72, 12, 72, 12]


def attributes_are_absent(rank, world):
    import deepspeed

    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
    }
    deepspeed.initialize(model=net, config=config)
    return not any(hasattr(p, name) for p in net.parameters() for name in NAMES)


def test_below_stage_3_parameters_do_not_have_the_attributes():
    assert all(run_ranks(attributes_are_absent, 2))


def build_under_init(rank, world):
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path={"bf16": {"enabled": True}}, remote_device="cpu"):
        net = torch.nn.Linear(4, 4)
    assert net.weight.ds_shape == (4, 4) and net.weight.dtype == torch.bfloat16
    assert deepspeed.runtime.zero.utils.is_zero_param(net.weight)
    assert not deepspeed.runtime.zero.utils.is_zero_param(torch.ones(2))
    with deepspeed.zero.Init(enabled=False, remote_device="cpu"):
        plain = torch.nn.Linear(4, 4)
    return not hasattr(plain.weight, "ds_id")


def test_parameters_built_under_init_have_the_attributes():
    assert all(run_ranks(build_under_init, 2))


def assign_shard(rank, world, threshold):
    import deepspeed

    torch.manual_seed(0)
    net = torch.nn.Linear(5, 3)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": threshold},
    }
    engine, *_ = deepspeed.initialize(model=net, config=config)
    part = net.weight.ds_tensor
    assert isinstance(part, torch.Tensor) and type(part + 1) is type(part.clone()) is type(part.data) is torch.Tensor
    whole = torch.arange(15.0).reshape(3, 5)
    sizes = [None] * world
    torch.distributed.all_gather_object(sizes, part.numel())
    start = 0 if threshold else sum(sizes[:rank])
    mine = whole.flatten()[start : start + part.numel()]
    net.weight.ds_tensor.data = mine.clone()
    assert torch.equal(net.weight.ds_tensor, mine) and torch.equal(copy.deepcopy(part), mine)
    with deepspeed.zero.GatheredParameters(net.weight):
        assert torch.equal(net.weight.data, whole)
    for wrong in (torch.zeros(part.numel() + 1), mine.double(), 3):
        with pytest.raises(ValueError, match=r"expected torch\.float32"):
            net.weight.ds_tensor.data = wrong
    net.weight.ds_tensor.data.add_(1)  # in place, as before
    engine.backward(engine(torch.ones(1, 5)).sum())
    engine.step()
    return deepspeed.utils.safe_get_full_fp32_param(net.weight).tolist()


@pytest.mark.parametrize("threshold", [0, 10**6])
def test_values_assigned_to_the_part_of_a_rank_are_the_parameters(threshold):
    expected = (torch.arange(15.0).reshape(3, 5) + 1 - 0.5).tolist()  # every gradient is 1
    assert run_ranks(assign_shard, 2, threshold) == [expected] * 2


def assign_on_disk(rank, world, folder):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0},
        },
    }
    net = torch.nn.Linear(5, 3)
    deepspeed.initialize(model=net, config=config)
    with pytest.raises(ValueError, match="safe_set_local_fp32_param"):
        net.weight.ds_tensor.data = torch.zeros(15)


def test_a_part_on_disk_cannot_be_assigned(tmp_path):
    run_ranks(assign_on_disk, 1, str(tmp_path))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_module_that_is_attached_after_initialize_is_refused_and_the_way_named(stage):
    """DeepSpeed runs it, and neither trains nor saves it."""
    import deepspeed

    net = torch.nn.Sequential(torch.nn.Linear(6, 6))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=net, config=config)
    net.append(torch.nn.Linear(6, 6))
    with pytest.raises(RuntimeError, match=r"'1\.weight' was added.*before dsx_zero\.shard or dsx\.initialize, frozen"):
        engine.backward(engine(torch.ones(1, 6)).sum())
        engine.step()


def attach_after_init(rank, world):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        net = Net()
    net.layers.append(torch.nn.Linear(6, 6))
    net.layers[0].weight.convert_to_zero_parameters(param_list=net.layers[2].parameters())
    with pytest.raises(ValueError, match="got int, expected parameters"):
        net.layers[0].weight.convert_to_zero_parameters([1])
    engine, *_ = deepspeed.initialize(model=net, config=config)
    before = deepspeed.utils.safe_get_full_fp32_param(net.layers[2].weight)
    engine.backward(engine(torch.ones(1, 6)).sum())
    engine.step()
    assert not torch.equal(before, deepspeed.utils.safe_get_full_fp32_param(net.layers[2].weight))
    late = torch.nn.Linear(6, 6)
    with pytest.raises(ValueError, match=r"attach modules before deepspeed\.initialize"):
        net.layers[0].weight.convert_to_zero_parameters(late.parameters())
    return net.layers[2].weight.partition_numel()


def test_a_module_attached_after_init_is_divided_with_the_model():
    assert sum(run_ranks(attach_after_init, 2)) == 36


def test_a_program_may_keep_its_own_value_under_such_a_name():
    import deepspeed  # noqa: F401

    tensor = torch.ones(2)
    tensor.ds_id = 7
    assert tensor.ds_id == 7
    assert not hasattr(torch.ones(2), "ds_id")


def test_compiled_models_work_beside_the_attributes():
    """torch.compile asks `torch.overrides`, which asks every descriptor on `torch.Tensor` for its `__set__`."""

    class Doubled(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    model = torch.nn.Linear(3, 3)
    parametrize.register_parametrization(model, "weight", Doubled())
    x = torch.randn(2, 3)
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), expected)
    parameter = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(AttributeError, match="ds_numel"):
        del parameter.ds_numel
    parameter.ds_numel = 5
    assert parameter.ds_numel == 5
    del parameter.ds_numel
    assert not hasattr(parameter, "ds_numel")
