"""`emit`: what is written for a system is read by that system's own parser, where it is installed.

Megatron-LM's parser is in no package. Its rules stand below as a transcript of facts (names of arguments, choices), and
megatron-core's own classes check the values: they raise where sizes or options contradict each other.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from dsx.planning import PlanError, plan
from dsx_plan.emit import emit
from torch import nn

BASE = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
}
STAGES = {"stage 0": {"zero_optimization": {"stage": 0}}, "stage 1": {"zero_optimization": {"stage": 1}},
          "stage 2": {"zero_optimization": {"stage": 2}}, "stage 3": {}}  # fmt: skip


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, ids):
        return self.outer(self.inner(ids)).float().logsumexp(-1).mean()


def planned(recompute=False, **more):
    answer = plan(Words, {**BASE, **more}, world_size=8, machine="h100", batch=torch.zeros(4, 16, dtype=torch.int64))
    answer.layout["recompute"] = int(recompute)  # this model has no blocks to recompute; the layout is what is written
    return answer


def with_layout(more=None, **sizes):
    """A plan with other axes than the model has: what is written depends on the layout and the configuration alone."""
    answer = planned(**(more or {}))
    answer.layout.update(sizes)
    return answer


PIPED = {"pipeline": {"stages": 2, "schedule": "interleaved", "chunks": 2}}
SLICED = {"tensor_parallel": {"autotp_size": 2, "sequence_parallel": True}}


def laid_out():
    """A plan whose layout has every axis, over 64 ranks."""
    answer = with_layout(pipe=2, tensor=2, sequence=2, data=8, micro_batch=1, accumulation=8)
    answer.config = {**answer.config, **PIPED, **SLICED}
    return answer


# - DeepSpeed


@pytest.mark.parametrize("name", STAGES)
def test_deepspeed_reads_every_stage(name):
    deepspeed = pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed")
    answer = planned(**STAGES[name])
    config = deepspeed.DeepSpeedConfig(json.loads(emit(answer, "deepspeed").text))
    assert config.zero_optimization_stage == answer.layout["stage"]
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (4, 2)


def test_deepspeed_reads_a_file_without_what_only_dsx_has():
    deepspeed = pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed")
    answer = laid_out()
    answer.config = {**answer.config, "pipeline": {"stages": 2}, "sequence_parallel": {"ring": 2},
                     "zero_optimization": {"stage": 1, "notice_data_writes": True}}  # fmt: skip
    found = emit(answer, "deepspeed")
    data = json.loads(found.text)
    config = deepspeed.DeepSpeedConfig(data)
    assert config.tensor_parallel_config.autotp_size == 2
    assert "pipeline" not in data and "sequence_parallel" not in data
    assert any("zero_optimization.notice_data_writes: it is left out" in note for note in found.notes)


def test_what_is_left_out_for_deepspeed_is_said():
    answer = laid_out()
    answer.config = {**answer.config, "pipeline": {"stages": 2}}
    found = emit(answer, "deepspeed")
    assert "sequence_parallel" not in json.loads(found.text)["tensor_parallel"]
    assert any("tensor_parallel.sequence_parallel: it is left out" in note for note in found.notes)
    assert any("UlyssesSPAttentionHF" in note for note in found.notes)
    with pytest.raises(PlanError, match="schedule = interleaved"):
        emit(laid_out(), "deepspeed")


# - Accelerate


@pytest.mark.parametrize("name", STAGES)
def test_accelerate_reads_every_stage(name, tmp_path):
    accelerate = pytest.importorskip("accelerate.commands.config.config_args", reason="accelerate is not installed")
    path = tmp_path / "accelerate.yaml"
    answer = planned(**STAGES[name])
    path.write_text(emit(answer, "accelerate").text)
    config = accelerate.load_config_from_file(str(path))
    assert config.num_processes == 8 and config.mixed_precision == "bf16"
    assert config.deepspeed_config["zero_stage"] == answer.layout["stage"]
    assert config.deepspeed_config["gradient_clipping"] == 0.5


# - torchtitan


def parsed_by_torchtitan(text):
    manager = pytest.importorskip("torchtitan.config.manager", reason="torchtitan is not installed")
    return manager.ConfigManager().parse_args(["--module=llama3", "--config=llama3_8b", *text.splitlines()])


@pytest.mark.parametrize("recompute", [False, True])
def test_torchtitan_reads_its_arguments(recompute):
    host = {"device": "cpu"}
    more = {"zero_optimization": {"stage": 3, "offload_optimizer": host, "offload_param": host},
            "compile": {"enabled": True}}  # fmt: skip
    config = parsed_by_torchtitan(emit(planned(recompute, **more), "torchtitan").text)
    assert config.parallelism.data_parallel_shard_degree == 8 and config.training.enable_cpu_offload
    assert config.parallelism.fsdp_reshard_after_forward == "always" and config.compile.enable
    assert (config.training.local_batch_size, config.training.global_batch_size) == (4, 64)
    assert config.training.max_norm == 0.5
    assert ("FullAC" in type(config.activation_checkpoint).__qualname__) is recompute


def test_torchtitan_reads_every_axis():
    config = parsed_by_torchtitan(emit(laid_out(), "torchtitan").text).parallelism
    found = (config.pipeline_parallel_degree, config.tensor_parallel_degree, config.context_parallel_degree)
    assert found == (2, 2, 2) and config.enable_sequence_parallel
    assert config.pipeline_parallel_schedule == "Interleaved1F1B" and config.pipeline_parallel_microbatch_size == 1


def test_schedules_have_the_names_that_pytorch_knows():
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    from dsx_plan.emit import _TITANS_SCHEDULES

    for name in _TITANS_SCHEDULES.values():
        assert schedules.get_schedule_class(name)


# - Megatron

MEGATRON = {
    "--tensor-model-parallel-size": int, "--pipeline-model-parallel-size": int, "--context-parallel-size": int,
    "--micro-batch-size": int, "--global-batch-size": int, "--seq-length": int, "--clip-grad": float,
    "--expert-model-parallel-size": int, "--bf16": True, "--fp16": True, "--use-distributed-optimizer": True,
    "--overlap-grad-reduce": True, "--overlap-param-gather": True, "--use-megatron-fsdp": True,
    "--data-parallel-sharding-strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "--optimizer-cpu-offload": True, "--recompute-granularity": ("full", "selective"),
    "--recompute-method": ("uniform", "block"), "--recompute-num-layers": int, "--sequence-parallel": True,
    "--num-virtual-stages-per-pipeline-rank": int,
}  # fmt: skip
"""Arguments of Megatron-LM's `megatron/training/arguments.py` (core 0.16) that are written, with what they take."""


