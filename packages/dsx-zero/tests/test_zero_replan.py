"""Groups that are added and parameters that are unfrozen while training: bit for bit what plain torch does with them,
in every stage, dtype and place of state.
"""

from __future__ import annotations

import dsx_zero
import pytest
import torch
from dsx_testkit import MemoryStore, run_ranks, tiny


def adamw(params):
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


def momentum(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


class Plain:
    """The same training without sharding: every rank's gradient of a replica, their mean, a plain optimizer on fp32
    masters.
    """

    def __init__(self, model, make, dtype, held):
        self.model, self.dtype = model.to(dtype), dtype
        self.masters = {n: torch.nn.Parameter(p.detach().float().clone()) for n, p in self.model.named_parameters()}
        self.optimizer = make([self.masters[name] for name in held])

    def add(self, names, **options):
        self.optimizer.add_param_group({"params": [self.masters[name] for name in names], **options})

    def step(self, batches):
        sums = {}
        for x, y in batches:
            self.model.zero_grad()
            self.model.loss(x.to(self.dtype), y).backward()
            for name, p in self.model.named_parameters():
                if p.requires_grad:
                    sums[name] = sums[name] + p.grad if name in sums else p.grad.clone()
        for name, grad in sums.items():
            self.masters[name].grad = (grad / len(batches)).float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.masters[name])


def section(stage, place):
    found = {"stage": stage, "stage3_param_persistence_threshold": 20}
    if place != "none":
        found["offload_optimizer"] = {"device": place}
        if stage == 3:
            found["offload_param"] = {"device": place, **({"max_in_cpu": 0} if place == "nvme" else {})}
    return found


def whole(model):
    with dsx_zero.GatheredParameters(model), torch.no_grad():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def batches(model, world, step):
    return [model.example(3, seed=100 * step + rank) for rank in range(world)]


def check_equal(model, plain, where):
    found = whole(model)
    for name, p in plain.model.named_parameters():
        assert torch.equal(found[name], p.detach()), (where, name)


UNFREEZES = {
    2: ["layers.1.bias"],
    3: ["layers.1.weight", "layers.0.weight"],
    5: ["layers.0.bias"],
    7: ["layers.2.weight"],
}
FREEZES = {4: ["layers.1.weight"], 6: ["layers.2.weight"]}


def unfreezing(rank, world, stage, place, dtype, make):
    """Parameters that the optimizer has held all the time begin and stop to train."""
    dtype = getattr(torch, dtype)
    model, reference = tiny.MLP(depth=5), tiny.MLP(depth=5)
    for each in (model, reference):
        for name, p in each.named_parameters():
            p.requires_grad_(not name.startswith(("layers.0", "layers.1")))
    names = [name for name, _ in model.named_parameters()]
    plain = Plain(reference, make, dtype, names)
    model = model.to(dtype)
    model, optimizer = dsx_zero.shard(
        model, make(list(model.parameters())), config=section(stage, place), store=MemoryStore()
    )
    for step in range(9):
        for value, changes in ((True, UNFREEZES), (False, FREEZES)):
            for name in changes.get(step, ()):
                model.get_parameter(name).requires_grad_(value)
                reference.get_parameter(name).requires_grad_(value)
        mine = batches(model, world, step)
        model.loss(mine[rank][0].to(dtype), mine[rank][1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.step(mine)
        check_equal(model, plain, (stage, place, step))
    assert all(p.requires_grad == q.requires_grad for p, q in zip(model.parameters(), reference.parameters()))


def adding(rank, world, stage, place, dtype, make):
    """A head trains first; two groups of the rest come later, as fine-tuning schedules do."""
    dtype = getattr(torch, dtype)
    model, reference = tiny.MLP(depth=5), tiny.MLP(depth=5)
    names = [name for name, _ in model.named_parameters()]
    head = [name for name in names if name.startswith(("layers.4", "layers.2"))]
    for each in (model, reference):
        for name in names:
            each.get_parameter(name).requires_grad_(name in head)
    plain = Plain(reference, make, dtype, head)
    model = model.to(dtype)
    model, optimizer = dsx_zero.shard(
        model, make([model.get_parameter(name) for name in head]), config=section(stage, place), store=MemoryStore()
    )
    for step in range(6):
        if step in (2, 4):  # at 4 the gradients of the step before are still there
            added = [name for name in names if name.startswith("layers.3" if step == 2 else ("layers.0", "layers.1"))]
            for each in (model, reference):
                for name in added:
                    each.get_parameter(name).requires_grad_(True)
            optimizer.add_param_group({"params": (model.get_parameter(name) for name in added), "lr": 0.01 * step})
            plain.add(added, lr=0.01 * step)
            assert [len(group["params"]) for group in optimizer.param_groups] == [
                len(group["params"]) for group in plain.optimizer.param_groups
            ]
            assert optimizer.param_groups[-1]["lr"] == 0.01 * step
        mine = batches(model, world, step)
        loss = model.loss(mine[rank][0].to(dtype), mine[rank][1])
        optimizer.zero_grad()  # behind the forward, as Lightning does
        loss.backward()
        optimizer.step()
        if step != 3:
            optimizer.zero_grad()
        plain.step(mine)
        check_equal(model, plain, (stage, place, step))


CASES = [(stage, place) for stage in range(4) for place in ("none", "cpu", "nvme") if stage or place == "none"]
SOME = [(0, "none"), (1, "none"), (2, "cpu"), (3, "none"), (3, "nvme")]


@pytest.mark.parametrize("kind", [unfreezing, adding])
@pytest.mark.parametrize("world", [1, 2])
def test_as_plain_torch(kind, world):
    for stage, place in SOME:
        run_ranks(kind, world, stage, place, "float32", adamw)
    for stage, place in ((0, "none"), (2, "none"), (3, "cpu")):
        run_ranks(kind, world, stage, place, "bfloat16", momentum)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [unfreezing, adding])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world", [1, 2])
def test_as_plain_torch_everywhere(kind, world, dtype):
    for stage, place in CASES:
        for make in (adamw, momentum):
            run_ranks(kind, world, stage, place, dtype, make)
