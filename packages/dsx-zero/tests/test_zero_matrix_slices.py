"""Dion and APOLLO on matrices of which tensor-parallel ranks have slices: the update is that of the whole matrix, with
the bits of the plain optimizer, and the states of a whole matrix go on at another slicing.

Gradients are small whole numbers, so that their means over ranks have no rounding.
"""

import dsx_checkpoint
import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_checkpoint.boxes import Box
from dsx_checkpoint.snapshot import Place
from dsx_testkit import run_ranks
from dsx_zero.errors import ZeroOptimizerError
from torch import nn

pytest.importorskip("dsx_ops")
from dsx_ops.optim.apollo import Apollo
from dsx_ops.optim.coded import Adam4bit
from dsx_ops.optim.dion import Dion

CONFIG = {"stage3_param_persistence_threshold": 0}
SHAPES = {
    "up": (12, 10), "down": (10, 12), "fused": (36, 5), "columns": (4, 5, 12), "stack": (6, 4, 5), "plain": (9, 7),
    "bias": (9,),
}  # fmt: skip
CUTS = {"up": (0, 1), "down": (1, 1), "fused": (0, 3), "columns": (2, 1), "stack": (0, 1)}
OF_MATRICES = ("Q", "exp_avg_low", "exp_avg_sq_low", "steps", "update_norm")


def own(name, whole, rank, size):
    if name not in CUTS:
        return whole
    dim, parts = CUTS[name]
    return torch.cat([part.chunk(size, dim)[rank] for part in whole.chunk(parts, dim)], dim)


class Model(nn.Module):
    """Matrices cut by rows and by columns, fused parts, a stack cut by columns and one by matrices, whole tensors."""

    def __init__(self, rank=0, size=1, names=tuple(SHAPES)):
        super().__init__()
        torch.manual_seed(0)
        self.rank, self.size = rank, size
        for name, shape in SHAPES.items():
            values = own(name, torch.randn(shape), rank, size).contiguous()
            if name not in names:
                continue
            parameter = nn.Parameter(values)
            if size > 1 and name in CUTS:
                parameter.tensor_model_parallel = True
                parameter.partition_dim, parameter.partition_stride = CUTS[name]
            setattr(self, name, parameter)

    def forward(self, seed):
        generator, total = torch.Generator().manual_seed(seed), 0.0
        named = dict(self.named_parameters())
        for name, shape in SHAPES.items():
            numbers = torch.randint(-2, 3, shape, generator=generator).float()
            if name in named:
                total = total + (named[name] * own(name, numbers, self.rank, self.size)).sum()
        return total


def groups(model):
    named = dict(model.named_parameters())
    fused = [named.pop("fused")] if "fused" in named else []
    return [
        *({"params": [p], "split_rows": 3} for p in fused),
        {"params": list(named.values()), "stacked": True},
    ]


