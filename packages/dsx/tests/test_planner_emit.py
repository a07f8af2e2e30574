"""`dsx plan --emit`, `--set` and `hf://`: a plan for another system, and advice as words of the command line."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import torch
from dsx.cli import main
from dsx.planning import Change, PlanError, plan
from dsx_plan.emit import SYSTEMS, emit
from dsx_plan.text import describe_plan
from torch import nn

CONFIG = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
}


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, ids):
        return self.outer(self.inner(ids)).float().logsumexp(-1).mean()


def planned(**more):
    return plan(Words, {**CONFIG, **more}, world_size=8, machine="h100", batch=torch.zeros(4, 16, dtype=torch.int64))


def arguments(text):
    pairs = [line.partition("=") for line in text.splitlines()]
    return {name: value for name, _, value in pairs}


def test_deepspeeds_own_parser_reads_it():
    deepspeed = pytest.importorskip("deepspeed.runtime.config")
    found = emit(planned(), "deepspeed")
    config = deepspeed.DeepSpeedConfig(json.loads(found.text))
    assert config.zero_optimization_stage == 3 and config.train_micro_batch_size_per_gpu == 4
    assert config.gradient_accumulation_steps == 2 and config.gradient_clipping == 0.5


def test_accelerates_file(tmp_path):
    import yaml

    host = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    found = emit(planned(zero_optimization=host), "accelerate")
    data = yaml.safe_load(found.text)
    assert data["num_processes"] == 8 and data["num_machines"] == 1 and data["mixed_precision"] == "bf16"
    assert data["deepspeed_config"]["zero_stage"] == 2 and data["deepspeed_config"]["zero3_init_flag"] is False
    assert data["deepspeed_config"]["offload_optimizer_device"] == "cpu"
    accelerate = pytest.importorskip("accelerate.commands.config.config_args")
    path = tmp_path / "accelerate.yaml"
    path.write_text(found.text)
    assert accelerate.load_config_from_file(str(path)).num_processes == 8


def test_torchtitans_arguments():
    found = arguments(emit(planned(), "torchtitan").text)
    assert found["--parallelism.data_parallel_shard_degree"] == "8"
    assert found["--parallelism.fsdp_reshard_after_forward"] == "always"
    assert found["--training.global_batch_size"] == "64" and found["--training.seq_len"] == "16"
    whole = arguments(emit(planned(zero_optimization={"stage": 0}), "torchtitan").text)
    assert whole["--parallelism.data_parallel_replicate_degree"] == "8"
    assert whole["--parallelism.data_parallel_shard_degree"] == "1"


def test_megatrons_arguments():
    found = arguments(emit(planned(zero_optimization={"stage": 1}), "megatron").text)
    assert found["--global-batch-size"] == "64" and found["--micro-batch-size"] == "4" and "--bf16" in found
    assert "--use-distributed-optimizer" in found and "--use-megatron-fsdp" not in found
    assert "--use-megatron-fsdp" in arguments(emit(planned(), "megatron").text)


@pytest.mark.parametrize(("system", "more", "words"), [
    ("torchtitan", {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "optimizer states on"),
    ("torchtitan", {"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "fp16"),
    ("megatron", {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "parameters in host memory"),
    ("nanotron", {}, "expected one of torchtitan"),
])  # fmt: skip
def test_what_a_system_cannot_express_is_refused(system, more, words):
    found = planned(**more)
    with pytest.raises(PlanError, match=words):
        emit(found, system)


@pytest.fixture
def words(tmp_path):
    model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "dsx.json").write_text(json.dumps({**CONFIG, "zero_optimization": {"stage": 0}}))
    return ["plan", f"hf://{tmp_path}", "-c", f"{tmp_path}/dsx.json", "-n", "8", "-m", "h100", "-s", "128"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_command_prints_nothing_else(words, system, capsys):
    assert main([*words, "--emit", system, "--set", "zero_optimization.stage=3"]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("fits: yes") and "memory of a rank" not in said.out
    assert {"deepspeed": '"stage": 3', "accelerate": "zero_stage: 3"}.get(system, "--") in said.out


def test_advice_can_be_pasted_and_planned(words, capsys):
    answer = planned()
    values = {"train_batch_size": None, "train_micro_batch_size_per_gpu": 1, "zero_optimization.stage": 3}
    answer.changes = [Change("less", {**values, "recompute": True}, 1, 1.0)]
    text = describe_plan(answer)
    pasted = re.search(r"in the configuration: (.*)", text)
    assert pasted is not None
    assert json.loads(pasted[1]) == {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    assert "taken away there: train_batch_size" in text
    advice = re.search(r"to plan it: (.*)", text)
    assert advice is not None and main([*words, *shlex.split(advice[1])]) == 0
    assert "ZeRO stage 3, micro-batches of 1 x 1, recomputation" in capsys.readouterr().out


@pytest.mark.parametrize("given", ["zero_optimization.stage", "zero_optimization.stage=three", "=3"])
def test_a_change_that_is_none(words, given, capsys):
    assert main([*words, "--set", given]) == 1
    assert "expected PATH=JSON" in capsys.readouterr().err


def test_a_model_that_is_not_here(words, capsys, monkeypatch):
    def nowhere(name, file):
        raise OSError(f"no way to {name}")

    monkeypatch.setattr(pytest.importorskip("huggingface_hub"), "hf_hub_download", nowhere)
    assert main(["plan", "hf://nobody/nothing-of-this-name", *words[2:]]) == 1
    assert "config.json cannot be had from the Hub" in capsys.readouterr().err
