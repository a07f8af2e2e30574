"""Experts under DeepSpeed's names: parameters, state dicts, gating; the numbers of gating are those of 0.19.8."""

from __future__ import annotations

import copy

import dsx_compat
import dsx_moe
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

dsx_compat.activate()


class Net(nn.Module):
    def __init__(self, kind, ep_size=1, **options):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.moe = kind(
            hidden_size=4, expert=nn.Linear(4, 4), num_experts=2, ep_size=ep_size, k=1, capacity_factor=4.0, **options
        )

    def forward(self, x):
        return self.moe(self.first(x))


def kinds():
    from deepspeed.moe.layer import MoE

    return MoE, dsx_moe.MoE


NAMES = [
    "deepspeed_moe.gate.wg.weight",
    *(f"deepspeed_moe.experts.deepspeed_experts.{i}.{what}" for i in (0, 1) for what in ("weight", "bias")),
]


@pytest.mark.parametrize("residual", [False, True])
def test_names_are_those_of_deepspeed_and_numbers_those_of_the_layer(residual):
    MoE, plain = kinds()
    ours, theirs = Net(MoE, use_residual=residual), Net(plain, use_residual=residual)
    dense = ["mlp.weight", "mlp.bias", "coefficient.weight", "coefficient.bias"] if residual else []
    assert sorted(name for name, _ in ours.moe.named_parameters()) == sorted([*NAMES, *dense])
    assert set(ours.moe.state_dict()) == {*NAMES, *dense}
    x = torch.randn(6, 4)
    for got, expected in zip(ours(x), theirs(x)):
        torch.testing.assert_close(got, expected)
    assert isinstance(ours.moe, MoE) and ours.moe.num_experts == 2 and ours.moe.use_residual is residual
    assert dsx_moe.has_moe_layers(ours) == (True, 2)
    with pytest.raises(AttributeError, match="nothing"):
        ours.moe.nothing
    # a copy trains its own dense expert
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        for p in twin.moe.parameters():
            p.zero_()
    assert twin(x)[0].abs().sum() == 0 and ours(x)[0].abs().sum() > 0
    if residual:  # a module that replaces the dense expert is used
        before, ours.moe.mlp = ours(x)[0], nn.Sequential(ours.moe.mlp, nn.Tanh())
        assert not torch.equal(ours(x)[0], before)


def test_state_dicts_of_both_names_are_loaded():
    MoE, plain = kinds()
    torch.manual_seed(1)
    source = Net(plain)
    with torch.no_grad():
        for p in source.parameters():
            p.normal_()
    target = Net(MoE)
    target.load_state_dict(source.state_dict())
    x = torch.randn(6, 4)
    torch.testing.assert_close(target(x)[0], source(x)[0])
    again = Net(MoE)
    again.load_state_dict(target.state_dict())
    torch.testing.assert_close(again(x)[0], source(x)[0])
    with pytest.raises(RuntimeError, match=r"deepspeed_moe\.gate\.wg\.weight"):
        again.load_state_dict({"first.weight": torch.ones(4, 4)})


def trains_and_saves(rank, world, folder, stage):
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    MoE, _ = kinds()
    net = Net(MoE, ep_size=2)
    selected = [name for name, _ in net.named_parameters() if "deepspeed_moe.experts.deepspeed_experts" in name]
    assert selected == [f"moe.deepspeed_moe.experts.deepspeed_experts.0.{what}" for what in ("weight", "bias")]
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(net.parameters()), "name": "all"})
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(model=net, model_parameters=groups, config=config)
    assert list(net.moe.state_dict())[1].endswith(f"deepspeed_experts.{rank}.weight")  # numbers of the whole model
    for step in range(2):
        out, aux, _ = engine(torch.randn(6, 4, generator=torch.Generator().manual_seed(step)))
        engine.backward(out.square().mean() + 0.01 * aux)
        engine.step()
    engine.save_checkpoint(folder, tag="t")
    return {name: value.tolist() for name, value in engine.module.state_dict().items()} if stage < 3 else {}