def parsed_by_transcript(text):
    """Reads arguments by the rules above, as `argparse` would: names that are unknown, or values that do not fit, are
    errors."""
    found = {}
    for line in text.splitlines():
        name, sign, value = line.partition("=")
        takes = MEGATRON[name]
        if takes is True:
            assert not sign, name
            found[name] = True
        elif isinstance(takes, tuple):
            assert value in takes, line
            found[name] = value
        else:
            found[name] = takes(value)
    return {name[2:].replace("-", "_"): value for name, value in found.items()}


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("recompute", [False, True])
def test_megatrons_arguments_are_those_of_its_parser(name, recompute):
    found = parsed_by_transcript(emit(planned(recompute, **STAGES[name]), "megatron").text)
    assert found["global_batch_size"] == 64 and found["clip_grad"] == 0.5
    assert ("recompute_granularity" in found) is recompute


def test_megatron_core_accepts_the_values():
    core = pytest.importorskip("megatron.core.transformer.transformer_config", reason="megatron-core is not installed")
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    text = emit(laid_out(), "megatron").text + emit(planned(True), "megatron").text
    found = parsed_by_transcript("\n".join(dict.fromkeys(text.splitlines()[::-1])))
    found.update(parsed_by_transcript(emit(laid_out(), "megatron").text))
    if "num_virtual_stages_per_pipeline_rank" in found:
        found["virtual_pipeline_model_parallel_size"] = found.pop("num_virtual_stages_per_pipeline_rank")
    made = 0
    for cls in (core.TransformerConfig, DistributedDataParallelConfig, OptimizerConfig):
        names = {field.name for field in dataclasses.fields(cls)}
        mine = {key: value for key, value in found.items() if key in names}
        made += len(mine)
        sizes = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "pipeline_dtype": torch.bfloat16}
        cls(**mine, **(sizes if cls is core.TransformerConfig else {}))
    assert made >= 12


def test_a_schedule_that_megatron_lacks_is_refused():
    answer = laid_out()
    answer.config = {**answer.config, "pipeline": {"stages": 2, "schedule": "zb-h1"}}
    with pytest.raises(PlanError, match=r"megatron has no counterpart of pipeline\.schedule = zb-h1"):
        emit(answer, "megatron")
    with pytest.raises(PlanError, match=r"torchtitan has no counterpart of pipeline\.schedule = zb-h1"):
        emit(answer, "torchtitan")
