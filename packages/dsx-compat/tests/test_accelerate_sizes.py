"""Accelerate's `ParallelismConfig` through its DeepSpeed plugin, beside FSDP2 on the mesh that it makes.

Accelerate's own FSDP2 plugin needs a GPU; on a CPU torch's `fully_shard` stands for it.
"""

from __future__ import annotations

import os

import pytest
import torch
from dsx_testkit import RankError, run_ranks
from torch import nn
from torch.distributed.tensor import DTensor

pytest.importorskip("accelerate", reason="needs accelerate: python3 tools/dev.py clients")

STEPS = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.blocks(x))


def batches(world):
    made = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, world, 3, 8, generator=made)
    return x, x.sum(-1, keepdim=True).sin()


def accelerator(rank, world, plugin, **sizes):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
    )  # fmt: skip
    from accelerate import Accelerator, InitProcessGroupKwargs, ParallelismConfig

    return Accelerator(
        parallelism_config=ParallelismConfig(**sizes), deepspeed_plugin=plugin,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )  # fmt: skip


def by_dsx(rank, world, stage, sizes):
    from accelerate import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(zero_stage=stage)
    plugin.deepspeed_config["gradient_clipping"] = 0.0
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 3
    plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    made = accelerator(rank, world, plugin, **sizes)
    model = Net()
    engine, optimizer = made.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    losses = trained(made, engine, optimizer, rank, world)
    return losses, engine.optimizer.state_bytes()["params"] / 4


def trained(made, model, optimizer, rank, world):
    losses = []
    for x, y in zip(*batches(world), strict=True):
        loss = (model(x[rank]) - y[rank]).square().mean()
        made.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(made.reduce(loss.detach(), "mean").item())
    return losses


def by_fsdp2(rank, world, sizes):
    from accelerate import ParallelismConfig
    from torch.distributed.fsdp import fully_shard

    config = ParallelismConfig(**sizes)
    model = fully_shard(Net(), mesh=config.build_device_mesh("cpu")[tuple(config.dp_dim_names)])
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for x, y in zip(*batches(world), strict=True):
        loss = (model(x[rank]) - y[rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        every = [None] * world
        torch.distributed.all_gather_object(every, loss.item())
        losses.append(sum(every) / world)
    return losses, sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))


def plain(world):
    model = Net()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for x, y in zip(*batches(world), strict=True):
        loss = (model(x.flatten(0, 1)) - y.flatten(0, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


WHOLE = sum(p.numel() for p in Net().parameters())


@pytest.mark.parametrize(
    ("world", "sizes"),
    [(2, {"dp_shard_size": 2}), (4, {"dp_replicate_size": 2, "dp_shard_size": 2})],
    ids=["shards", "copies-of-shards"],
)
def test_data_parallel_sizes_are_those_of_fsdp2(world, sizes):
    expected, parts = plain(world), []
    for kind, arguments in ((by_dsx, (3, sizes)), (by_fsdp2, (sizes,))):
        for losses, held in run_ranks(kind, world, *arguments):
            assert losses == pytest.approx(expected, rel=1e-5)
            parts.append(held)
    # A rank has its part of the model, whatever padding either adds: half of it, not a quarter.
    assert all(0.4 * WHOLE < held < 0.65 * WHOLE for held in parts), (parts, WHOLE)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_copies_of_shards_at_other_stages(stage):
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 2}
    for losses, _ in run_ranks(by_dsx, 4, stage, sizes):
        assert losses == pytest.approx(plain(4), rel=1e-5)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [({"tp_size": 2}, r"tp_size=2.*mesh_param"), ({"dp_replicate_size": 1, "cp_size": 2}, "cp_size")],
    ids=["tp", "cp"],
)
def test_other_sizes_are_refused_by_name(sizes, text):
    with pytest.raises(RankError, match=text):
        run_ranks(by_dsx, 2, 3, sizes)


def with_sequences(rank, world, sp):
    import transformers as t
    from accelerate import DeepSpeedPlugin

    torch.manual_seed(0)
    model = t.LlamaForCausalLM(
        t.LlamaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                      intermediate_size=32, max_position_embeddings=64)
    )  # fmt: skip
    plugin = DeepSpeedPlugin(zero_stage=3)
    plugin.deepspeed_config["gradient_clipping"] = 0.0
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    made = accelerator(rank, world, plugin, sp_size=sp)
    generator = torch.Generator().manual_seed(4)
    rows = [{"input_ids": (one := torch.randint(0, 40, (16,), generator=generator)), "labels": one} for _ in range(4)]
    loader = torch.utils.data.DataLoader(rows, batch_size=1, shuffle=False)
    engine, optimizer, loader = made.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
    from deepspeed.utils import groups
    from dsx_testkit.sequences import loss_of_shards

    losses, group = [], groups._get_sequence_parallel_group()
    for batch in loader:
        loss = loss_of_shards(engine, batch, group, 40)
        made.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_sequences_are_cut_over_ranks():
    t = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = t.LlamaForCausalLM(
        t.LlamaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                      intermediate_size=32, max_position_embeddings=64)
    )  # fmt: skip
    optimizer, expected = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    generator = torch.Generator().manual_seed(4)
    for _ in range(4):
        tokens = torch.randint(0, 40, (16,), generator=generator)[None]
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for found in run_ranks(with_sequences, 2, 2):
        assert found == pytest.approx(expected, rel=1e-4)
