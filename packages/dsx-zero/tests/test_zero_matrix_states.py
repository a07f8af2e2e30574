"""Optimizers with states of whole matrices (Dion, APOLLO) on equal slices: the states are divided in proportion, travel
with the matrices, and training has the bits of the plain optimizer's at every stage and number of ranks.

Gradients are small whole numbers, so that their means over ranks have no rounding.
"""

import dsx_checkpoint
import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from dsx_zero.errors import ZeroOptimizerError
from dsx_zero.plan.matrices import MatrixState
from torch import nn

pytest.importorskip("dsx_ops")
from dsx_ops.optim.apollo import Apollo
from dsx_ops.optim.dion import Dion

CONFIG = {"stage3_param_persistence_threshold": 0}
OF_MATRICES = ("Q", "exp_avg_low", "exp_avg_sq_low", "steps", "update_norm")
LAYOUTS = [((2, 3), (4, 1)), ((4, 2), (1, 3)), ((1, 0), (2, 2)), ((3, 1), (2, 0)), ((2, 0), (3, 3))]


class Model(nn.Module):
    """Matrices of several forms, a stack, fused rows of unequal sizes, one column, vectors; an empty and a tied one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(12, 20) for _ in range(3))
        self.qkv = nn.Parameter(torch.randn(20, 9))
        self.experts = nn.Parameter(torch.randn(5, 4, 6))
        self.tall, self.column = nn.Parameter(torch.randn(33, 2)), nn.Parameter(torch.randn(7, 1))
        self.scale, self.nothing = nn.Parameter(torch.randn(7)), nn.Parameter(torch.zeros(0, 3))
        self.tied = nn.Linear(12, 20, bias=False)
        self.tied.weight = self.blocks[0].weight

    def forward(self, seed):
        generator, total = torch.Generator().manual_seed(seed), 0.0
        for parameter in self.parameters():
            total = total + (parameter * torch.randint(-2, 3, parameter.shape, generator=generator).float()).sum()
        return total


def groups(model):
    named = dict(model.named_parameters())
    own = {"qkv": {"split_rows": [8, 7, 5]}, "experts": {"stacked": True}}
    rest = [p for name, p in named.items() if name not in own]
    return [*({"params": [named[name]], **more} for name, more in own.items()), {"params": rest}]


KINDS = {
    "dion": lambda model: Dion(groups(model), lr=0.03, rank_fraction=0.4),
    "dion of rank 1": lambda model: Dion(groups(model), lr=0.03, rank=1, mu=0.5),
    "apollo": lambda model: Apollo(groups(model), lr=0.03, rank=3, update_proj_gap=2, weight_decay=0.1),
    "apollo mini": lambda model: Apollo(groups(model), lr=0.03, rank=1, alpha=11.3, scale_type="tensor"),
}


def whole(model):
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for n, p in model.named_parameters()}  # fmt: skip


def train(model, optimizer, steps):
    for step in steps:
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain(kind, steps):
    model = Model()
    optimizer = KINDS[kind](model)
    train(model, optimizer, range(steps))
    return model, optimizer


def sharded(kind, stage, **options):
    model = Model()
    return dsx_zero.shard(model, KINDS[kind](model), config={"stage": stage, **CONFIG, **options})


def same_bits(rank, world, kind, stage, options):
    expected = whole(plain(kind, 4)[0])
    model, optimizer = sharded(kind, stage, **options)
    train(model, optimizer, range(4))
    for name, value in whole(model).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("kind", "world", "stage"),
    [("dion", 1, 3), ("dion", 2, 1), ("dion", 3, 2), ("dion", 4, 3), ("dion", 2, 0), ("dion of rank 1", 4, 2),
     ("apollo", 1, 2), ("apollo", 2, 3), ("apollo", 4, 1), ("apollo", 2, 0), ("apollo mini", 3, 3)],
)  # fmt: skip
def test_training_has_the_bits_of_the_plain_optimizer(kind, world, stage):
    run_ranks(same_bits, world, kind, stage, {})


@pytest.mark.parametrize("kind", ["dion", "apollo"])
def test_states_on_the_host_have_the_same_bits(kind):
    run_ranks(same_bits, 2, kind, 2, {"offload_optimizer": {"device": "cpu"}})


# - the division of states ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 7, 64])
def test_every_element_of_a_state_has_one_place(world):
    state = MatrixState((17,), ((20, 6), (5, 10), (9, 0), (40, 1)))
    cuts = [rank * 74 // world for rank in range(world + 1)]
    places = [state.at(cut) for cut in cuts]
    assert places[0] == 0 and places[-1] == 17 and places == sorted(places)


def held(rank, world, kind):
    model, optimizer = sharded(kind, 3)
    train(model, optimizer, range(1))
    found = {}
    for part in optimizer.slices():
        for state in part.shaped:
            found[part.name, state.key] = (state.shape, state.start, state.values)
    return found


@pytest.mark.parametrize("kind", ["dion", "apollo"])
def test_ranks_have_the_plain_states_in_parts(kind):
    model, optimizer = plain(kind, 1)
    by_rank = run_ranks(held, 3, kind)
    sizes = [0, 0, 0]
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            if key not in OF_MATRICES:
                continue
            joined = []
            for rank, found in enumerate(by_rank):
                if (name, key) in found:
                    shape, start, values = found[name, key]
                    assert tuple(shape) == tuple(value.shape) and start == sum(map(len, joined))
                    joined.append(values)
                    sizes[rank] += len(values)
            assert torch.equal(torch.cat(joined), value.reshape(-1)), (name, key)
    assert max(sizes) < 0.6 * sum(sizes)


# - checkpoints, state dicts, frozen parameters, refusals --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dion", "apollo"])
@pytest.mark.parametrize("source,target", LAYOUTS, ids=str)
def test_a_checkpoint_goes_on_with_the_same_bits_in_another_layout(tmp_path, kind, source, target):
    run_ranks(save, source[0], str(tmp_path), kind, source[1])
    model, optimizer = plain(kind, 3)
    reader = dsx_checkpoint.open_checkpoint(tmp_path, "here")
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            if value.numel() > 1:
                assert torch.equal(reader.stored("optimizer", f"{key}/{name}"), value), (name, key)
    run_ranks(go_on, target[0], str(tmp_path), kind, target[1])


def save(rank, world, folder, kind, stage):
    model, optimizer = sharded(kind, stage)
    train(model, optimizer, range(3))
    dsx_checkpoint.save(folder, "here", module=model, slices=optimizer.slices(), state={})


def go_on(rank, world, folder, kind, stage):
    expected = whole(plain(kind, 6)[0])
    model, optimizer = sharded(kind, stage)
    train(model, optimizer, range(world % 2))  # something to be replaced, or no states yet
    assert dsx_checkpoint.load(folder, "here", module=model, optimizer=optimizer) is not None
    train(model, optimizer, range(3, 6))
    for name, value in whole(model).items():
        assert torch.equal(value, expected[name]), name


def by_state_dict(rank, world, kind):
    expected = whole(plain(kind, 5)[0])
    model, optimizer = sharded(kind, 2)
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()
    other, fresh = sharded(kind, 2)
    fresh.load_state_dict(saved)
    train(other, fresh, range(3, 5))
    for name, value in whole(other).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("kind", ["dion", "apollo"])
def test_a_state_dict_of_this_rank_goes_on(kind):
    run_ranks(by_state_dict, 2, kind)


def sharded_later(rank, world, kind):
    expected = whole(plain(kind, 5)[0])
    model, optimizer = plain(kind, 2)
    model, optimizer = dsx_zero.shard(model, optimizer, config={"stage": 2})
    train(model, optimizer, range(2, 5))
    for name, value in whole(model).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("kind", ["dion", "apollo"])
def test_an_optimizer_that_has_stepped_is_sharded_with_its_states(kind):
    run_ranks(sharded_later, 3, kind)


def frozen_for_a_while(rank, world, kind):
    """A frozen matrix drops out of the messages, and goes on later with its states."""
    reference = Model()
    plain_optimizer = KINDS[kind](reference)
    model, optimizer = sharded(kind, 2)
    for step in range(4):
        for each in (reference, model):
            each.experts.requires_grad_(step != 2)
        train(reference, plain_optimizer, [step])
        train(model, optimizer, [step])
    expected = whole(reference)
    for name, value in whole(model).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("kind", ["dion", "apollo"])
def test_a_matrix_that_is_frozen_for_a_while(kind):
    run_ranks(frozen_for_a_while, 2, kind)


def refused(rank, world, kind):
    model, optimizer = sharded(kind, 2)
    train(model, optimizer, range(1))
    model(1).backward()
    optimizer.param_groups[0]["rank"] = 4
    with pytest.raises(ZeroOptimizerError, match=r"param_groups\[0\].*was changed.*their rank before"):
        optimizer.step()


@pytest.mark.parametrize("kind", ["dion", "apollo"])
def test_what_cannot_work_is_refused(kind):
    run_ranks(refused, 2, kind)


def counted(rank, world, kind):
    import dsx_comm

    sent, plain_all_to_all = [], dsx_comm.all_to_all_single

    def all_to_all(output, source, receive, send, **options):
        sent.append((source.numel(), output.numel()))
        return plain_all_to_all(output, source, receive, send, **options)

    dsx_comm.all_to_all_single = all_to_all
    try:
        model, optimizer = sharded(kind, 3)
        train(model, optimizer, range(1))
    finally:
        dsx_comm.all_to_all_single = plain_all_to_all
    return sum(source for source, _ in sent)


@pytest.mark.parametrize(("kind", "results"), [("dion", 2), ("apollo", 1)])
def test_what_travels(kind, results):
    """Each element once to its owner and once per result back, and each element of a state there and back."""
    model, optimizer = plain(kind, 1)
    elements = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    states = sum(
        value.numel()
        for p in model.parameters()
        for key, value in optimizer.state.get(p, {}).items()
        if key in OF_MATRICES
    )
    assert sum(run_ranks(counted, 3, kind)) == (1 + results) * elements + 2 * states
