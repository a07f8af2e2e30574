"""Moments in 4 and 8 bits and in bf16 with stochastic rounding, over shards: the bits are those of the plain optimizer,
at every stage, number of ranks and place, and a checkpoint goes on with them in any other layout.
"""

import dsx_checkpoint
import dsx_ops
import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from dsx_zero.plan.layout import FlatLayout
from torch import nn

KINDS = {
    "4 bits": lambda p: dsx_ops.Adam4bit(p, lr=1e-2, weight_decay=0.01, seed=3),
    "8 bits": lambda p: dsx_ops.Adam8bit(p, lr=1e-2, weight_decay=0.01, seed=3),
    "bf16": lambda p: dsx_ops.FusedAdam(p, lr=1e-2, weight_decay=0.01, seed=3, state_dtype=torch.bfloat16,
                                        stochastic_rounding=True),
}  # fmt: skip
CODED = ["4 bits", "8 bits"]
LAYOUTS = [((2, 3), (4, 1)), ((4, 2), (1, 3)), ((1, 0), (2, 2)), ((2, 1), (2, 0))]
"""(ranks, stage) of the job that saves and of the one that loads."""


@pytest.mark.parametrize("block", [1, 128, 256])
@pytest.mark.parametrize("world", [1, 2, 3, 7, 1024])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_no_boundary_cuts_a_block_and_padding_is_bounded(world, block, itemsize):
    shapes = [("a", (1,)), ("b", (129, 3)), ("empty", (0, 5)), ("c", (1000,)), ("d", (64, 64))]
    layout = FlatLayout.build(shapes, world_size=world, itemsize=itemsize, block=block)
    for name, _ in shapes:
        slices = [s for rank in range(world) if (s := layout.local_slice(name, rank)) is not None]
        assert all(s.start % block == 0 for s in slices)
        assert sum(s.numel for s in slices) == layout.sizes[layout.index(name)]
    plain = FlatLayout.build(shapes, world_size=world, itemsize=itemsize)
    assert layout.numel <= plain.numel + (len(shapes) + world) * block


