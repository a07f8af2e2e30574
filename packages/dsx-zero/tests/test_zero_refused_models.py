"""Models that something else distributes already, and sizes that would cut a model into dust."""

from __future__ import annotations

import logging

import dsx_zero
import pytest
import torch
from dsx_testkit import assert_close_named, run_ranks, tiny
from torch import nn


def adamw(params):
    return torch.optim.AdamW(params, lr=0.05)


def wrapped(rank, world, kind):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    make = {
        "DistributedDataParallel": nn.parallel.DistributedDataParallel,
        "FullyShardedDataParallel": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
        "FSDPModule": fully_shard,
        "DataParallel": nn.DataParallel,
    }[kind]
    inside = nn.Module()
    inside.encoder = make(tiny.MLP())
    for stage in (0, 2, 3):
        with pytest.raises(dsx_zero.ZeroModelError, match=f"the model is wrapped by torch's {kind}"):
            dsx_zero.shard(make(tiny.MLP()), adamw, stage=stage)
        with pytest.raises(dsx_zero.ZeroModelError, match=f"'encoder' is wrapped by torch's {kind}"):
            dsx_zero.shard(inside, adamw, stage=stage)


@pytest.mark.parametrize("kind", ["DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel"])
def test_a_wrapped_model_is_refused_by_the_name_of_its_wrapper(kind):
    run_ranks(wrapped, 2, kind)


def tiny_pieces(rank, world, stage, config):
    reference, model = nn.Linear(512, 512), nn.Linear(512, 512)
    model.load_state_dict(reference.state_dict())
    for parameter in (*reference.parameters(), *model.parameters()):
        nn.init.constant_(parameter, 0.01)
    texts, handler = [], logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("dsx_zero").addHandler(handler)
    plain = adamw(reference.parameters())
    model, optimizer = dsx_zero.shard(model, adamw, stage=stage, config=config)
    for step in range(2):
        x = torch.randn(4, 512, generator=torch.Generator().manual_seed(step))
        reference(x).square().mean().backward()
        plain.step()
        plain.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with dsx_zero.GatheredParameters(model.parameters()):
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert_close_named(found, {name: p.detach() for name, p in reference.named_parameters()}, rtol=1e-4, atol=1e-6)
    return [text for text in texts if "pieces" in text], len(optimizer.step_plan.sub_groups)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tiny_pieces_are_made_larger_with_a_warning(stage):
    config = {"sub_group_size": 8, "reduce_bucket_size": 20, "allgather_bucket_size": 10}
    first, second = run_ranks(tiny_pieces, 2, stage, {**config, "offload_optimizer": {"device": "cpu"}})
    assert [text.split(":")[0] for text in first[0]] == [
        f"zero_optimization.{name}" for name in ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size")
    ]
    assert not second[0] and max(first[1], second[1]) <= 1024


def test_small_pieces_are_left_alone_where_there_are_few():
    config = {"sub_group_size": 512, "reduce_bucket_size": 512, "allgather_bucket_size": 512}
    for texts, sub_groups in run_ranks(tiny_pieces, 2, 2, config):
        assert not texts and sub_groups > 200
