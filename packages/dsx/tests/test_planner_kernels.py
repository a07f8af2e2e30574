"""Plans of compiled blocks, of products in FP8 and of interleaved stages, as a user asks for them."""

import copy

import dsx_zero.step.edits
import pytest
import torch
from dsx.planning import Machine, PlanError, plan
from dsx_plan.errors import MachineError
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 1},
}


def blocks(count=8, width=1024):
    made = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(count)]
    return nn.Sequential(*made, Mean())


class Mean(nn.Module):
    def forward(self, x):
        return x.float().square().mean()


def planned(config=None, machine="H100-SXM", world_size=8, **more):
    config = copy.deepcopy(CONFIG) | (config or {})
    given = torch.zeros(4, 512, 1024, dtype=torch.bfloat16)
    staged = "pipeline" in config
    batch = (given, None) if staged else given
    return plan(blocks, config, world_size=world_size, machine=machine, batch=batch, changes=False, **more)


def test_compiled_blocks_take_fewer_kernels_and_the_same_products():
    plain, compiled = planned(), planned({"compile": {"enabled": True}})
    assert compiled.parts["operators"] < 0.8 * plain.parts["operators"]
    assert compiled.parts["overhead"] < plain.parts["overhead"]
    assert compiled.parts["products"] == pytest.approx(plain.parts["products"])
    assert compiled.flops == plain.flops
    assert compiled.peak_bytes == plain.peak_bytes
    assert any("fused kernels" in note for note in compiled.notes)


def test_products_in_fp8_are_faster_and_have_the_same_operations():
    compiled = {"compile": {"enabled": True}}
    plain, eight = planned(compiled), planned(compiled, fp8=True)
    assert eight.flops == plain.flops
    assert eight.parts["products"] < 0.85 * plain.parts["products"]


def test_fp8_is_refused_where_the_machine_has_none():
    with pytest.raises(PlanError, match="fp8: A100-80 has no rate for float8"):
        planned(machine="A100-80", fp8=True)


def test_a_section_that_differs_from_a_made_pipeline_is_refused():
    import dsx_pipe

    def made():
        return dsx_pipe.PipelineModule(blocks(), num_stages=2)

    config = copy.deepcopy(CONFIG) | {"pipeline": {"stages": 2, "schedule": "gpipe"}}
    given = (torch.zeros(4, 512, 1024, dtype=torch.bfloat16), None)
    with pytest.raises(Exception, match=r"pipeline.schedule: got 'gpipe'.*was made with '1f1b'"):
        plan(made, config, world_size=2, machine="H100-SXM", batch=given, changes=False)


def test_a_plan_does_not_look_for_data_writes_unless_it_is_told_to(monkeypatch):
    seen = []
    original = dsx_zero.step.edits.MemorySums.__init__
    monkeypatch.setattr(
        dsx_zero.step.edits.MemorySums, "__init__", lambda self, tensor: (seen.append(1), original(self, tensor))[1]
    )
    planned()
    assert not seen
    planned({"zero_optimization": {"stage": 1, "notice_data_writes": True}})
    assert seen


def test_interleaved_stages_of_a_configuration_have_a_smaller_bubble():
    plain = planned({"pipeline": {"stages": 2}})
    interleaved = planned({"pipeline": {"stages": 2, "schedule": "interleaved", "chunks": 2}})
    assert plain.pipeline.schedule == "1f1b"
    assert interleaved.pipeline.schedule == "interleaved-2"
    assert [len(rank.stages) for rank in interleaved.pipeline.ranks] == [2, 2]
    assert interleaved.pipeline.bubble_share < plain.pipeline.bubble_share


class Attention(nn.Module):
    def forward(self, x):
        heads = x.unflatten(-1, (16, 64)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).float().mean()


def test_faster_attention_shortens_attention_alone():
    def made():
        return nn.Sequential(nn.Linear(1024, 1024), Attention())

    given = torch.zeros(4, 4096, 1024, dtype=torch.bfloat16)
    config = copy.deepcopy(CONFIG)
    common = {"world_size": 1, "machine": "H100-SXM", "batch": given, "changes": False}
    plain, faster = (plan(made, config, attention=kernels, **common) for kernels in ("flash2", "flash3"))
    assert faster.parts["attention"] < 0.6 * plain.parts["attention"]
    assert faster.parts["products"] == plain.parts["products"]


def test_faster_attention_is_refused_where_its_speed_is_not_known():
    with pytest.raises(MachineError, match=r"flash3.*A100-80"):
        Machine.named("A100-80").with_attention("flash3")
    with pytest.raises(MachineError, match="expected flash2 or flash3"):
        Machine.named("H100-SXM").with_attention("fast")
