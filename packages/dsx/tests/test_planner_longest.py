"""Plans of sequences that are cut over ranks: messages are those of the closed form; and the longest sequence that fits
is found, with the settings that reach it.
"""

import dataclasses
import json

import dsx_activations
import pytest
import torch
from dsx.planning import Machine, PlanError, longest, plan
from dsx_plan.command import main
from dsx_plan.lengths import describe_longest
from dsx_plan.reaching import memory_picture
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, KEYS, SIZE = 64, 8, 4, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, (HEADS + 2 * KEYS) * SIZE, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(x).split([HEADS * SIZE, KEYS * SIZE, KEYS * SIZE], -1)
        q, k, v = (t.unflatten(-1, (-1, SIZE)).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def batch(length):
    return torch.zeros(1, length, WIDTH, device="meta")


CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 1},
}


def machine(nbytes):
    return dataclasses.replace(Machine.of("H100-SXM"), memory_bytes=nbytes, communicator_bytes=1)


def test_messages_of_a_plan_are_those_of_the_closed_form():
    length, ranks = 4096, 4
    found = plan(
        Model, {**CONFIG, "sequence_parallel_size": ranks}, world_size=4, machine="H100-SXM", batch=batch(length),
        changes=False,
    )  # fmt: skip
    own = length // ranks * SIZE * 4 * (2 * HEADS + 2 * KEYS)  # queries, keys, values and results of a rank
    calls, sent = found.messages["all_to_all_single"]
    assert calls == 2 * 2 * 2  # blocks, there and back, forward and backward
    assert sent == 2 * 2 * own * (ranks - 1) // ranks
    assert found.layout["sequence"] == 4 and found.layout["data"] == 1 and found.tokens == 1


def test_a_ring_is_planned_too():
    config = {**CONFIG, "sequence_parallel_size": 2, "sequence_parallel": {"team": 1}}
    found = plan(Model, config, world_size=2, machine="H100-SXM", batch=batch(2048), changes=False)
    block = 2048 // 2 * SIZE * 4 * 2 * KEYS
    assert found.messages["batch_isend_irecv"][1] == 2 * block * (1 + 1 + 2)  # forward, backward, gradients home


class Recomputed(Model):
    def forward(self, x):
        for block in self.blocks:
            x = dsx_activations.checkpoint(block, x)
        return x.square().mean()


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_waits_in_host_memory_is_planned_there(ranks):
    """Inputs of recomputed blocks, to the byte; and with chunks queries, keys, values and results of a block."""
    length, config = 1 << 14, {**CONFIG, "sequence_parallel_size": ranks}
    one = length // ranks * WIDTH * 4  # an input of a rank

    def peaks(**more):
        found = plan(
            Recomputed, {**config, **more}, world_size=ranks, machine="H100-SXM", batch=batch(length), changes=False
        )  # fmt: skip
        return found.peak["device"], found.peak.get("host", 0)

    before = dsx_activations.is_configured()  # by another test of this process
    on_host, kept = peaks(activation_checkpointing={"cpu_checkpointing": True}), peaks()  # no plan heeds an earlier one
    assert dsx_activations.is_configured() == before
    assert on_host[1] - kept[1] == 2 * one  # of two blocks
    assert on_host[0] <= kept[0]
    if ranks == 2:  # one process alone has no attention over ranks, so no chunks of it
        chunked = peaks(sequence_parallel={"host_chunks": 8})
        assert chunked[1] - kept[1] >= length // ranks * SIZE * 4 * (2 * HEADS + 2 * KEYS)  # of one block at least


def test_the_longest_sequence():
    device = machine(24 << 20)
    settings = {"alone": {}, "cut": {"sequence_parallel_size": 2}, "odd": {"sequence_parallel_size": 3}}
    found = longest(Model, CONFIG, world_size=2, machine=device, batch=batch, settings=settings, start=8192)
    alone, cut, odd = found.reaches
    assert found.best is cut and 1.7 * alone.size < cut.size < 2.3 * alone.size
    assert "expected a multiple of 3" in odd.reason and odd.plan is None
    assert cut.plan.fits
    longer = {**CONFIG, "sequence_parallel_size": 2}, batch(int(cut.size * 1.06) // 4 * 4)
    assert not plan(Model, longer[0], world_size=2, machine=device, batch=longer[1], changes=False).fits
    text, picture = describe_longest(found), memory_picture(found)
    assert f"longest sequence: {cut.size:,} tokens" in text and "--set sequence_parallel_size=2" in text
    assert picture.startswith("<svg") and picture.count("<polyline") == 2


def test_mistakes_are_named():
    with pytest.raises(PlanError, match="no setting can hold a sequence of 1048576 tokens"):
        longest(
            Model, CONFIG, world_size=1, machine=machine(1 << 20), batch=batch, settings={"a": {}}, start=1 << 20
        )  # fmt: skip
    with pytest.raises(PlanError, match="start: got 0"):
        longest(Model, CONFIG, world_size=1, machine="H100-SXM", batch=batch, start=0)
    with pytest.raises(PlanError, match="got 13 tokens for 2 ranks, expected a multiple of 4"):
        plan(Model, {**CONFIG, "sequence_parallel_size": 2}, world_size=2, machine="H100-SXM", batch=batch(13))


PROGRAM = """
import sys; sys.path.insert(0, {folder!r})
from test_planner_longest import Model, batch
"""


def test_the_command(tmp_path, capsys):
    (tmp_path / "m.py").write_text(PROGRAM.format(folder=__file__.rpartition("/")[0]))
    host = {"device": "cpu"}
    zero = {"stage": 3, "offload_optimizer": host, "offload_param": host}
    (tmp_path / "c.json").write_text(json.dumps({**CONFIG, "zero_optimization": zero}))
    machine(16 << 20).save(tmp_path / "machine.json")
    program, picture = f"{tmp_path}/m.py", tmp_path / "memory.svg"
    words = [f"{program}:Model", "-c", f"{tmp_path}/c.json", "-n", "2", "-m", f"{tmp_path}/machine.json"]
    assert main([*words, "--longest", "--batch", f"{program}:batch", "--picture", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "longest sequence: " in said and "each sequence over 2 ranks" in said
    assert "recomputation: Model has no gradient_checkpointing_enable" in said
    assert picture.read_text().startswith("<svg")
    assert main([*words, "--longest", "--search"]) == 1
    assert "--longest: got --search beside it" in capsys.readouterr().err
