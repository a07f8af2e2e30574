"""A search over axes of ranks, placement and recomputation: the best comes first, and what is left out has a reason."""

import json

import pytest
import torch
from dsx.planning import Machine, Plans, search
from dsx_plan.searching import usual_space
from torch import nn

dsx_pipe = pytest.importorskip("dsx_pipe")

PIPE, TENSOR, MICRO = "pipeline.stages", "tensor_parallel.autotp_size", "train_micro_batch_size_per_gpu"
SCHEDULE, CHUNKS, SEQUENCE = "pipeline.schedule", "pipeline.chunks", "sequence_parallel_size"
STAGE, OPTIMIZER = "zero_optimization.stage", "zero_optimization.offload_optimizer"
HOST = {"device": "cpu"}


class Loss(nn.Module):
    def forward(self, x):
        return x.float().square().mean()


def model():
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(5)), Loss())


CONFIG = {
    "train_batch_size": 16,
    MICRO: 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
}
BATCH = (torch.zeros(4, 256), None)


def look(space, machine="A100-80", *, world=4, batch=BATCH, **options) -> Plans:
    return search(model, CONFIG, space, world_size=world, machine=machine, batch=batch, **options)


def test_what_a_configuration_cannot_express_has_a_reason():
    space = {PIPE: [2, 3, 8], TENSOR: [1, 2], "train_batch_size": [16]}
    found = look(space)
    assert [(p.layout["pipe"], p.layout["tensor"]) for p in found] == [(2, 1)]
    reasons = {(one.values[PIPE], one.values[TENSOR]): one.reason for one in found.skipped}
    assert set(reasons) == {(2, 2), (3, 1), (3, 2), (8, 1), (8, 2)}
    assert "expected a multiple of 3" in reasons[3, 1] and "expected a multiple of 8" in reasons[8, 1]
    assert "preset" in reasons[2, 2]  # there are no rules by which these layers are cut


def folder(path):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
              "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 128,
              "max_position_embeddings": 32, "tie_word_embeddings": False}  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_axes_of_ranks_are_searched(tmp_path):
    pytest.importorskip("transformers")
    space = {PIPE: [1, 2], TENSOR: [1, 2], MICRO: [2]}
    config = {**CONFIG, "bf16": {"enabled": True}}
    found = search(folder(tmp_path), config, space, world_size=4, machine="A100-80")
    layouts = {(p.layout["data"], p.layout["pipe"], p.layout["tensor"]) for p in found}
    assert layouts == {(4, 1, 1), (2, 1, 2), (2, 2, 1), (1, 2, 2)}
    assert len({p.tokens for p in found}) == 1, "the same samples in a step"
    speeds = [p.tokens_per_second for p in found]
    assert speeds == sorted(speeds, reverse=True)
    sliced = {p.layout["tensor"]: p for p in found if p.layout["pipe"] == 1}
    assert sliced[2].parameters < sliced[1].parameters


def test_points_that_cannot_be_better_are_left_out():
    """What saves memory is not tried where there is enough, nor larger micro-batches where smaller ones do not fit."""
    space = {STAGE: [1], MICRO: [1, 2, 4], OPTIMIZER: [None, HOST]}
    one = {"world": 1, "batch": BATCH[0]}
    every, some = look(space, **one), look(space, **one, prune=True)
    assert len(every) == 6 and len(some) == 3 and not every.skipped
    assert {point.reason for point in some.skipped} == {"it fits with less that saves memory, which is faster"}
    assert some[0].config == every[0].config
    room = int(1.05 * min(p.peak_bytes + p.fragmentation_bytes for p in every) / 0.97)
    small = Machine.from_dict({**Machine.named("A100-80").to_dict(), "memory_bytes": room, "communicator_bytes": 1})
    tight = look(space, small, **one, prune=True)
    assert tight[0].fits and tight[0].config["zero_optimization"]["offload_optimizer"] == HOST
    assert any(point.reason == "micro-batches of 1 do not fit already" for point in tight.skipped)
    assert len(tight) + len(tight.skipped) == 6


