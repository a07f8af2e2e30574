"""A model built under `Init` trains like the same model built without it: every stage, default thresholds, before
and after a process group.
"""

import copy

import pytest
import torch
from dsx_testkit import run_ranks, tiny
from torch import nn

WHOLE = {"stage3_param_persistence_threshold": 0}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def losses_of(model, optimizer, rank, steps=3):
    """The losses of a few steps on this rank's data."""
    found = []
    for step in range(steps):
        loss = model.loss(*model.example(2, seed=10 * step + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def compare(rank, world, stage, dtype, config, joins, given):
    """Losses with `Init` and without it, for an optimizer that is made before or after sharding."""
    import dsx_comm
    import dsx_zero

    if joins == "before":  # the script makes the group itself
        dsx_comm.init_distributed("gloo")
    with dsx_zero.Init(dtype=DTYPES[dtype]):
        built = tiny.TinyGPT(layers=1)
    assert dsx_comm.is_initialized() == (world > 1 or joins == "before")
    assert any(isinstance(p, dsx_zero.PartitionedParameter) for p in built.parameters())
    plain = tiny.TinyGPT(layers=1).to(DTYPES[dtype])
    results = []
    for model in (built, plain):
        optimizer = adamw(model.parameters()) if given == "optimizer" else adamw
        model, optimizer = dsx_zero.shard(model, optimizer, stage=stage, config=config)
        results.append(losses_of(model, optimizer, rank))
        kinds = {type(p) for p in model.parameters()}
        assert kinds == {type(p) for p in plain.parameters()} or model is built
    return results


def check(world, stage, dtype, config, joins="before", given="callable"):
    for with_init, without in run_ranks(compare, world, stage, dtype, config, joins, given, backend=None):
        assert with_init == without, (world, stage, dtype, config, joins)


@pytest.mark.parametrize("stage", range(4))
def test_two_ranks_with_the_defaults(stage):
    check(2, stage, "bf16", {}, "after", "optimizer")
    check(2, stage, "fp32", {})


@pytest.mark.parametrize("config", [{}, WHOLE, {"stage3_param_persistence_threshold": 100}])
def test_stage_3_with_some_parameters_whole(config):
    check(2, 3, "fp16", config, "after")
    check(2, 3, "fp32", config, given="optimizer")


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("config", [{}, WHOLE], ids=["default", "0"])
@pytest.mark.parametrize("stage", range(4))
def test_the_whole_matrix(stage, config, world):
    for dtype in DTYPES:
        for joins in ("before", "after"):
            for given in ("callable", "optimizer"):
                check(world, stage, dtype, config, joins, given)


def late(rank, world):
    """`shard` before any process group joins the launched ranks, as `Init` does; it does not train each rank alone."""
    import dsx_comm
    import dsx_zero

    model, optimizer = dsx_zero.shard(tiny.MLP(seed=rank), adamw, stage=1)
    assert dsx_comm.get_world_size() == world == optimizer.runtime.ranks.size
    losses_of(model, optimizer, rank)
    return [p.detach().clone() for p in model.parameters()]


def test_shard_joins_the_ranks_of_the_launcher():
    first, second = run_ranks(late, 2, backend=None)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def references(rank, world):
    """Whoever kept a parameter of `Init` has the model's parameter after sharding, whole or partitioned."""
    import dsx_zero

    with dsx_zero.Init():
        model = tiny.MLP(seed=3)
        model.layers[0].bias.note = "kept"
    early = dict(model.named_parameters())
    values = {name: p.full_tensor() for name, p in early.items()}
    for stage, config in ((3, {"stage3_param_persistence_threshold": 20}), (1, {})):
        again = copy.copy(early)
        if stage == 1:
            with dsx_zero.Init():
                model = tiny.MLP(seed=3)
            again = dict(model.named_parameters())
        model, optimizer = dsx_zero.shard(model, adamw, stage=stage, config=config)
        for name, p in again.items():
            assert torch.equal(p.full_tensor(), values[name])
            assert torch.equal(dsx_zero.safe_get_full_fp32_param(p), values[name])
        assert stage == 1 or model.layers[0].bias.note == "kept"
        bias = again["layers.0.bias"]
        with torch.no_grad():
            bias.fill_(0.5)
        assert torch.equal(dsx_zero.safe_get_full_fp32_param("layers.0.bias", optimizer=optimizer), bias.full_tensor())
        assert torch.equal(bias.full_tensor(), torch.full_like(values["layers.0.bias"], 0.5))


def test_kept_references_stay_the_models_parameters():
    run_ranks(references, 2)


def converted(rank, world):
    """`model.to`, `.half()` and the like between `Init` and `shard` convert the shards; what changes nothing gives
    the model back.
    """
    import dsx_zero

    with dsx_zero.Init():
        model = tiny.TinyGPT(layers=1)
    plain = tiny.TinyGPT(layers=1)
    before = list(model.parameters())
    for convert in (
        lambda m: m.to(torch.bfloat16), lambda m: m.float(), lambda m: m.to("cpu"), lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.type(torch.float32), lambda m: m.cpu(), lambda m: m.bfloat16(),
    ):  # fmt: skip
        assert convert(model) is model
        convert(plain)
        assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
        for p, want in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.dtype == want.dtype and torch.equal(p.full_tensor(), want)
    weight = model.embedding.weight
    assert weight.to(torch.bfloat16) is weight and model.head.weight is weight
    with pytest.raises(dsx_zero.PartitionedParameterError, match=r"Embedding\.weight.*float\(\)"):
        weight.float()  # with gradients on, outside of a forward: the result would have to lead back to the parameter
    model, optimizer = dsx_zero.shard(model, adamw, stage=3, config=WHOLE)
    plain, other = dsx_zero.shard(plain, adamw, stage=3, config=WHOLE)
    assert losses_of(model, optimizer, rank) == losses_of(plain, other, rank)
    assert model.to(torch.bfloat16) is model
    with pytest.raises(dsx_zero.PartitionedParameterError, match=r"embedding\.weight.*before it is sharded"):
        model.to(torch.float32)
    losses_of(model, optimizer, rank, 1)


def test_converting_a_model_of_init():
    run_ranks(converted, 2)


class Casting(nn.Module):
    """A layer that uses another one's weight through `.to` in its own forward."""

    def __init__(self):
        super().__init__()
        self.table = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x.double(), self.blocks[0].weight.to(torch.float64)).float()


def casting(rank, world):
    import dsx_zero

    torch.manual_seed(0)
    model = Casting()
    oracle = copy.deepcopy(model)
    model, optimizer = dsx_zero.shard(model, lambda p: torch.optim.SGD(p, lr=0.1), stage=3, config=WHOLE)
    plain = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for _ in range(3):
        for net, steps in ((model, optimizer), (oracle, plain)):
            net(torch.ones(2, 4)).square().sum().backward()
            steps.step()
            steps.zero_grad()
    torch.testing.assert_close(model.blocks[0].weight.full_tensor(), oracle.blocks[0].weight.detach())


def test_a_weight_of_another_module_can_be_cast_inside_a_forward():
    run_ranks(casting, 2)


def parts(rank, world):
    """Initialisation that writes rows, columns, chunks and transposes of parameters does what it does to plain ones."""
    import dsx_zero

    def reset(p, noise):
        with torch.no_grad():
            nn.init.zeros_(p[3])
            p[0].copy_(p.data[1] if type(p) is nn.Parameter else p[1])
            p[:, 1].mul_(2)
            p.t()[2:4, 5] = 7
            p[1] += 1
            for number, chunk in enumerate(p.chunk(3, dim=1)):
                chunk.add_(number)
            p.narrow(0, 6, 1).view(-1)[2:].copy_(noise)
        p.data[7].zero_()

    torch.manual_seed(rank)
    plain = nn.Parameter(torch.arange(48.0).view(8, 6))
    with dsx_zero.Init():
        model = nn.Sequential(nn.Linear(6, 8))
    weight = model[0].weight
    with torch.no_grad():
        weight.copy_(plain)
    noise = torch.arange(4.0)
    reset(plain, noise), reset(weight, noise + rank)  # rank 0's values are everybody's
    assert torch.equal(weight.full_tensor(), plain)
    with torch.no_grad():
        assert weight.t().stride() == plain.t().stride() and weight[2].shape == (6,)
        assert torch.equal(weight[2].full_tensor(), plain[2])
        for reading in (lambda: weight[2].sum(), lambda: weight[[4, 5]]):
            with pytest.raises(dsx_zero.PartitionedParameterError, match=r"Linear\.weight"):
                reading()
    with pytest.raises(dsx_zero.PartitionedParameterError, match=r"Linear\.weight"):
        weight[2]  # with gradients on: the view would have to lead them to the parameter


def test_initialisation_may_write_parts_of_a_parameter():
    run_ranks(parts, 2)


class Derived(nn.Module):
    """Its constructor reads parameters of finished children: norms, copies, a forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(4, 6)
        with torch.no_grad():
            self.first.weight.div_(self.first.weight.norm())
            self.second.weight.copy_(self.first.weight * 2 + self.second.weight.abs().mean())
            self.width = self.first(torch.ones(1, 4)).shape[1]
        self.first.bias.data = nn.functional.pad(self.first.bias.data, (0, 0))
        self.second.bias.data = self.first.bias.data.clone()
        self.shift = float(self.second.bias.data[0])


def read_while_building(rank, world):
    import dsx_zero

    torch.manual_seed(0)
    plain = Derived()
    torch.manual_seed(0)
    with dsx_zero.Init():
        built = Derived()
        with pytest.raises(
            dsx_zero.PartitionedParameterError, match=r"Linear\.weight.*torch\.no_grad\(\) where `Init` builds"
        ):
            built.first(torch.ones(1, 4))
        for aliasing in (lambda: built.first.weight.data.numpy(), lambda: built.first.weight.data.expand(2, 6, 4)):
            with pytest.raises(dsx_zero.PartitionedParameterError, match=r"Linear\.weight"):
                aliasing()
    assert built.shift == plain.shift and built.width == 6
    for p, want in zip(built.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), want)
    with torch.no_grad(), pytest.raises(dsx_zero.PartitionedParameterError, match=r"Linear\.weight"):
        built.first.weight.norm()  # outside of `Init` one rank alone may ask


def test_constructors_may_read_parameters_of_their_children():
    run_ranks(read_while_building, 2)
