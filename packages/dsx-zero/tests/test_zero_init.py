"""Building a model under ``Init``: the same values, partitioned as it grows, and moved into units by ``shard``."""

import pytest
import torch
from dsx_testkit import MemoryStore, assert_close_named, run_ranks, tiny
from torch import nn

EXACT = {"stage3_param_persistence_threshold": 0}


class Net(nn.Module):
    """Ties, a direct parameter, a re-initialisation after construction, an empty parameter."""

    def __init__(self, width=6, vocab=10):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.rand(width))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.apply(self._reset)

    @staticmethod
    def _reset(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.2)
            if module.bias is not None:
                module.bias.data.zero_()

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale + self.empty.sum()
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_values_training_and_memory():
    def work(rank, world):
        import dsx_zero

        torch.manual_seed(7)
        plain = Net()
        after = torch.rand(3)
        torch.manual_seed(7)
        with dsx_zero.Init():
            model = Net()
        assert torch.equal(torch.rand(3), after)  # the same draws
        assert isinstance(model.blocks[0][0].weight, dsx_zero.PartitionedParameter)
        assert model.head.weight is model.embedding.weight
        assert model.scale.shape == (6,)
        held = sum(p.source.shard.numel for p in model.parameters() if isinstance(p, dsx_zero.PartitionedParameter))
        assert held <= sum(p.numel() for p in plain.parameters()) / world + 4 * 16
        want = {n: p.detach() for n, p in plain.named_parameters()}
        assert_close_named({n: p.full_tensor() if p.numel() else p.detach() for n, p in model.named_parameters()}, want)

        early = model.blocks[1][0].weight
        optimizer = sgd(model.parameters())  # over partitioned parameters, before sharding
        model, optimizer = dsx_zero.shard(model, optimizer, stage=3, config=EXACT)
        reference = sgd(plain.parameters())
        for step in range(3):
            tokens = torch.arange(8).view(2, 4) + step % 3
            for net in (model, plain):
                nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step(), reference.step()
            optimizer.zero_grad(), reference.zero_grad()
        got = {n: p.full_tensor() if p.numel() else p.detach() for n, p in model.named_parameters()}
        assert_close_named(got, {n: p.detach() for n, p in plain.named_parameters()}, rtol=1e-5, atol=1e-6)
        assert torch.equal(early.full_tensor(), got["blocks.1.0.weight"])  # an old reference is the same parameter

    run_ranks(work, 3)