def on_one_rank(rank, world, folder):
    import deepspeed

    MoE, _ = kinds()
    net = Net(MoE)
    config = {"train_micro_batch_size_per_gpu": 6, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(model=net, config=config | {"gradient_clipping": 0.0})
    start = {name: value.tolist() for name, value in net.state_dict().items()}
    for step in range(2):
        out, aux, _ = engine(torch.randn(6, 4, generator=torch.Generator().manual_seed(step)))
        engine.backward(out.square().mean() + 0.01 * aux)
        engine.step()
    trained = {name: value.tolist() for name, value in net.state_dict().items()}
    engine.load_checkpoint(folder, tag="t")
    loaded = {name: value.tolist() for name, value in net.state_dict().items()}
    return start, trained, loaded


def test_a_checkpoint_of_two_ranks_loads_on_one(tmp_path):
    saved: dict[str, list] = {}
    for part in run_ranks(trains_and_saves, 2, str(tmp_path), 1):
        saved |= part
    ((start, trained, loaded),) = run_ranks(on_one_rank, 1, str(tmp_path))
    assert set(saved) == set(loaded) and saved == loaded
    for name in trained:
        torch.testing.assert_close(torch.tensor(loaded[name]), torch.tensor(trained[name]), rtol=1e-5, atol=1e-6)
    assert start != trained


def beside_an_mpu(rank, world, stage):
    """Layers that were built before the mpu was known, as in DeepSpeed's programs: each rank has all experts."""
    import types

    import deepspeed
    from deepspeed.utils import groups

    deepspeed.init_distributed()
    MoE, _ = kinds()
    net = Net(MoE)
    alone = [torch.distributed.new_group([r]) for r in range(2)][rank]
    values = {"model_parallel_group": torch.distributed.new_group([0, 1]), "data_parallel_group": alone,
              "model_parallel_world_size": 2, "data_parallel_world_size": 1, "model_parallel_rank": rank,
              "data_parallel_rank": 0}  # fmt: skip
    mpu = types.SimpleNamespace(**{f"get_{name}": (lambda value=value: value) for name, value in values.items()})
    config = {
        "train_batch_size": 6,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(model=net, config=config, mpu=mpu)
    assert groups._get_expert_data_parallel_world_size("ep_size_1") == 1 and net.moe.num_local_experts == 2
    for step in range(2):
        out, aux, _ = engine(torch.randn(6, 4, generator=torch.Generator().manual_seed(step)))
        engine.backward(out.square().mean() + 0.01 * aux)
        engine.step()
    return {name: value.tolist() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("stage", [0, 2])
def test_experts_built_before_an_mpu_is_given(stage):
    (expected,) = run_ranks(trained_alone, 1)
    for found in run_ranks(beside_an_mpu, 2, stage):
        assert set(found) == set(expected)
        for name in found:
            torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(expected[name]), rtol=1e-5, atol=1e-6)


def trained_alone(rank, world):
    MoE, _ = kinds()
    net = Net(MoE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        out, aux, _ = net(torch.randn(6, 4, generator=torch.Generator().manual_seed(step)))
        (out.square().mean() + 0.01 * aux).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.tolist() for name, value in net.state_dict().items()}


LOGITS = torch.tensor(
    [[0.11, 0.2, 0.1, 0.3], [0.3, 0.4, 0.11, 0.1], [0.11, 0.1, 0.6, 0.5], [0.1, 0.11, 0.7, 0.8], [0.9, 0.2, 0.8, 0.1]]
)


def test_top1_in_the_dense_form():
    from deepspeed.moe.sharded_moe import top1gating

    loss, combine, mask, counts = top1gating(LOGITS, 1.0, 1, use_rts=False)
    assert loss.item() == pytest.approx(1.006665, rel=1e-5) and counts.tolist() == [1, 1, 1, 2]
    expected = torch.zeros(5, 4)
    for token, expert, weight in ((0, 3, 0.281648), (1, 1, 0.294645), (2, 2, 0.320103), (3, 3, 0.344471)):
        expected[token, expert] = weight
    expected[4, 0] = 0.350785
    assert combine.shape == (5, 4, 2) and mask.dtype == torch.bool and torch.equal(mask, combine > 0)
    torch.testing.assert_close(combine.sum(2), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_topk_in_the_dense_form(policy):
    from deepspeed.moe.sharded_moe import topkgating

    loss, combine, _, counts = topkgating(LOGITS, 2, 1.0, 1, drop_policy=policy)
    assert loss.item() == pytest.approx(1.015354, rel=1e-5) and counts.tolist() == [2, 2, 3, 3]
    low, high = 0.475021, 0.524979
    expected = [[0, low, 0, high], [low, high, 0, 0], [0, 0, high, low], [0, 0, low, high], [high, 0, low, 0]]
    assert combine.shape == (5, 4, 3)
    torch.testing.assert_close(combine.sum(2), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_without_a_limit_the_capacity_is_the_largest_count():
    from deepspeed.moe.sharded_moe import top1gating, top2gating

    _, combine, mask, counts = top2gating(LOGITS, 1.0, 1, drop_tokens=False, top2_2nd_expert_sampling=False)
    assert combine.shape == (5, 4, int(counts.max())) and mask.sum() == 10
    torch.testing.assert_close(combine.sum((1, 2)), torch.ones(5))
    with pytest.raises(dsx_compat.NotSupportedError, match="routing"):
        top1gating(LOGITS, 1.0, 1, sparse_routes=True)


def test_a_sparse_tensor_keeps_rows():
    from deepspeed.runtime.sparse_tensor import SparseTensor

    table = nn.Embedding(6, 2, sparse=True)
    table(torch.tensor([1, 4, 1])).sum().backward()
    dense = table.weight.grad.to_dense()
    found = SparseTensor(table.weight.grad)
    assert found.indices.tolist() == [1, 4] and found.dense_size == [6, 2] and found.sparse_size() == (6, 12)
    assert torch.equal(found.to_dense(), dense) and torch.equal(found.to_coo_tensor().to_dense(), dense)
    found.add(SparseTensor(table.weight.grad))
    assert torch.equal(found.to_dense(), 2 * dense) and SparseTensor.type() == "deepspeed.SparseTensor"
    for wrong in (torch.ones(2, 2), torch.ones(2, 2).to_sparse()):
        with pytest.raises(ValueError, match="one sparse dimension"):
            SparseTensor(wrong)
    with pytest.raises(ValueError, match="empty"):
        SparseTensor().to_dense()
    smaller = SparseTensor()
    smaller.indices, smaller.values, smaller.dense_size = torch.tensor([0]), torch.ones(1, 2), [3, 2]
    with pytest.raises(ValueError, match=r"got the size \[3, 2\], expected \[6, 2\]"):
        found.add(smaller)
