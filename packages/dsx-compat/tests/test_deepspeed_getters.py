"""Configured values under the names of DeepSpeed's engine and `DeepSpeedConfig`; the values are those of 0.19.8."""

from __future__ import annotations

import argparse
import re
import types

import dsx_compat
import pytest
import torch
from dsx_testkit import run_ranks

dsx_compat.activate()
import deepspeed  # noqa: E402

CONFIG = {
    "train_batch_size": 6,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}},
    "fp16": {"enabled": True, "initial_scale_power": 5, "loss_scale_window": 3, "hysteresis": 4, "min_loss_scale": 2},
    "gradient_predivide_factor": 2.0,
    "zero_optimization": {
        "stage": 2,
        "allgather_bucket_size": 11,
        "reduce_bucket_size": 12,
        "overlap_comm": False,
        "sub_group_size": 13,
        "ignore_unused_parameters": False,
        "stage3_max_live_parameters": 14,
        "stage3_prefetch_bucket_size": "auto",
        "offload_optimizer": {"device": "cpu", "ratio": 0.5},
    },
    "flops_profiler": {"enabled": False, "profile_step": 9, "top_modules": 3},
    "checkpoint": {"tag_validation": "FAIL"},
    "data_efficiency": {"enabled": False, "seed": 5},
    "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.01},
}

METHODS = {
    "zero_allgather_bucket_size": 11,
    "zero_reduce_bucket_size": 12,
    "zero_overlap_comm": False,
    "zero_sub_group_size": 13,
    "zero_ignore_unused_parameters": False,
    "zero_max_live_parameters": 14,
    "zero_param_persistence_threshold": 100_000,
    "zero_cpu_offload": True,
    "zero_use_cpu_optimizer": True,
    "zero_nvme_offload_optimizer": False,
    "zero_partial_offload": 0.5,
    "zero_offload_param": None,
    "is_first_weights_partition_group": False,
    "gradient_predivide_factor": 2.0,
    "postscale_gradients": True,
    "dynamic_loss_scale_args": {
        "init_scale": 32, "scale_window": 3, "delayed_shift": 4, "consecutive_hysteresis": False, "min_scale": 2,
    },
    "initial_dynamic_scale": 32,
    "fp16_master_weights_and_gradients": False,
    "optimizer_params": {"lr": 0.5, "torch_adam": True},
    "scheduler_params": {"warmup_num_steps": 7},
    "flops_profiler_profile_step": 9,
    "flops_profiler_top_modules": 3,
    "checkpoint_tag_validation_enabled": True,
    "checkpoint_tag_validation_fail": True,
    "memory_breakdown": False,
    "load_universal_checkpoint": False,
    "torch_autocast_enabled": False,
    "torch_autocast_dtype": None,
    "autotp_size": 0,
    "curriculum_learning_enabled": False,
    "super_offload": False,
    "zenflow_config": None,
    "elasticity_enabled": False,
    "is_elastic_model_parallel_supported": None,
    "sparse_gradients_enabled": False,
    "pld_enabled": True,
    "pld_theta": 0.5,
    "pld_gamma": 0.01,
    "pld_params": {"theta": 0.5, "gamma": 0.01},
    "eigenvalue_enabled": False,
    "eigenvalue_max_iter": 100,
    "eigenvalue_layer_num": 0,
    "curriculum_enabled_legacy": False,
    "curriculum_params_legacy": False,
    "amp_enabled": False,
    "mics_shard_size": -1,
}  # fmt: skip


METHODS |= {
    "autotuning_metric_path": None,
    "autotuning_profile_model_info": False,
    "compile_zero_optimization_stage": False,
    "get_wall_clock_timers": {},
}


class Dropping(torch.nn.Linear):
    """A model that takes what progressive layer dropping gives."""

    def forward(self, x, progressive_layer_drop=False, pld_theta=1.0):
        return super().forward(x)


@pytest.fixture(scope="module")
def engine():
    found, *_ = deepspeed.initialize(model=Dropping(2, 2), config=CONFIG)
    yield found
    found.destroy()


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_the_engine_gives_the_configured_value(engine, name):
    assert getattr(engine, name)() == METHODS[name]