KINDS = {
    "dion": lambda model: Dion(groups(model), lr=0.03, rank_fraction=0.4),
    "dion of rank 1": lambda model: Dion(groups(model), lr=0.03, rank=1),
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


def plain(kind, steps, names=tuple(SHAPES)):
    model = Model(names=names)
    optimizer = KINDS[kind](model)
    train(model, optimizer, range(steps))
    return model, optimizer


def sliced(world, kind, stage, size, names=tuple(SHAPES), late=(), **options):
    registry = dsx_comm.GroupRegistry(dsx_comm.ProcessTopology(("data", "model"), (world // size, size)))
    dsx_comm.parallel_groups.use(registry)
    model = Model(registry.axis("model").rank, size, names)
    for name in late:
        model.get_parameter(name).requires_grad_(False)
    return dsx_zero.shard(model, KINDS[kind](model), config={"stage": stage, **CONFIG, **options})


def same_as(model, expected):
    for name, value in whole(model).items():
        assert torch.equal(value, own(name, expected[name], model.rank, model.size)), name


def each(rank, world, check, cases):
    """One case after the other: starting ranks is what takes time."""
    for case in cases:
        try:
            check(rank, world, *case)
        except Exception as error:
            raise AssertionError(f"{check.__name__}{case}") from error


def same_bits(rank, world, kind, stage, size, options):
    model, optimizer = sliced(world, kind, stage, size, **options)
    train(model, optimizer, range(4))
    same_as(model, whole(plain(kind, 4)[0]))


HOST = {"offload_optimizer": {"device": "cpu"}}
TRAINED = {  # ranks -> kind, stage, slices, options
    2: [("dion", 0, 2, {}), ("apollo", 0, 2, {})],
    3: [("dion", 2, 3, {}), ("apollo", 1, 3, {})],
    4: [("dion", 1, 2, {}), ("dion", 3, 2, {}), ("dion of rank 1", 2, 2, {}), ("apollo", 0, 2, {}),
        ("apollo", 3, 2, {}), ("apollo mini", 1, 2, {}), ("dion", 2, 2, HOST), ("apollo", 2, 2, HOST)],
}  # fmt: skip


@pytest.mark.parametrize("world", TRAINED)
def test_training_has_the_bits_of_the_whole_matrices(world):
    run_ranks(each, world, same_bits, TRAINED[world], timeout=240)


def by_state_dict(rank, world, kind):
    model, optimizer = sliced(world, kind, 2, 2)
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()
    other, fresh = sliced(world, kind, 2, 2)
    fresh.load_state_dict(saved)
    train(other, fresh, range(3, 5))
    expected = whole(plain(kind, 5)[0])
    for name, value in whole(other).items():  # the dictionary of a rank has its masters, too
        assert torch.equal(value, own(name, expected[name], other.rank, other.size)), name


def test_a_state_dict_of_this_rank_goes_on():
    run_ranks(each, 4, by_state_dict, [("dion",), ("apollo",)], timeout=240)


def unfrozen_later(rank, world, kind, stage, size):
    """New parameters change the layout, and the states of the others move to their new places."""
    reference, (model, optimizer) = Model(), sliced(world, kind, stage, size, late=("up", "plain"))
    for name in ("up", "plain"):
        reference.get_parameter(name).requires_grad_(False)
    plain_optimizer = KINDS[kind](reference)
    for step in range(4):
        if step == 2:
            for each in (reference, model):
                each.up.requires_grad_(True), each.plain.requires_grad_(True)
            optimizer.replan()
        train(reference, plain_optimizer, [step])
        train(model, optimizer, [step])
    same_as(model, whole(reference))


@pytest.mark.parametrize(("world", "layouts"), [(2, [(0, 2)]), (3, [(2, 1)]), (4, [(1, 2), (3, 2)])])
def test_states_move_to_another_layout(world, layouts):
    run_ranks(
        each, world, unfrozen_later, [(kind, *layout) for kind in ("dion", "apollo") for layout in layouts], timeout=240
    )


# - checkpoints --------------------------------------------------------------------------------------------------------

BOXES = tuple(name for name in SHAPES if name != "fused")


def places(model):
    """Where this rank's tensors lie in the whole ones; fused slices have a name for each rank."""
    found = {}
    for name, parameter in model.named_parameters() if model.size > 1 else ():
        if name == "fused":
            found[name] = Place(f"fused.{model.rank}", tuple(parameter.shape), Box.whole(parameter.shape))
        elif name in CUTS:
            dim, offset = CUTS[name][0], [0] * parameter.dim()
            offset[dim] = model.rank * parameter.shape[dim]
            found[name] = Place(name, SHAPES[name], Box(tuple(offset), tuple(parameter.shape)))
    return found


def save(rank, world, folder, kind, stage, size, names):
    model, optimizer = sliced(world, kind, stage, size, names)
    train(model, optimizer, range(3))
    dsx_checkpoint.save(folder, "here", module=model, slices=optimizer.slices(), state={}, places=places(model))


def go_on(rank, world, folder, kind, stage, size, names):
    model, optimizer = sliced(world, kind, stage, size, names)
    train(model, optimizer, range(world % 2))  # something to be replaced, or no states yet
    found = dsx_checkpoint.load(folder, "here", module=model, optimizer=optimizer, places=places(model))
    assert found is not None
    train(model, optimizer, range(3, 6))
    same_as(model, whole(plain(kind, 6, names)[0]))


@pytest.mark.parametrize(
    ("source", "target"),  # (ranks, slices, stage)
    [((4, 2, 3), (3, 3, 2)), ((2, 2, 0), (4, 1, 3)), ((2, 1, 2), (4, 2, 1)), ((3, 3, 1), (2, 2, 0))],
    ids=str,
)
def test_a_checkpoint_goes_on_with_the_same_bits_at_another_slicing(tmp_path, source, target):
    def cases(size, stage):
        return [(str(tmp_path / kind), kind, stage, size, BOXES) for kind in ("dion", "apollo")]

    run_ranks(each, source[0], save, cases(*source[1:]), timeout=240)
    for kind in ("dion", "apollo"):
        model, optimizer = plain(kind, 3, BOXES)
        reader, compared = dsx_checkpoint.open_checkpoint(tmp_path / kind, "here"), 0
        for name, parameter in model.named_parameters():
            for key in OF_MATRICES:
                if (value := optimizer.state[parameter].get(key)) is not None:
                    assert torch.equal(reader.stored("optimizer", f"{key}/{name}"), value), (name, key)
                    compared += 1
        assert compared >= 5
    run_ranks(each, target[0], go_on, cases(*target[1:]), timeout=240)


@pytest.mark.parametrize(("kind", "size"), [("dion", 2), ("apollo", 3), ("apollo mini", 3)])
def test_fused_slices_go_on_at_the_same_slicing(tmp_path, kind, size):
    run_ranks(save, size, str(tmp_path), kind, 2, size, tuple(SHAPES))
    run_ranks(go_on, 2 * size if size == 2 else size, str(tmp_path), kind, 3, size, tuple(SHAPES))


def other_rank(rank, world, folder):
    model = Model(names=BOXES)
    optimizer = Dion(groups(model), lr=0.03, rank_fraction=0.2)
    model, optimizer = dsx_zero.shard(model, optimizer, config={"stage": 2, **CONFIG})
    before = whole(model)
    with pytest.raises(
        dsx_checkpoint.CheckpointError, match=r"'Q' of 'up'.*expected \(10, 2\).*settings that were saved"
    ):
        dsx_checkpoint.load(folder, "here", module=model, optimizer=optimizer)
    assert all(torch.equal(value, before[name]) for name, value in whole(model).items())


def test_states_of_another_rank_are_refused_and_nothing_changes(tmp_path):
    """A basis with fewer columns would otherwise be a piece of the stored one."""
    run_ranks(save, 2, str(tmp_path), "dion", 2, 2, BOXES)
    run_ranks(other_rank, 2, str(tmp_path))


# - refusals -----------------------------------------------------------------------------------------------------------


def refused(rank, world):
    registry = dsx_comm.GroupRegistry(dsx_comm.ProcessTopology(("data", "model"), (1, 2)))
    dsx_comm.parallel_groups.use(registry)
    model = Model(rank, 2)
    optimizer = KINDS["dion"](model)
    train(model, optimizer, range(1))
    with pytest.raises(
        ZeroOptimizerError, match=r"Dion has made steps with slices of fused, up, down.*before the first step"
    ):
        dsx_zero.shard(model, optimizer, config={"stage": 1})
    optimizer.state.clear()
    dsx_zero.shard(model, optimizer, config={"stage": 1})

    model = Model(rank, 2)
    del model.up.partition_dim
    with pytest.raises(ZeroOptimizerError, match=r"slice of up.*partition_dim"):
        dsx_zero.shard(model, KINDS["apollo"](model), config={"stage": 1})


def test_what_cannot_be_joined_is_refused_by_name():
    run_ranks(refused, 2)


def scales(rank, world, folder):
    """Scales of coded moments belong to blocks of the slice, and not of the whole tensor."""
    registry = dsx_comm.GroupRegistry(dsx_comm.ProcessTopology(("data", "model"), (1, 2)))
    dsx_comm.parallel_groups.use(registry)
    model = Model(rank, 2, BOXES)
    model, optimizer = dsx_zero.shard(model, Adam4bit(model.parameters()), config={"stage": 1})
    train(model, optimizer, range(1))
    with pytest.raises(dsx_checkpoint.CheckpointError, match=r"part of the tensor.*cannot be joined"):
        dsx_checkpoint.save(folder, "here", module=model, slices=optimizer.slices(), state={}, places=places(model))


def test_scales_of_slices_are_still_refused(tmp_path):
    run_ranks(scales, 2, str(tmp_path))
