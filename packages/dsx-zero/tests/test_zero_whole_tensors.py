"""Optimizers that see whole tensors at stages 1-3: each parameter is owned by one rank, balanced by size, and training
is that of the plain optimizer. Muon, which needs whole matrices for a moment only, beside them.
"""

import logging
import random
from math import prod

import pytest
import torch
from dsx_testkit import MemoryStore, assert_close_named, run_ranks
from dsx_zero.plan.layout import FlatLayout
from torch import nn


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_no_parameter_is_cut_and_ranks_are_balanced(seed, world):
    rng = random.Random(seed)
    shapes = [(f"p{n}", tuple(rng.randint(1, 40) for _ in range(rng.randint(0, 3)))) for n in range(rng.randint(1, 30))]
    layout = FlatLayout.build(shapes, world_size=world, itemsize=4, undivided=True)
    assert sorted(zip(layout.names, layout.shapes)) == sorted(shapes)
    owners = {name: [r for r in range(world) if layout.local_slice(name, r) is not None] for name in layout.names}
    for name, shape in shapes:
        (rank,) = owners[name]
        assert layout.local_slice(name, rank).numel == prod(shape)
    assert list(layout.offsets) == sorted(layout.offsets)
    assert sum(stop - start for start, stop in layout.gaps) == layout.numel - sum(layout.sizes)
    # the largest shard is at most 4/3 of the best possible, which is at least the mean and the largest parameter
    sizes = [-(-size // 16) * 16 for size in layout.sizes]
    assert layout.shard_numel <= 4 / 3 * max(sum(sizes) / world, max(sizes)) + 16
    assert layout.numel % world == 0


class Shampoo(torch.optim.Optimizer):
    """Preconditions a matrix on both sides, as Shampoo does, with the smallest of states."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad, self.state[p]
                if grad.dim() != 2:
                    p.sub_(group["lr"] * grad)
                    continue
                left = state.setdefault("left", torch.eye(grad.shape[0]) * 1e-2)
                right = state.setdefault("right", torch.eye(grad.shape[1]) * 1e-2)
                left.add_(grad @ grad.t())
                right.add_(grad.t() @ grad)
                p.sub_(group["lr"] * torch.linalg.solve(left, grad) @ torch.linalg.inv(right) * 1e-3)


class Mixed(torch.optim.Optimizer):
    """Scales matrices by rows and columns; it says itself what it needs."""

    needs_whole_tensors = True

    def __init__(self, params):
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            if p.dim() == 2:
                rows, columns = p.grad.norm(dim=1, keepdim=True), p.grad.norm(dim=0, keepdim=True)
                p.sub_(0.02 * p.grad / (0.1 + rows * columns).sqrt())
            else:
                p.sub_(0.02 * p.grad)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12)) for _ in range(3))
        self.last = nn.Linear(12, 3)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.last(x).square().mean()


def matrices_by_muon(params):
    params = list(params)
    for p in params:
        p.requires_grad_(p.dim() == 2)
    return torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.02, weight_decay=0.01)


MAKERS = {
    "muon": matrices_by_muon,
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "shampoo": Shampoo,
    "own": Mixed,
}


def train(rank, world, stage, name, options, store=None, clip=0.5):
    import dsx_zero

    plain = Model()
    reference = MAKERS[name](plain.parameters())
    model, optimizer = dsx_zero.shard(
        Model(), MAKERS[name], config={"stage": stage, "stage3_param_persistence_threshold": 0, **options}, store=store
    )
    for step in range(4):
        x = torch.randn(world, 5, 12, generator=torch.Generator().manual_seed(step))
        model(x[rank]).backward()
        outcome = optimizer.step(max_norm=clip)
        optimizer.zero_grad()
        plain(x.view(-1, 12)).backward()
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.grad is not None], clip)
            assert outcome.grad_norm == pytest.approx(norm.item(), rel=1e-4)
        reference.step()
        reference.zero_grad()
    got = {n: (p.full_tensor() if stage == 3 else p).detach() for n, p in model.named_parameters()}
    assert_close_named(got, {n: p.detach() for n, p in plain.named_parameters()}, rtol=1e-3, atol=1e-4)
    owned = sum(t.numel() for g in optimizer.inner.param_groups for t in g["params"]) if world == 1 else None
    if name == "muon" and (stage or world == 1):  # its rule works on slices, so that nothing is owned whole
        slices = [s for s in optimizer.slices() if s.states]
        assert all(s.states["momentum_buffer"].numel() == s.param.numel() for s in slices)
        matrices = sum(p.numel() for p in plain.parameters() if p.dim() == 2)
        assert sum(s.stop - s.start for s in slices) <= matrices / world + 64 * len(slices)
    return owned


@pytest.mark.parametrize(
    ("name", "stage", "world"),
    [
        ("muon", 1, 2), ("muon", 3, 3), ("adafactor", 2, 2), ("shampoo", 3, 2), ("own", 2, 3),
        ("muon", 3, 1), ("adafactor", 3, 1),
    ],
)  # fmt: skip
def test_training_is_that_of_the_plain_optimizer(name, stage, world):
    run_ranks(train, world, stage, name, {})


def test_with_offload():
    run_ranks(train, 2, 3, "muon", {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}})


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["adafactor", "own"])
def test_one_rank_with_offload(name, stage):
    run_ranks(train, 1, stage, name, {"offload_optimizer": {"device": "cpu"}})


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("name", "stage"), [("muon", 1), ("shampoo", 2), ("muon", 3), ("adafactor", 3)])
def test_masters_on_disk(name, stage, world):
    """With clipping they are stepped after backward, without it during backward."""
    for clip in (0.5, None):
        run_ranks(train, world, stage, name, {"offload_optimizer": {"device": "nvme"}}, MemoryStore(), clip)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_everywhere(name, stage, world):
    run_ranks(train, world, stage, name, {})


def padded(rank, world):
    import dsx_zero

    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("dsx_zero").addHandler(handler)
    dsx_zero.shard(Model(), Mixed, config={"stage": 3, "stage3_param_persistence_threshold": 0})
    return [text for text in records if "whole tensors" in text]


def test_much_padding_is_reported():
    first, *others = run_ranks(padded, 4)
    assert len(first) == 1 and "times" in first[0]
    assert not any(others)


def refused(rank, world):
    import dsx_zero

    with pytest.raises(dsx_zero.ZeroOptimizerError, match="line search"):
        dsx_zero.shard(Model(), lambda p: torch.optim.LBFGS(p), stage=1)


def test_lbfgs_is_refused_with_the_reason():
    run_ranks(refused, 1)


class OfSlices(nn.Module):
    """A matrix and its bias of which each rank has a slice, and a whole matrix."""

    def __init__(self):
        super().__init__()
        self.cut, self.whole = nn.Linear(4, 2), nn.Linear(2, 4)
        self.cut.weight.tensor_model_parallel = self.cut.bias.tensor_model_parallel = True


def muon_of_slices(rank, world, make, stage):
    import dsx_comm
    import dsx_ops
    import dsx_zero

    registry = dsx_comm.GroupRegistry(dsx_comm.ProcessTopology(("data", "model"), (1, 2)))
    dsx_comm.parallel_groups.use(registry)
    model = OfSlices()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    cut, others = [model.cut.weight], [model.cut.bias, *model.whole.parameters()]
    element_wise = [{"params": cut, "use_muon": False}, {"params": others}]
    for given, fails in ((model.parameters(), True), (element_wise, False)):
        optimizer = dsx_ops.Muon(given) if make == "ours" else torch.optim.Muon([*cut, model.whole.weight])
        if not fails:
            dsx_zero.shard(model, dsx_ops.Muon(given), stage=stage)
            continue
        with pytest.raises(dsx_zero.ZeroOptimizerError, match=r"Muon needs whole tensors.*slice of cut\.weight:"):
            dsx_zero.shard(model, optimizer, stage=stage)
        for name, parameter in model.named_parameters():
            assert type(parameter) is nn.Parameter and torch.equal(parameter, before[name])


@pytest.mark.parametrize(("make", "stage"), [("ours", 0), ("ours", 1), ("ours", 3), ("torch", 2)])
def test_slices_of_whole_tensors_are_refused(make, stage):
    run_ranks(muon_of_slices, 2, make, stage)
