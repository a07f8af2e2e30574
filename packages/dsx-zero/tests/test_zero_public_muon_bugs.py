"""What Muon did silently wrong elsewhere, as a table. Training here has to be that of `torch.optim.Muon` in one
process, and not what the bug would have given, which each row computes as well.
"""

import dsx_comm
import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

STEPS, CLIP, CLOSE = 3, 2.0, 2e-4


class Row:
    """A way to train, and the bug that it showed elsewhere.

    Args:
        bug: what went wrong, as `wrong` computes it.
        world, stage: of the sharded training; slices: tensor-parallel ranks among them.
        micro: micro-batches per step.
        clip: None, "step" (`step(max_norm=)`) or "hand" (torch's `clip_grad_norm_`).
        init: whether the model is made inside of `Init`.
        dtype: of the model; masters have 32 bits.
    """

    def __init__(self, bug, *, world=2, stage=3, slices=1, micro=1, clip=None, init=False, ns_steps=5, dtype=None):
        self.bug, self.world, self.stage, self.slices, self.micro = bug, world, stage, slices, micro
        self.clip, self.init, self.ns_steps, self.dtype = clip, init, ns_steps, dtype or torch.float32


TABLE = {
    "stage 0 trained with SGD": Row("sgd", stage=0),
    "16-bit models trained with SGD": Row("sgd", stage=1, dtype=torch.bfloat16),
    "parameters made inside of Init trained with SGD": Row("sgd", init=True),
    "each micro-batch was orthogonalised, and the results were added": Row("each micro-batch", micro=4),
    "the same at stage 2": Row("each micro-batch", micro=4, stage=2),
    "gradients were clipped after orthogonalisation": Row("not clipped", clip="step"),
    "the same with clipping by hand and micro-batches": Row("not clipped", clip="hand", micro=2, stage=2),
    "slices of ZeRO were orthogonalised": Row("slices", stage=1),
    "the same on three ranks, which cut inside of rows": Row("slices", world=3),
    "slices of tensor parallelism were orthogonalised": Row("slices", slices=2, stage=0),
    "the same beside ZeRO": Row("slices", world=4, slices=2, stage=1),
    "ns_steps was ignored": Row("ns_steps", ns_steps=2),
}


class Model(nn.Module):
    """Matrices whose gradients are small whole numbers: sums over ranks and micro-batches have no rounding."""

    SHAPES = {"up": (12, 8), "down": (8, 12), "square": (10, 10)}

    def __init__(self, slices=1, part=0):
        super().__init__()
        torch.manual_seed(0)
        self.slices, self.part = slices, part
        for name, shape in self.SHAPES.items():
            parameter = nn.Parameter(self.own(torch.randn(shape)).clone())
            if slices > 1:
                parameter.tensor_model_parallel, parameter.partition_dim = True, 0
            setattr(self, name, parameter)

    def own(self, whole):
        return whole.chunk(self.slices)[self.part]

    def forward(self, seed):
        draw, total = torch.Generator().manual_seed(seed), 0.0
        for name, shape in self.SHAPES.items():
            numbers = torch.randint(-3, 4, shape, generator=draw).to(getattr(self, name).dtype)
            total = total + (getattr(self, name) * self.own(numbers)).sum()
        return total


def muon(params, ns_steps):
    return torch.optim.Muon(params, lr=0.05, momentum=0.75, weight_decay=0.1, ns_steps=ns_steps)


def train(model, optimizer, row, clip):
    for step in range(STEPS):
        for micro in range(row.micro):
            (model(10 * step + micro) / row.micro).backward()
        clip()
        optimizer.step(**({"max_norm": CLIP} if row.clip == "step" and hasattr(optimizer, "inner") else {}))
        optimizer.zero_grad()


def clipping(model):
    return lambda: torch.nn.utils.clip_grad_norm_(list(model.parameters()), CLIP)


def right(row):
    """One process, torch's own optimizer."""
    model = Model()
    train(model, muon(model.parameters(), row.ns_steps), row, clipping(model) if row.clip else lambda: None)
    return {name: p.detach() for name, p in model.named_parameters()}


def wrong(row):
    """What the bug gives."""
    model = Model()
    params = list(model.parameters())
    if row.bug == "sgd":
        train(model, torch.optim.SGD(params, lr=0.05, momentum=0.75, weight_decay=0.1), row, lambda: None)
    elif row.bug == "not clipped":
        train(model, muon(params, row.ns_steps), row, lambda: None)
    elif row.bug == "ns_steps":
        train(model, muon(params, 5), row, lambda: None)
    elif row.bug == "each micro-batch":
        optimizer = muon(params, row.ns_steps)
        optimizer.param_groups[0]["lr"] /= row.micro
        for step in range(STEPS):
            for micro in range(row.micro):
                model(10 * step + micro).backward()
                optimizer.step()
                optimizer.zero_grad()
    else:
        halves = [Model(2, part) for part in range(2)]
        for half in halves:
            train(half, muon(half.parameters(), row.ns_steps), row, lambda: None)
        return {name: torch.cat([getattr(half, name).detach() for half in halves]) for name in Model.SHAPES}
    return {name: p.detach() for name, p in model.named_parameters()}


def sharded(rank, world, title):
    row, part = TABLE[title], 0
    if row.slices > 1:
        shape = (world // row.slices, row.slices)
        registry = dsx_comm.GroupRegistry(dsx_comm.ProcessTopology(("data", "model"), shape))
        dsx_comm.parallel_groups.use(registry)
        part = registry.axis("model").rank
    config = {"stage": row.stage, "stage3_param_persistence_threshold": 0}
    if row.init:
        with dsx_zero.Init():
            model = Model()
    else:
        model = Model(row.slices, part).to(row.dtype)
    model, optimizer = dsx_zero.shard(model, lambda params: muon(params, row.ns_steps), config=config)
    train(model, optimizer, row, clipping(model) if row.clip == "hand" else lambda: None)
    whole = {n: (p.full_tensor() if row.stage == 3 else p).detach().clone() for n, p in model.named_parameters()}
    return part, whole


@pytest.mark.parametrize("title", TABLE)
def test_training_is_that_of_torchs_muon(title):
    row = TABLE[title]
    expected, bug = right(row), wrong(row)
    bound = CLOSE if row.dtype == torch.float32 else 2e-2  # weights of 1 to 3 in 8 bits
    for part, found in run_ranks(sharded, row.world, title):
        for name, value in expected.items():
            own = value.chunk(row.slices)[part]
            assert float((found[name] - own).abs().max()) <= bound, name
    assert all(float((bug[name] - value).abs().max()) > 4 * bound for name, value in expected.items())