def test_every_name_of_the_tables_has_a_value(engine):
    from dsx_compat.getters import CONFIG_ATTRIBUTES, ENGINE_METHODS

    read = deepspeed.DeepSpeedConfig(CONFIG)
    for name in ENGINE_METHODS:
        getattr(engine, name)()
    for name in CONFIG_ATTRIBUTES:
        getattr(read, name)
    assert engine.communication_data_type is torch.float16
    assert engine.data_efficiency_config()["seed"] == 5
    assert engine.is_map_style_dataset([1]) and not engine.is_iterable_style_dataset([1])
    assert engine.get_model_parallel_rank() == engine.get_tensor_parallel_rank() == 0
    with pytest.raises(AttributeError):
        engine.zero_nothing()


def test_a_member_that_dsx_does_not_have_says_what_to_use(engine):
    from dsx_compat.unsupported import UNSUPPORTED_MEMBERS

    for name, advice in UNSUPPORTED_MEMBERS.items():
        assert not hasattr(engine, name)
        with pytest.raises(dsx_compat.errors.MemberNotSupportedError, match=f"engine.{name}") as caught:
            getattr(engine, name)
        assert advice in str(caught.value)
    assert engine.in_features == 2  # other names are still the module's
    with pytest.raises(AttributeError, match="neither the engine nor its module"):
        engine.zero_nothing


@pytest.mark.parametrize("kind", ["DeepSpeedEngine", "PipelineEngine"])
def test_the_class_answers_as_the_engine_does(kind):
    import deepspeed
    from dsx_compat.unsupported import UNSUPPORTED_MEMBERS

    owner = getattr(deepspeed, kind)
    for name, advice in UNSUPPORTED_MEMBERS.items():
        assert not hasattr(owner, name)
        with pytest.raises(dsx_compat.errors.MemberNotSupportedError, match=f"engine.{name}") as caught:
            getattr(owner, name)
        assert advice in str(caught.value)
    with pytest.raises(AttributeError, match="has no attribute 'zero_nothing'"):
        owner.zero_nothing
    assert owner.step and not hasattr(owner, "zero_nothing")


def test_a_member_that_nothing_calls_cannot_be_replaced(engine):
    """As programs do that replace DeepSpeed's own functions: nothing would call theirs."""
    import deepspeed

    for owner in (deepspeed.DeepSpeedEngine, engine):
        with pytest.raises(dsx_compat.errors.MemberNotSupportedError, match="gradient_clipping in the configuration"):
            owner.clip_fp32_gradients = lambda self: None
    engine.note = deepspeed.DeepSpeedEngine.note = 3  # other names are free
    assert engine.note == 3
    del deepspeed.DeepSpeedEngine.note
    with pytest.raises(dsx_compat.errors.MemberNotSupportedError, match="gradient_clipping in the configuration"):
        type("Mine", (deepspeed.DeepSpeedEngine,), {"clip_fp32_gradients": lambda self: None})
    assert issubclass(type("Other", (deepspeed.DeepSpeedEngine,), {"mine": 1}), deepspeed.DeepSpeedEngine)


def test_members_that_the_advice_names_exist(engine):
    from dsx_compat.unsupported import UNSUPPORTED, UNSUPPORTED_MEMBERS

    text = " ".join([*UNSUPPORTED_MEMBERS.values(), *UNSUPPORTED["deepspeed.checkpoint"].values()])
    named = set(re.findall(r"engine\.(\w+)", text))
    assert named >= {"allreduce_gradients", "compile", "load_checkpoint"}
    assert all(hasattr(engine, name) for name in named)


def test_the_throughput_and_the_times_of_a_step_are_readable():
    settings = {"train_micro_batch_size_per_gpu": 2, "wall_clock_breakdown": True, "steps_per_print": 100}
    net = torch.nn.Linear(2, 2)
    found, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=settings)
    timer = found.tput_timer
    assert (timer.batch_size, timer.global_step_count, timer.avg_samples_per_sec()) == (2, 0, float("-inf"))
    for _ in range(4):
        found.backward(found(torch.ones(2, 2)).sum())
        found.step()
    assert timer.global_step_count == 4 and 0 < timer.avg_samples_per_sec() < float("inf")
    assert {"forward", "backward", "step"} <= set(found.get_wall_clock_timers())
    assert found.collect_python_gc() >= 0
    assert not hasattr(timer, "start")
    with pytest.raises(AttributeError, match="the engine measures each step"):
        timer.stop(global_step=True)
    found.destroy()


