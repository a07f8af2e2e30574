"""DeepSpeed's questions about the configuration, to engines of `deepspeed.initialize` and of `dsx.initialize`."""

import dsx
import dsx_compat
import pytest
import torch

dsx_compat.activate()
import deepspeed  # noqa: E402
from dsx.deepspeed_names import PLACES  # noqa: E402


def config(**more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        **more,
    }


@pytest.mark.parametrize("library", [dsx, deepspeed])
def test_switches_answer_from_the_configuration(library):
    def build(**more):
        return library.initialize(model=torch.nn.Linear(6, 4), config=config(**more))[0]

    plain = build(steps_per_print=None)
    assert not plain.fp16_enabled() and not plain.bfloat16_enabled() and not plain.dynamic_loss_scale()
    assert not plain.zero_optimization() and plain.scheduler_name() is None and plain.steps_per_print() is None
    assert plain.get_data_types() == (torch.float32, torch.float32)
    scaled = build(
        fp16={"enabled": True, "initial_scale_power": 4},
        zero_optimization={"stage": 2},
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}},
        steps_per_print=7,
        wall_clock_breakdown=True,
    )
    assert scaled.fp16_enabled() and scaled.dynamic_loss_scale() and not scaled.bfloat16_enabled()
    assert scaled.zero_optimization() and scaled.zero_optimization_partition_gradients()
    assert not scaled.zero_optimization_partition_weights()
    assert (scaled.scheduler_name(), scaled.steps_per_print()) == ("WarmupLR", 7) and scaled.wall_clock_breakdown()
    assert scaled.optimizer_name() == scaled.get_type()
    assert build(bf16={"enabled": True}).bfloat16_enabled()
    assert all(callable(getattr(plain, name)) for name in PLACES["dsx.Engine"])


def test_an_attribute_of_the_model_comes_first():
    class Net(torch.nn.Linear):
        def optimizer_name(self):
            return "my own"

    assert dsx.initialize(model=Net(2, 2), config=config())[0].optimizer_name() == "my own"
