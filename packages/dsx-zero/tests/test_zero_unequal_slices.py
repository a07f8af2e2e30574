"""Matrices of which tensor-parallel ranks have slices of unequal sizes, or fused parts of different shapes (fewer keys
than queries): the update is that of the whole matrices, bitwise, as the plain optimizer makes it without slices.

Gradients are small whole numbers, so that their means over ranks have no rounding.
"""

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from dsx_zero.errors import ZeroOptimizerError
from torch import nn

pytest.importorskip("dsx_ops")
from dsx_ops.optim.dion import Dion
from dsx_ops.optim.muon import Muon

SHAPES = {"vocabulary": (13, 6), "down": (5, 11), "columns": (2, 4, 7), "stack": (5, 3, 4), "heads": (15, 6),
          "qkv": (24, 5), "up": (12, 7)}  # fmt: skip
DIMS = {"vocabulary": 0, "down": 1, "columns": 2, "stack": 0, "heads": 0, "qkv": 0, "up": 0}
QKV = (12, 6, 6)
"""The rows of queries, keys and values; the others have one part."""
HEAD = 3


def lengths(name, rank, size):
    """How long a rank's fused parts are; the first ranks have more."""
    if name == "qkv":
        return [rows // size for rows in QKV]
    unit = HEAD if name == "heads" else 1
    whole, each = divmod(SHAPES[name][DIMS[name]] // unit, size)
    return [unit * (whole + (rank < each))]


def own(name, whole, rank, size):
    dim, pieces, start = DIMS[name], [], 0
    parts = [lengths(name, r, size) for r in range(size)]
    for part in range(len(parts[0])):
        first = start + sum(one[part] for one in parts[:rank])
        pieces.append(whole.narrow(dim, first, parts[rank][part]))
        start += sum(one[part] for one in parts)
    return torch.cat(pieces, dim).contiguous()


class Model(nn.Module):
    def __init__(self, names, rank=0, size=1, *, says_sizes=False):
        super().__init__()
        torch.manual_seed(0)
        self.rank, self.size = rank, size
        for name, shape in SHAPES.items():
            values = own(name, torch.randn(shape), rank, size)
            if name not in names:
                continue
            parameter = nn.Parameter(values)
            if size > 1:
                parameter.tensor_model_parallel, parameter.partition_dim = True, DIMS[name]
                if name == "qkv":
                    parameter.partition_stride = len(QKV)
                    if says_sizes:
                        parameter.partition_sizes = lengths(name, rank, size)
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
    found = []
    if "qkv" in named:
        found.append({"params": [named.pop("qkv")], "split_rows": lengths("qkv", 0, model.size)})
    if "heads" in named:
        heads = named.pop("heads")
        found.append({"params": [heads], "split_rows": [HEAD] * (heads.shape[0] // HEAD)})
    return [*found, {"params": list(named.values()), "stacked": True}]


KINDS = {
    "muon": lambda model: Muon(groups(model), lr=0.03, adjust_lr_fn="match_rms_adamw", weight_decay=0.1),
    "torch's": lambda model: torch.optim.Muon(model.parameters(), lr=0.03),
    "dion": lambda model: Dion(groups(model), lr=0.03, rank_fraction=0.4),
}
NAMES = {"muon": tuple(SHAPES), "torch's": ("vocabulary", "down", "qkv", "up"), "dion": ("qkv", "up")}


def whole(model):
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for n, p in model.named_parameters()}  # fmt: skip


def train(model, optimizer, steps):
    for step in steps:
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def place(world, size):
    registry = dsx_comm.GroupRegistry(dsx_comm.ProcessTopology(("data", "model"), (world // size, size)))
    dsx_comm.parallel_groups.use(registry)
    return registry.axis("model").rank


def same_bits(rank, world, kind, stage, size):
    reference = Model(NAMES[kind])
    train(reference, KINDS[kind](reference), range(3))
    model = Model(NAMES[kind], place(world, size), size, says_sizes=kind == "torch's")
    config = {"stage": stage, "stage3_param_persistence_threshold": 0}
    model, optimizer = dsx_zero.shard(model, KINDS[kind](model), config=config)
    train(model, optimizer, range(3))
    expected = whole(reference)
    for name, value in whole(model).items():
        assert torch.equal(value, own(name, expected[name], model.rank, size)), name


@pytest.mark.parametrize(
    ("kind", "world", "size", "stage"),
    [("muon", 2, 2, 0), ("muon", 4, 2, 1), ("muon", 3, 3, 2), ("muon", 6, 3, 3), ("torch's", 4, 2, 3),
     ("torch's", 3, 3, 0), ("dion", 4, 2, 2), ("dion", 3, 3, 0)],
)  # fmt: skip
def test_training_has_the_bits_of_the_whole_matrices(kind, world, size, stage):
    run_ranks(same_bits, world, kind, stage, size)


def refused(rank, world):
    place(world, 2)
    model = Model(("vocabulary", "up"), rank, 2)
    with pytest.raises(ZeroOptimizerError, match=r"vocabulary: got slices of the shapes \[\(7, 6\), \(6, 6\)\].*Dion"):
        dsx_zero.shard(model, KINDS["dion"](model), config={"stage": 1})
    model = Model(("vocabulary", "up"), rank, 2)
    if rank:
        model.up = nn.Parameter(model.up.detach()[:, :5].clone())
        model.up.tensor_model_parallel, model.up.partition_dim = True, 0
    with pytest.raises(ZeroOptimizerError, match=r"up: got slices of the shapes \[\(6, 7\), \(6, 5\)\]"):
        dsx_zero.shard(model, KINDS["muon"](model), config={"stage": 1})
    model = Model(("qkv", "up"), rank, 2, says_sizes=True)
    model.qkv.partition_sizes = (6, 4)
    with pytest.raises(ZeroOptimizerError, match=r"qkv: got partition_stride=3 .* partition_sizes=\(6, 4\)"):
        dsx_zero.shard(model, KINDS["torch's"](model), config={"stage": 1})


def test_slices_that_make_up_no_tensor_are_refused_by_name():
    run_ranks(refused, 2)