def test_rank_0_wins_nesting_existing_modules_and_dtype():
    def work(rank, world):
        import dsx_zero

        torch.manual_seed(rank)
        with dsx_zero.Init(dtype=torch.bfloat16):
            with dsx_zero.Init():
                inner = nn.Linear(4, 4)
            outer = nn.Sequential(inner, nn.Linear(4, 4))
        after = nn.Linear(4, 4)
        assert type(after.weight) is nn.Parameter
        assert inner.weight.dtype == torch.float32 and outer[1].weight.dtype == torch.bfloat16
        existing = nn.Linear(4, 4)
        dsx_zero.Init(module=existing, config_dict_or_path={"bf16": {"enabled": True}})
        assert existing.weight.dtype == torch.bfloat16
        with dsx_zero.Init(enabled=False):
            assert type(nn.Sequential(nn.Linear(2, 2))[0].weight) is nn.Parameter
        return [p.full_tensor().float() for p in (*outer.parameters(), *existing.parameters())]

    first, second = run_ranks(work, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_loading_whole_tensors_into_a_partitioned_model():
    def work(rank, world):
        import dsx_zero

        donor = tiny.TinyGPT(seed=4)
        with dsx_zero.Init():
            model = tiny.TinyGPT(seed=1)
        model.load_state_dict(donor.state_dict())
        model, _ = dsx_zero.shard(model, sgd, stage=3, config=EXACT)
        want = {n: p.detach() for n, p in donor.named_parameters()}
        assert_close_named({n: p.full_tensor() for n, p in model.named_parameters()}, want)
        other = tiny.TinyGPT(seed=5)
        model.load_state_dict(other.state_dict())
        state = model.state_dict()
        assert {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in other.state_dict().items()}
        assert_close_named({n: t.full_tensor() for n, t in state.items()}, other.state_dict())
        batch = other.example(2)
        torch.testing.assert_close(model.loss(*batch), other.loss(*batch))
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict(tiny.TinyGPT(width=8).state_dict())

    run_ranks(work, 2)


def test_one_process_and_refusals():
    import dsx_zero

    with dsx_zero.Init():
        model = Net()
    assert all(isinstance(p, dsx_zero.PartitionedParameter) for p in model.parameters() if p.numel())  # as on several
    plain = Net()
    model, _ = dsx_zero.shard(model, None, stage=0)
    assert all(type(p) is nn.Parameter and p.shape == q.shape for p, q in zip(model.parameters(), plain.parameters()))
    for argument, text in (
        ({"zero_quantized_weights": True}, "in the configuration of the sharded model"),
        ({"remote_device": "nvme"}, "there is no store on disk; give Init"),
        ({"remote_device": "disk"}, "got 'disk', expected 'cpu', 'nvme' or None"),
    ):
        with pytest.raises(dsx_zero.ZeroConfigError, match=text):
            dsx_zero.Init(**argument)
    with pytest.raises(TypeError, match="nonsense"):
        dsx_zero.Init(nonsense=1)


def test_shards_go_to_the_store_that_is_given_though_it_is_empty():
    import dsx_zero

    store = MemoryStore()
    assert not store  # it has a length, which is 0
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    with dsx_zero.Init(remote_device="nvme", store=store):
        model = Net()
    assert len(store) > 0
    with dsx_zero.GatheredParameters(model):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, plain.get_parameter(name)), name


def test_leaf_modules_and_tiles_are_units_of_their_own():
    import dsx_zero
    from dsx_comm import RankSet
    from dsx_zero.plan.units import find_parameters, plan_units

    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.tiled = dsx_zero.TiledLinear(4, 6, in_splits=2, out_splits=2)

    model = nn.Sequential(Expert(), nn.Linear(4, 4))

    def modules():
        return [
            plan.module
            for plan in plan_units(model, find_parameters(model), stage=3, ranks_of=lambda _: RankSet(size=2))
        ]

    tiles = [f"0.tiled.tiles.{row}.{column}" for row in (0, 1) for column in (0, 1)]
    split = modules()
    assert {"0.experts.0", "0.experts.1", "0.experts.2", *tiles} < set(split)
    assert dsx_zero.set_z3_leaf_modules(model, [Expert]) == [model[0]] == dsx_zero.get_z3_leaf_modules(model)
    assert dsx_zero.z3_leaf_module(model[0])
    assert set(modules()) == {"", "0", *tiles}
    dsx_zero.unset_z3_leaf_modules(model, ["Expert"])
    assert modules() == split
    with pytest.raises(dsx_zero.ZeroModelError, match="Conv2d"):
        dsx_zero.set_z3_leaf_modules(model, [nn.Conv2d])


@pytest.mark.parametrize("splits", [(1, 1), (2, 3), (5, 7), (3, 1)])
def test_tiled_linear_equals_the_whole_one(splits):
    import dsx_zero

    whole = nn.Linear(5, 7).double()
    tiled = dsx_zero.TiledLinear(
        5, 7, in_splits=splits[0], out_splits=splits[1], init_linear=whole, dtype=torch.float64
    )
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(tiled(x), whole(x))
    pieces = dsx_zero.TiledLinear(
        5, 7, bias=False, in_splits=splits[0], out_splits=splits[1],
        input_is_already_split=True, combine_out_splits=False, dtype=torch.float64,
    )  # fmt: skip
    plain = nn.Linear(5, 7, bias=False).double()
    pieces.copy_params_from(plain)
    torch.testing.assert_close(torch.cat(pieces(x.split(pieces.in_parts, -1)), -1), plain(x))
    with pytest.raises(dsx_zero.ZeroModelError, match="splits"):
        dsx_zero.TiledLinear(5, 7, in_splits=6)
    with pytest.raises(dsx_zero.ZeroModelError, match="bias=True"):
        pieces.copy_params_from(whole)


