"""What stage 3 says about one parameter, hooks that rest, and lists in which a parameter is missing."""

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2, bias=False))


def sharded(stage, threshold=0):
    model, optimizer = dsx_zero.shard(
        net(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        config={"stage": stage, "stage3_param_persistence_threshold": threshold},
    )
    return model, optimizer


def told(rank, world, threshold):
    model, optimizer = sharded(3, threshold)
    whole = dict(net().named_parameters())
    for name, parameter in model.named_parameters():
        found = dsx_zero.partition_of(parameter)
        assert (found.name, found.shape, found.numel) == (name, whole[name].shape, whole[name].numel())
        assert found.gathered == (threshold > 0)
        with dsx_zero.GatheredParameters(parameter):
            inside = dsx_zero.partition_of(model.get_parameter(name))
            assert inside.gathered and inside.key == found.key and inside.name == name
        assert dsx_zero.partition_of(parameter.detach()[0]) is None
    assert dsx_zero.partition_of(torch.ones(2)) is None
    shards = {name: dsx_zero.partition_of(p).local_shard.clone() for name, p in model.named_parameters()}
    optimizer.release()
    return shards


@pytest.mark.parametrize("threshold", [0, 10**6])
def test_what_stage_3_knows_of_a_parameter(threshold):
    ranks = run_ranks(told, 2, threshold)
    for name, value in net().named_parameters():
        pieces = [shards[name] for shards in ranks]
        whole = pieces[0] if threshold else torch.cat(pieces)
        assert torch.equal(whole, value.detach().reshape(-1))


def below(rank, world):
    model, _ = sharded(2)
    return all(dsx_zero.partition_of(parameter) is None for parameter in model.parameters())


def test_below_stage_3_there_is_nothing_to_tell():
    assert all(run_ranks(below, 2))


def paused(rank, world):
    model, _ = sharded(3)
    expected = net()(torch.ones(1, 6))
    with dsx_zero.GatheredParameters([model[0].weight, model[0].bias, model[2].weight, model[2].bias]):  # one is None
        with dsx_zero.gather_hooks_paused(model), torch.no_grad():
            for _ in range(rank + 1):  # ranks call it differently often
                torch.testing.assert_close(model(torch.ones(1, 6)), expected)
    torch.testing.assert_close(model(torch.ones(1, 6)), expected)
    with dsx_zero.gather_hooks_paused(torch.nn.Linear(2, 2)):
        return not dsx_zero.partition_of(model[0].weight).gathered


def test_hooks_rest_while_all_parameters_are_held():
    assert all(run_ranks(paused, 2))


def test_nothing_at_all_is_still_an_error():
    with pytest.raises(TypeError, match="NoneType"):
        dsx_zero.GatheredParameters(None)
