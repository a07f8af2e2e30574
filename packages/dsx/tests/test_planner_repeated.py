"""Blocks that are alike: few are replayed, the numbers are those of the whole model, and what is computed for them
does not grow with their number."""

from __future__ import annotations

import json

import pytest
from dsx.cli import main
from dsx.planning import PlanError, plan
from dsx_plan.fake import FakeCompute

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1_000_000, "stage3_prefetch_bucket_size": 100_000},
}


def folder(path, blocks):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "vocab_size": 512,
              "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
              "num_hidden_layers": blocks, "max_position_embeddings": 64, "tie_word_embeddings": False}  # fmt: skip
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(autouse=True)
def code():
    pytest.importorskip("transformers")


def planned(where, *, alike, world=8, config=CONFIG, **more):
    return plan(where, config, world_size=world, machine="h100", sequence=64, alike=alike, changes=False, **more)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_numbers_are_those_of_the_whole_model(tmp_path, stage):
    config = {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], "stage": stage}}
    where = folder(tmp_path / "model", 40)
    whole, few = (planned(where, alike=alike, config=config) for alike in (False, True))
    assert any("40 blocks by plans of" in note for note in few.notes)
    assert few.parameters == whole.parameters and few.trainable == whole.trainable
    assert few.state_bytes() == pytest.approx(whole.state_bytes(), rel=0.01)
    assert few.flops == pytest.approx(whole.flops, rel=1e-4) and few.tokens == whole.tokens
    assert few.sent_bytes == pytest.approx(whole.sent_bytes, rel=0.01)
    assert few.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)
    assert few.step_seconds == pytest.approx(whole.step_seconds, rel=0.01)
    assert few.mfu == pytest.approx(whole.mfu, rel=0.01)
    assert few.tokens_per_second == pytest.approx(whole.tokens_per_second, rel=0.01)


class Counting:
    """Counts the operators that are replayed."""

    def __init__(self, monkeypatch):
        self.count, inner = 0, FakeCompute.__torch_dispatch__

        def counted(mode, func, types, args=(), kwargs=None):
            self.count += 1
            return inner(mode, func, types, args, kwargs)

        monkeypatch.setattr(FakeCompute, "__torch_dispatch__", counted)


def test_what_is_computed_does_not_grow_with_blocks(tmp_path, monkeypatch):
    counting, found = Counting(monkeypatch), {}
    for world in (64, 10_000):
        for blocks in (1_000, 11_200):  # 9,003 and 100,803 tensors
            counting.count = 0
            answer = planned(folder(tmp_path / f"{blocks}", blocks), alike=True, world=world)
            assert answer.world_size == world and any(f"{blocks} blocks by" in note for note in answer.notes)
            found[world, blocks] = counting.count
    assert found[64, 1_000] == found[64, 11_200] and found[10_000, 1_000] == found[10_000, 11_200]


def test_a_shallow_model_is_planned_whole(tmp_path):
    where = folder(tmp_path / "model", 12)
    whole, few = planned(where, alike=False), planned(where, alike=True)
    assert few.to_json() == whole.to_json()


def test_what_it_cannot_do_is_refused(tmp_path, capsys):
    where = folder(tmp_path / "model", 40)
    with pytest.raises(PlanError, match="a model in stages"):
        planned(where, alike=True, config={**CONFIG, "zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}})
    with pytest.raises(PlanError, match="expected a folder"):
        plan(lambda: None, CONFIG, world_size=8, machine="h100", alike=True)
    (tmp_path / "dsx.json").write_text(json.dumps(CONFIG))
    words = ["plan", str(where), "-c", f"{tmp_path}/dsx.json", "-n", "8", "-m", "h100", "-s", "64", "--alike"]
    assert main(words) == 0
    assert "40 blocks by plans of" in capsys.readouterr().out
    assert main([*words, "--search"]) == 1