def test_schedules_chunks_and_sequences_are_searched_at_once(tmp_path):
    pytest.importorskip("transformers")
    space = {PIPE: [1, 2], SCHEDULE: [None, "interleaved", "zb-h1"], CHUNKS: [None, 2], SEQUENCE: [1, 2], MICRO: [2],
             OPTIMIZER: [None, HOST]}  # fmt: skip
    config = {**CONFIG, "bf16": {"enabled": True}}
    found = search(folder(tmp_path), config, space, world_size=4, machine="A100-80", prune=True)
    made = {(p.layout["pipe"], p.config.get("pipeline", {}).get("schedule"), p.layout["sequence"]) for p in found}
    assert made == {(1, None, 1), (1, None, 2), (2, None, 1), (2, "interleaved", 1), (2, "zb-h1", 1)}
    interleaved = next(p for p in found if p.config["pipeline"].get("schedule") == "interleaved")
    assert interleaved.pipeline is not None and len(interleaved.pipeline.ranks[0].stages) == 2
    points = 2 * 3 * 2 * 2 * 2
    assert len(found) + len(found.skipped) == points, "each point has a plan or a reason"
    reasons = {point.reason for point in found.skipped}
    assert "schedules and chunks are of a pipeline, and there is one stage" in reasons
    assert "chunks are stages of a rank in the interleaved schedule" in reasons
    assert "the interleaved schedule needs chunks, at least two" in reasons
    assert any("loss_fn" in reason for reason in reasons), "a model's own loss is that of a rank's tokens"


def test_a_layout_that_is_much_slower_is_planned_once(tmp_path):
    """Between hosts with a slow network slices of layers take most of the time."""
    pytest.importorskip("transformers")
    space = {TENSOR: [1, 4], MICRO: [1, 2, 4]}
    config = {**CONFIG, "bf16": {"enabled": True}}
    look = dict(world_size=4, ranks_per_host=1, machine="A100-80+ethernet-10")
    every = search(folder(tmp_path), config, space, **look)
    some = search(folder(tmp_path), config, space, prune=True, **look)
    assert len(every) == 6 and some[0].config == every[0].config and some[0].layout["tensor"] == 1
    slow = [p for p in some if p.layout["tensor"] == 4]
    assert len(slow) == 1 and slow[0].layout["micro_batch"] == 4, "that of the configuration"
    assert [point.reason for point in some.skipped] == ["its layout is much slower than the best one"] * 2


def test_the_usual_space_has_every_axis():
    config = {**CONFIG, MICRO: 2}
    space = usual_space(config, 8, 4)
    assert space[TENSOR] == [1, 2, 4] and space[PIPE] == [1, 2, 4] and "expert_parallel.autoep_size" not in space
    assert space[SCHEDULE] == [None, "interleaved", "zb-h1"] and space[CHUNKS] == [None, 2, 4]
    assert space[SEQUENCE] == [1, 2, 4]
    assert space[MICRO] == [1, 2, 4, 8, 16] and space["train_batch_size"] == [16]
    spread = usual_space({**config, "expert_parallel": {"enabled": True, "autoep_size": 8}}, 8, 2)
    assert spread[TENSOR] == [1, 2] and spread["expert_parallel.autoep_size"] == [1, 2, 4, 8]
    assert usual_space({**config, PIPE.split(".")[0]: {"stages": 8}}, 8)[PIPE] == [1, 2, 4, 8]


def test_an_error_that_is_none_of_dsx_is_not_swallowed():
    def broken():
        raise KeyError("no such thing")

    with pytest.raises(Exception, match="no such thing"):
        search(broken, CONFIG, {STAGE: [1]}, world_size=4, machine="A100-80", batch=BATCH)