class Odd(nn.Module):
    """Sizes that are no multiples of a block, a tied weight, a frozen one, one without a gradient, an empty one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(19, 37), nn.Linear(37, 19)
        self.blocks = nn.ModuleList(nn.Linear(19, 19) for _ in range(2))
        self.tied = nn.Linear(19, 19, bias=False)
        self.tied.weight = self.blocks[0].weight
        self.frozen, self.unused = nn.Linear(19, 19), nn.Linear(5, 31)
        self.frozen.requires_grad_(False)
        self.scale, self.nothing = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        x = x + self.second(torch.tanh(self.first(x)))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (self.frozen(self.tied(x)) * self.scale).square().mean() + self.nothing.sum()


def exact_inputs(step):
    """The same rows for every rank, so that sums over ranks are exact and bits do not depend on their number."""
    return torch.randint(-8, 9, (4, 19), generator=torch.Generator().manual_seed(step)).float() / 8


def sharded(make, stage, **options):
    config = {"stage": stage, "stage3_param_persistence_threshold": 0, **options}
    return dsx_zero.shard(Odd(), make, config=config)


def train(model, optimizer, steps, *, accumulation=1):
    for step in steps:
        for _ in range(accumulation):
            (model(exact_inputs(step)) / accumulation).backward()
        optimizer.step(max_norm=1e6)
        optimizer.zero_grad()


def whole(model):
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for n, p in model.named_parameters()}  # fmt: skip


def plain_run(make, steps):
    model = Odd()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        model(exact_inputs(step)).backward()
        for p in model.unused.parameters():
            p.grad = torch.zeros_like(p)  # which is what it has in a sharded model
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("options", [{}, {"offload_optimizer": {"device": "cpu"}}], ids=["device", "host"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_bits_are_those_of_the_plain_optimizer(world, kind, options):
    """Ranks of a power of two with equal rows: their mean is exact, so that only the layout could change a bit."""
    run_ranks(same_bits, world, kind, options)


def same_bits(rank, world, kind, options):
    expected, _ = plain_run(KINDS[kind], 4)
    for stage in (0, 1, 2, 3):
        if options and not stage:
            continue
        model, optimizer = sharded(KINDS[kind], stage, **options)
        train(model, optimizer, range(4), accumulation=2)
        for name, value in whole(model).items():
            assert torch.equal(value, dict(expected.named_parameters())[name]), (stage, name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "source,target", [((2, 3), (4, 1)), ((4, 2), (1, 3)), ((1, 0), (2, 2)), ((2, 1), (2, 0))], ids=str
)
def test_a_checkpoint_goes_on_with_the_same_bits_in_another_layout(tmp_path, kind, source, target):
    run_ranks(save, source[0], str(tmp_path), kind, source[1])
    run_ranks(go_on, target[0], str(tmp_path), kind, target[1])


def save(rank, world, folder, kind, stage):
    model, optimizer = sharded(KINDS[kind], stage)
    train(model, optimizer, range(3))
    dsx_checkpoint.save(folder, "here", module=model, slices=optimizer.slices(), state={})


def go_on(rank, world, folder, kind, stage):
    expected, _ = plain_run(KINDS[kind], 6)
    model, optimizer = sharded(KINDS[kind], stage)
    train(model, optimizer, range(1))  # something to be replaced
    assert dsx_checkpoint.load(folder, "here", module=model, optimizer=optimizer) is not None
    train(model, optimizer, range(3, 6))
    for name, value in whole(model).items():
        assert torch.equal(value, dict(expected.named_parameters())[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_of_this_rank_goes_on_with_the_same_bits(kind):
    run_ranks(by_state_dict, 2, kind)


def by_state_dict(rank, world, kind):
    expected, _ = plain_run(KINDS[kind], 5)
    model, optimizer = sharded(KINDS[kind], 2)
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()
    other, fresh = sharded(KINDS[kind], 2)
    fresh.load_state_dict(saved)
    train(other, fresh, range(3, 5))
    for name, value in whole(other).items():
        assert torch.equal(value, dict(expected.named_parameters())[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_has_stepped_is_sharded_with_its_states(kind):
    run_ranks(sharded_later, 2, kind)


def sharded_later(rank, world, kind):
    expected, _ = plain_run(KINDS[kind], 5)
    plain, optimizer = plain_run(KINDS[kind], 2)
    model, optimizer = dsx_zero.shard(plain, optimizer, config={"stage": 2})
    train(model, optimizer, range(2, 5))
    for name, value in whole(model).items():
        assert torch.equal(value, dict(expected.named_parameters())[name]), name


def test_state_shrinks_with_the_ranks():
    run_ranks(counted_bytes, 4)


def counted_bytes(rank, world):
    numel = 1 << 16
    model = nn.Linear(256, 256, bias=False)
    model, optimizer = dsx_zero.shard(model, KINDS["4 bits"], config={"stage": 2})
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    assert sum(optimizer.state_bytes_by_tier()["optimizer"].values()) == numel // 4 * (1 + 8 / 128)


@pytest.mark.parametrize("kind", CODED)
def test_a_rank_without_a_gradient_and_an_overflow(kind):
    run_ranks(uneven, 2, kind)


def uneven(rank, world, kind):
    """An overflow changes no state; a parameter that one rank does not use has the mean of both ranks' gradients."""
    model, optimizer = dsx_zero.shard(Odd().half(), KINDS[kind], config={"stage": 2})
    for step in range(3):
        x = exact_inputs(step).half() * (float("inf") if rank and step == 2 else 1.0)
        (model(x) if rank or step == 2 else model(x) + model.unused.weight.sum() * 0.01).backward()
        if step < 2:
            assert not optimizer.step().overflow
            optimizer.zero_grad()
    assert whole(model)["unused.weight"].ne(Odd().half().unused.weight).any()
    before, values = optimizer.state_dict()["slices"], whole(model)
    outcome = optimizer.step()
    optimizer.zero_grad()
    assert outcome.overflow
    for name, part in optimizer.state_dict()["slices"].items():
        for key, (_, scales) in part["shaped"].items():
            assert torch.equal(scales, before[name]["shaped"][key][1]), (name, key)
        for key, value in part["states"].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(before[name]["states"][key])), (name, key)
    assert all(torch.equal(value, values[name]) for name, value in whole(model).items())


def test_a_checkpoint_of_other_states_is_refused_and_nothing_changes(tmp_path):
    run_ranks(save, 2, str(tmp_path), "8 bits", 2)
    run_ranks(other_states, 2, str(tmp_path))


def other_states(rank, world, folder):
    model, optimizer = sharded(KINDS["4 bits"], 2)
    values = whole(model)
    with pytest.raises(dsx_checkpoint.CheckpointError, match="also keeps moments"):
        dsx_checkpoint.load(folder, "here", module=model, optimizer=optimizer)
    assert all(torch.equal(value, values[name]) for name, value in whole(model).items())