def _gather(rank, world):
    found, *_ = deepspeed.initialize(model=Dropping(2, 2), config={"train_micro_batch_size_per_gpu": 1})
    value = torch.tensor([rank + 1])
    return [
        one.item() for one in found.all_gather_scalar(value, found.data_parallel_group)
    ], found.tput_timer.batch_size


def test_a_scalar_is_gathered_from_all_ranks():
    assert run_ranks(_gather, 2) == [([1, 2], 2)] * 2


def test_a_configuration_knows_all_batch_sizes_and_deepspeed_s_names():
    read = deepspeed.DeepSpeedConfig({"train_batch_size": 64})
    assert isinstance(read, deepspeed.runtime.config.DeepSpeedConfig)
    assert (read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (64, 64, 1)
    assert read.zero_enabled is False and read.zero_optimization_stage == 0 and read.optimizer_name is None
    read = deepspeed.DeepSpeedConfig(CONFIG)
    assert (read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (6, 2, 3)
    assert read.zero_enabled and read.zero_config.stage == 2 and read.float16_config.enabled
    assert (read.optimizer_name, read.scheduler_name) == ("adamw", "WarmupLR")
    assert read.gradient_clipping == 1.0 and read.zero_optimization.stage == 2  # keys under their own names
    read.train_batch_size = 5  # it is an ordinary object
    assert read.train_batch_size == 5
    with pytest.raises(AttributeError, match="nothing"):
        read.nothing

    class Mpu:
        def get_data_parallel_world_size(self):
            return 3

    assert deepspeed.DeepSpeedConfig({"train_batch_size": 6}, mpu=Mpu()).train_micro_batch_size_per_gpu == 2


@pytest.mark.parametrize("place", ["config", "args"])
def test_an_engine_can_be_made_from_a_loaded_configuration(place):
    read = deepspeed.DeepSpeedConfig(CONFIG | {"mine": 1})
    given = {"config": read} if place == "config" else {"args": argparse.Namespace(deepspeed_config=read)}
    engine, *_ = deepspeed.initialize(model=Dropping(2, 2), **given)
    assert engine.config["train_batch_size"] == 6 and engine.zero_sub_group_size() == 13
    engine.destroy()


def test_sections_of_a_loaded_configuration_are_read_before_it_is_loaded():
    from dsx.config import load_config
    from dsx.config.source import read

    loaded = load_config({"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}}, world_size=2)
    assert read(loaded).data == {"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}}


def test_the_section_elasticity_has_deepspeeds_names():
    from deepspeed.elasticity.config import ElasticityConfig, ElasticityConfigError

    section = {"enabled": True, "max_train_batch_size": 48, "micro_batch_sizes": [2, 4], "version": 0.1, "min_time": 5}
    found = ElasticityConfig(section)
    assert (found.enabled, found.max_acceptable_batch_size, found.micro_batches) == (True, 48, [2, 4])
    assert (found.min_gpus, found.max_gpus, found.version, found.min_time) == (1, 10000, 0.1, 5)
    assert found.prefer_larger_batch_size and not found.ignore_non_elastic_batch_info
    with pytest.raises(ElasticityConfigError, match="max_train_batch_size"):
        ElasticityConfig({"enabled": True, "micro_batch_sizes": [2]})


@pytest.mark.parametrize(("devices", "slices", "suits"), [(8, 3, False), (8, 4, True)])
def test_elasticity_over_slices(devices, slices, suits):
    from dsx_compat.getters import ENGINE_METHODS, value_of

    section = {"max_train_batch_size": 48, "micro_batch_sizes": [2, 4], "version": 0.2}
    section |= {"enabled": True, "num_gpus_per_node": devices, "model_parallel_size": slices}
    read = types.SimpleNamespace(elasticity=types.SimpleNamespace(**section))
    assert value_of(read, ENGINE_METHODS["is_elastic_model_parallel_supported"]) is suits
