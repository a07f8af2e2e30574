"""States of optimizers on matrices in `full_state_dict` and torch's checkpoints: whole tensors by name, at every stage
and number of ranks, from and to plain PyTorch.

Gradients are small whole numbers, so that their means over ranks have no rounding, and bits are compared.
"""

import copy

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from dsx_zero.errors import ZeroStateError
from torch import nn

pytest.importorskip("dsx_ops")
from dsx_ops.optim.apollo import Apollo
from dsx_ops.optim.coded import Adam4bit, Adam8bit
from dsx_ops.optim.dion import Dion
from dsx_ops.optim.muon import Muon

CONFIG = {"stage3_param_persistence_threshold": 0}
LAYOUTS = [((3, 3), (2, 1)), ((2, 2), (4, 3)), ((1, 0), (3, 2)), ((2, 1), (2, 0))]
"""(ranks, stage) that save, and that go on."""


class Model(nn.Module):
    """Odd sizes, a row, a vector, a number, a tied weight, a frozen one; rows of more than a block of scales."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(12, 20) for _ in range(2))
        self.row, self.long = nn.Parameter(torch.randn(1, 9)), nn.Parameter(torch.randn(17, 31))
        self.scale, self.one = nn.Parameter(torch.randn(7)), nn.Parameter(torch.ones(()))
        self.tied = nn.Linear(12, 20, bias=False)
        self.tied.weight = self.blocks[0].weight
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, seed):
        generator, total = torch.Generator().manual_seed(seed), 0.0
        for parameter in self.parameters():
            total = total + (parameter * torch.randint(-2, 3, parameter.shape, generator=generator).float()).sum()
        return total


class Sides(torch.optim.Optimizer):
    """A list with one entry per side, which is empty for a long one (as in SOAP), and an object (as in GaLore)."""

    needs_whole_tensors = True

    class Projector:
        def __init__(self, of):
            self.rank, self.kept = 2, of.new_zeros(of.shape[-1:] or (1,))

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state, shape = self.state[p], p.shape or (1,)
            if "GG" not in state:
                state["GG"] = [torch.zeros(n, n) if n <= 20 else [] for n in shape]
                state["projector"], state["pair"] = self.Projector(p), {"rows": p.new_zeros(shape[:1]), "of": "rows"}
            grad = p.grad.view(shape)
            for side, found in enumerate(state["GG"]):
                if len(found):
                    found.add_(grad.movedim(side, 0).reshape(len(found), -1).abs().sum(1))
            state["projector"].kept.add_(grad.reshape(-1, shape[-1]).abs().sum(0))
            state["projector"].rank += 1
            state["pair"]["rows"].add_(grad.reshape(shape[0], -1).abs().sum(1))
            size = sum(float(found.sum()) for found in state["GG"] if len(found)) + float(state["projector"].kept.sum())
            size += float(state["pair"]["rows"].sum())
            p.sub_(p.grad * (0.05 / (1.0 + size)) + 0.001 * state["projector"].rank)


KINDS = {
    "muon": lambda params: Muon(params, lr=0.03),
    "dion": lambda params: Dion(params, lr=0.03, rank_fraction=0.4),
    "apollo": lambda params: Apollo(params, lr=0.03, rank=3, update_proj_gap=2),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.02),
    "sides": Sides,
    "8 bits": lambda params: Adam8bit(params, lr=0.02),
    "4 bits": lambda params: Adam4bit(params, lr=0.02),
}


def sharded(kind, stage):
    return dsx_zero.shard(Model(), KINDS[kind], config={"stage": stage, **CONFIG})


def plain(kind, steps):
    model = Model()
    optimizer = KINDS[kind]([p for p in model.parameters() if p.requires_grad])
    train(model, optimizer, range(steps))
    return model, optimizer


def train(model, optimizer, steps):
    for step in steps:
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model):
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for n, p in model.named_parameters()}  # fmt: skip


def check(model, kind, steps):
    expected = whole(plain(kind, steps)[0])
    for name, value in whole(model).items():
        assert torch.equal(value, expected[name]), name


def leaves(value, path=()):
    """Tensors and numbers by their place, whatever holds them."""
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, torch.Tensor):
        value = vars(value)
    if not isinstance(value, dict):
        return {".".join(map(str, path)): value}
    return {k: v for name, one in value.items() for k, v in leaves(one, (*path, name)).items()}


def same_states(found, expected):
    found, expected = leaves(found), leaves(expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name].reshape(value.shape), value), name
        else:
            assert found[name] == value, name


# - full_state_dict ----------------------------------------------------------------------------------------------------


def save(rank, world, path, kind, stage):
    model, optimizer = sharded(kind, stage)
    train(model, optimizer, range(3))
    state = dsx_zero.full_state_dict(optimizer)
    if rank == 0:
        torch.save(state, path)


def go_on(rank, world, path, kind, stage):
    model, optimizer = sharded(kind, stage)
    train(model, optimizer, range(world % 2))  # something to be replaced, or no states yet
    dsx_zero.load_full_state_dict(optimizer, torch.load(path, mmap=True))
    train(model, optimizer, range(3, 5))
    check(model, kind, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_states_are_those_of_the_plain_optimizer_and_go_on_elsewhere(tmp_path, kind):
    source, target = LAYOUTS[list(KINDS).index(kind) % len(LAYOUTS)]
    run_ranks(save, source[0], tmp_path / "state.pt", kind, source[1])
    state = torch.load(tmp_path / "state.pt")
    model, optimizer = plain(kind, 3)
    same_states(state["optimizer"]["state"], optimizer.state_dict()["state"])
    run_ranks(go_on, target[0], tmp_path / "state.pt", kind, target[1])
    if kind != "sides":  # whose objects a plain optimizer would have to make
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        train(model, optimizer, range(3, 5))
        check(model, kind, 5)


def from_plain(rank, world, kind):
    model, optimizer = plain(kind, 3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    sharded_model, sharded_optimizer = sharded(kind, 2)
    dsx_zero.load_full_state_dict(sharded_optimizer, state)
    train(sharded_model, sharded_optimizer, range(3, 5))
    check(sharded_model, kind, 5)


@pytest.mark.parametrize("kind", ["dion", "sides"])
def test_states_of_a_plain_optimizer_are_divided(kind):
    run_ranks(from_plain, 3, kind)


def other_settings(rank, world):
    model, optimizer = sharded("dion", 2)
    train(model, optimizer, range(1))
    state = dsx_zero.full_state_dict(optimizer, rank0_only=False)
    model, optimizer = dsx_zero.shard(Model(), lambda p: Dion(p, lr=0.03, rank_fraction=0.7), config={"stage": 2})
    before = whole(model)
    with pytest.raises((ZeroStateError, dsx_zero.RanksDifferError), match=r"state 'Q': got .*, expected the shape"):
        dsx_zero.load_full_state_dict(optimizer, state)
    assert all(torch.equal(value, before[name]) for name, value in whole(model).items())


def test_states_of_another_rank_are_refused_and_nothing_changes():
    run_ranks(other_settings, 2)


# - torch's functions and checkpoints ----------------------------------------------------------------------------------


def by_dcp(rank, world, path, kind, stage, saves):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = sharded(kind, stage)
    train(model, optimizer, range(3 if saves else world % 2))
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    if saves:
        dcp.save(state, checkpoint_id=path)
        return
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(model, optimizer, range(3, 5))
    check(model, kind, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_torch_goes_on_at_another_stage_and_number_of_ranks(tmp_path, kind):
    source, target = LAYOUTS[(list(KINDS).index(kind) + 1) % len(LAYOUTS)]
    run_ranks(by_dcp, source[0], tmp_path / "saved", kind, source[1], True)
    run_ranks(by_dcp, target[0], tmp_path / "saved", kind, target[1], False)


def from_plain_dcp(rank, world, path, kind):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    if rank == 0:
        model, optimizer = plain(kind, 3)
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path, no_dist=True)
    torch.distributed.barrier()
    by_dcp(rank, world, path, kind, 3, False)


def test_a_folder_of_plain_torch_is_read(tmp_path):
    run_ranks(from_plain_dcp, 2, tmp_path / "saved", "dion")


def options(rank, world, kind, stage):
    from torch.distributed.checkpoint import state_dict as by_torch

    model, optimizer = sharded(kind, stage)
    train(model, optimizer, range(3))
    kinds = {
        "full": by_torch.StateDictOptions(full_state_dict=True),
        "from rank 0": by_torch.StateDictOptions(full_state_dict=True, cpu_offload=True),
        "flat": by_torch.StateDictOptions(flatten_optimizer_state_dict=True),
    }
    if kind == "sides":  # torch's own function flattens no texts
        del kinds["flat"]
    saved = {n: copy.deepcopy(by_torch.get_state_dict(model, optimizer, options=o)) for n, o in kinds.items()}
    for name, (weights, states) in saved.items():
        option = kinds[name]
        if name == "from rank 0":
            option = by_torch.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        model, optimizer = sharded(kind, stage)
        by_torch.set_model_state_dict(model, weights, options=option)
        by_torch.set_optimizer_state_dict(model, optimizer, states, options=option)
        train(model, optimizer, range(3, 5))
        check(model, kind, 5)


@pytest.mark.parametrize(("kind", "stage"), [("dion", 3), ("sides", 2), ("sides", 0), ("4 bits", 1)])
def test_options_of_torchs_functions(kind, stage):
    run_ranks(options, 2, kind, stage)


# - slices of tensor parallelism by torch ------------------------------------------------------------------------------


class Pair(nn.Module):
    """A matrix that is cut by rows and one that is cut by columns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def dion(model):
    return Dion(model.parameters(), lr=0.03, rank_fraction=0.4)


