"""Copies and pickles of a sharded model are ordinary models, or the error says why there is none."""

import copy
import io
import pickle

import pytest
import torch
from dsx_testkit import assert_close_named, run_ranks, tiny

CONFIGS = {"default": {}, "0": {"stage3_param_persistence_threshold": 0}}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def named(model):
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in model.named_parameters()
    }


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def unpickled(model):
    return pickle.loads(pickle.dumps(model))


WAYS = {"deepcopy": copy.deepcopy, "pickle": unpickled, "torch.save": saved}


def work(rank, world, stage, config, way):
    """A copy trains alone on one rank only; the original goes on as if there were none."""
    import dsx_zero

    def step(net, optimizer, number):
        net.loss(*net.example(2, seed=10 * number + rank)).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = dsx_zero.shard(tiny.TinyGPT(layers=1), sgd, stage=stage, config=CONFIGS[config])
    alone, other = dsx_zero.shard(tiny.TinyGPT(layers=1), sgd, stage=stage, config=CONFIGS[config])
    partitioned = any(isinstance(p, dsx_zero.PartitionedParameter) for p in model.parameters())
    for number in range(3):  # after which the order of collectives is frozen
        step(model, optimizer, number)
        step(alone, other, number)
    if partitioned:
        with pytest.raises(dsx_zero.PartitionedParameterError, match=r"embedding\.weight.*(deepcopy|pickled)"):
            WAYS[way](model)
    with dsx_zero.GatheredParameters(model.parameters()):
        twin = WAYS[way](model)
    before = named(model)
    assert_close_named(named(twin), before)
    assert twin.head.weight is twin.embedding.weight
    assert all(type(p) is torch.nn.Parameter for p in twin.parameters())
    if rank == 0:  # without the others: nothing in the copy communicates
        plain = sgd(twin.parameters())
        for number in range(2):
            step(twin, plain, number)
        assert not torch.equal(twin.norm.weight, before["norm.weight"])
    assert_close_named(named(model), before)
    for number in range(3):
        step(model, optimizer, number)
        step(alone, other, number)
    assert_close_named(named(model), named(alone))


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize(("stage", "config"), [(0, "default"), (2, "default"), (3, "default"), (3, "0")])
def test_a_copy_is_an_ordinary_model(stage, config, way):
    run_ranks(work, 2, stage, config, way)


def test_one_rank():
    for stage in range(4):
        run_ranks(work, 1, stage, "0", "deepcopy")


def shallow(rank, world):
    import dsx_zero

    model, optimizer = dsx_zero.shard(tiny.MLP(), sgd, stage=3, config=CONFIGS["0"])
    twin = copy.copy(model)  # the same modules and parameters
    x, y = model.example(2)
    assert torch.equal(twin.loss(x, y), model.loss(x, y))
    with pytest.raises(dsx_zero.ZeroOptimizerError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    with pytest.raises(dsx_zero.ZeroOptimizerError, match="cannot be copied or pickled"):
        pickle.dumps(optimizer)


def test_shallow_copies_and_optimizers():
    run_ranks(shallow, 2)