def test_tiled_linear_that_returns_its_bias():
    import dsx_zero

    class Apart(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight), self.bias

    whole = nn.Linear(4, 6)
    tiled = dsx_zero.TiledLinearReturnBias(4, 6, in_splits=2, out_splits=2, linear_cls=Apart, init_linear=whole)
    x = torch.randn(3, 4)
    output, bias = tiled(x)
    torch.testing.assert_close(output + bias, whole(x))


def test_the_dtype_is_read_from_a_file_with_comments(tmp_path):
    import dsx_zero

    path = tmp_path / "dsx.json"
    path.write_text(
        '{ // a comment, with a "quote\n "note": "# no // comment, ]", /* and\n another */\n "bfloat16": {"enabled":'
        " true,}, # last\n}"
    )
    with dsx_zero.Init(config_dict_or_path=str(path)):
        assert nn.Sequential(nn.Linear(2, 2))[0].weight.dtype == torch.bfloat16
    path.write_text("{")
    for wrong in (path, "nowhere.json"):
        with pytest.raises(
            dsx_zero.ZeroConfigError, match=r"Init.config.*cannot be read.*expected a dictionary or the path"
        ):
            dsx_zero.Init(config=wrong)


class Wrapped(nn.Module):
    """A module beside a copy of it that is trained, as adapters keep a classification head."""

    def __init__(self, original):
        super().__init__()
        import copy

        self.original = original
        self.trained = copy.deepcopy(original)
        self.original.requires_grad_(False)

    def forward(self, x):
        return self.trained(x)


def copied_before_sharding(rank, world, where):
    import copy

    import dsx_zero

    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    torch.manual_seed(7)
    with dsx_zero.Init(remote_device=where):
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    if rank == 0:  # one rank alone copies its part: nothing is sent
        copy.deepcopy(model)
    model[2].weight.mark = ["kept"]
    model[2] = Wrapped(model[2])
    twin = copy.deepcopy(nn.ModuleList([model[0], model[0]]))
    assert twin[0].weight is twin[1].weight and isinstance(twin[0].weight, dsx_zero.PartitionedParameter)
    twin[0].weight.data.zero_()  # a copy of its own
    assert model[2].trained.weight.mark == ["kept"]
    assert model[2].trained.weight.mark is not model[2].original.weight.mark
    with dsx_zero.GatheredParameters(model.parameters()):
        whole = copy.deepcopy(model[0])
    assert type(whole.weight) is nn.Parameter and torch.equal(whole.weight, plain[0].weight)
    model, optimizer = dsx_zero.shard(model, sgd, stage=3, config=EXACT)
    expected = sgd(plain.parameters())
    before = plain[2].weight.detach().clone()
    for seed in range(2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        expected.step()
        expected.zero_grad()
    with dsx_zero.GatheredParameters(model.parameters()):
        torch.testing.assert_close(model[2].trained.weight, plain[2].weight)
        torch.testing.assert_close(model[0].weight, plain[0].weight)
        assert torch.equal(model[2].original.weight, before)


@pytest.mark.parametrize(("world", "where"), [(1, None), (2, None), (2, "cpu")])
def test_a_module_is_copied_before_it_is_sharded(world, where):
    run_ranks(copied_before_sharding, world, where)


ONE_LAUNCHED_RANK = """
import os, torch, dsx_zero
with dsx_zero.Init():
    model = torch.nn.Linear(4, 4)
    assert torch.distributed.get_rank() == 0 and torch.distributed.get_world_size() == 1
model, optimizer = dsx_zero.shard(model, lambda p: torch.optim.SGD(p, lr=0.1), stage=3)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print("trained")
"""


def test_one_launched_rank_has_a_process_group(tmp_path):
    import os
    import subprocess
    import sys

    address = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", ONE_LAUNCHED_RANK], env={**os.environ, **address}, capture_output=True, text=True
    )
    assert done.stdout == "trained\n", done.stderr