def steps_of(model, optimizer, steps):
    for step in steps:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def over_slices(rank, world, path, stage):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))

    def sharded_pair(stage):
        model = parallelize_module(Pair(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return dsx_zero.shard(model, dion(model), mesh=mesh["dp"], config={"stage": stage, **CONFIG})

    reference = Pair()
    plain_optimizer = dion(reference)
    steps_of(reference, plain_optimizer, range(2))
    model, optimizer = sharded_pair(stage)
    steps_of(model, optimizer, range(2))
    state = dsx_zero.full_state_dict(optimizer, rank0_only=False)
    for number, states in plain_optimizer.state_dict()["state"].items():
        for key, value in states.items():
            torch.testing.assert_close(state["optimizer"]["state"][number][key], value, rtol=1e-4, atol=1e-5)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)
    steps_of(model, optimizer, range(2, 4))
    expected, of_all = whole(model), dsx_zero.full_state_dict(optimizer, rank0_only=False)["model"]

    def same(model, optimizer):
        steps_of(model, optimizer, range(2, 4))
        for name, value in whole(model).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=name)

    for other in (stage, (stage + 2) % 4):
        model, optimizer = sharded_pair(other)
        dsx_zero.load_full_state_dict(optimizer, state)
        same(model, optimizer)
    model, optimizer = sharded_pair((stage + 2) % 4)
    weights, states = get_state_dict(model, optimizer)
    found = {"model": weights, "optimizer": states}
    dcp.load(found, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    same(model, optimizer)
    plain_model = Pair()
    plain_model.load_state_dict(state["model"])
    optimizer = dion(plain_model)
    optimizer.load_state_dict(state["optimizer"])
    steps_of(plain_model, optimizer, range(2, 4))
    for name, value in plain_model.state_dict().items():
        torch.testing.assert_close(value, of_all[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("world", "stage"), [(4, 2), (2, 0)])
def test_states_of_sliced_matrices_are_those_of_the_whole(tmp_path, world, stage):
    run_ranks(over_slices, world, tmp_path / "saved", stage)
