"""An engine does not change the next one: the groups of a pipeline or an mpu end with its engine, and a model beside it
does not take them.
"""

from __future__ import annotations

from functools import partial

import dsx
import pytest
import torch
from dsx.errors import DsxError
from dsx_testkit import run_ranks
from torch import nn

pytest.importorskip("dsx_pipe")

LAYERS = 4


def layers():
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(LAYERS)]


def config(**more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **more,
    }


def pipeline(rank, world):
    """Train a pipeline over all ranks; its data-parallel groups have one rank."""
    from dsx_pipe import PipelineModule

    module = PipelineModule(layers(), num_stages=world, loss_fn=nn.MSELoss())
    engine, *_ = dsx.initialize(model=module, config=config(gradient_accumulation_steps=2))
    batches = iter([(torch.ones(2, 4), torch.zeros(2, 4))] * 2)
    engine.train_batch(data_iter=batches)
    return engine


def plain(rank, world, stage):
    """Weights after a step on a batch of this rank's own."""
    model = nn.Sequential(*layers())
    engine, *_ = dsx.initialize(model=model, config=config(zero_optimization={"stage": stage}))
    assert engine.dp_world_size == world
    loss = engine(torch.full((2, 4), float(rank + 1))).pow(2).mean()
    engine.backward(loss)
    engine.step()
    with dsx.zero.GatheredParameters(list(model.parameters())):
        found = [p.detach().clone() for p in model.parameters()]
    engine.destroy()
    return found


def averaged_step():
    """What `plain` must give on two ranks, by torch alone."""
    model = nn.Sequential(*layers())
    losses = [model(torch.full((2, 4), float(rank + 1))).pow(2).mean() for rank in range(2)]
    (sum(losses) / 2).backward()
    return [p.detach() - 0.1 * p.grad for p in model.parameters()]


def after_a_pipeline(rank, world, stage):
    alone = plain(rank, world, stage)
    engine = pipeline(rank, world)
    engine.destroy()
    for one, other in zip(alone, plain(rank, world, stage), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    engine = pipeline(rank, world)  # and a pipeline again
    assert dsx.comm.parallel_groups.current().size("pipe") == world
    engine.destroy()
    assert dsx.comm.parallel_groups.current().size("pipe") == 1
    return alone


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_plain_model_behind_a_pipeline_is_averaged_over_all_ranks(stage):
    expected = averaged_step()
    for weights in run_ranks(after_a_pipeline, 2, stage, backend="gloo"):
        for one, value in zip(expected, weights, strict=True):
            torch.testing.assert_close(one, value)


def sliced(rank, world):
    """An engine whose ranks hold slices of one model."""
    registry = dsx.comm.GroupRegistry(dsx.comm.ProcessTopology(("data", "model"), (1, world)))
    model = nn.Sequential(*layers())
    engine, *_ = dsx.initialize(model=model, mpu=dsx.comm.Mpu(registry), config=config())
    assert (engine.dp_world_size, engine.mp_world_size) == (1, world)
    return engine


def sharded_alone(rank, world, stage):
    """As `plain`, with dsx_zero and without an engine."""
    model, optimizer = dsx.zero.shard(nn.Sequential(*layers()), partial(torch.optim.SGD, lr=0.1), stage=stage)
    model(torch.full((2, 4), float(rank + 1))).pow(2).mean().backward()
    optimizer.step()
    with dsx.zero.GatheredParameters(list(model.parameters())):
        return [p.detach().clone() for p in model.parameters()]


def beside(rank, world, first):
    living = {"pipeline": pipeline, "slices": sliced}[first](rank, world)
    groups = dsx.comm.parallel_groups.current()
    found = [plain(rank, world, stage) for stage in range(4)]
    found += [sharded_alone(rank, world, stage) for stage in (1, 3)]
    assert dsx.comm.parallel_groups.current() is groups, "user code still hears of the living engine's groups"
    if first == "pipeline":
        living.train_batch(data_iter=iter([(torch.ones(2, 4), torch.zeros(2, 4))] * 2))
    living.destroy()
    return found


@pytest.mark.parametrize("first", ["pipeline", "slices"])
def test_a_plain_model_beside_a_living_engine_is_averaged_over_all_ranks(first):
    expected = averaged_step()
    for found in run_ranks(beside, 2, first, backend="gloo"):
        for weights in found:
            for one, value in zip(expected, weights, strict=True):
                torch.testing.assert_close(one, value)


def given_by_name(rank, world):
    living = pipeline(rank, world)
    dsx.comm.parallel_groups.use(dsx.comm.GroupRegistry(dsx.comm.ProcessTopology(("data", "model"), (1, world))))
    engine, *_ = dsx.initialize(model=nn.Sequential(*layers()), config=config())
    assert (engine.dp_world_size, engine.mp_world_size) == (1, world)
    engine.destroy()
    living.destroy()
    assert dsx.comm.parallel_groups.current().size("model") == world


def test_groups_that_a_script_names_are_taken_beside_a_living_engine_too():
    run_ranks(given_by_name, 2, backend="gloo")


def refused(rank, world):
    with pytest.raises(DsxError, match="No such"):
        from dsx_pipe import PipelineModule

        module = PipelineModule(layers(), num_stages=world, loss_fn=nn.MSELoss())
        dsx.initialize(model=module, config=config(optimizer={"type": "No such"}))
    assert dsx.comm.parallel_groups.current().size("pipe") == 1


def test_a_call_that_fails_puts_the_groups_back():
    run_ranks(refused, 2, backend="gloo")


def two_engines(rank, world):
    first, second = pipeline(rank, world), pipeline(rank, world)
    first.destroy()
    assert dsx.comm.parallel_groups.current().size("pipe") == world  # the second one's
    second.destroy()
    assert dsx.comm.parallel_groups.current().size("pipe") == 1


def test_groups_stay_as_long_as_an_engine_uses_them():
    run_ranks(two_engines, 2, backend="gloo")
