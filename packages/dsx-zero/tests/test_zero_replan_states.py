"""What a model that was given a new layout keeps: masters, states, accessors, slices, hooks, and the memory of
before.
"""

from __future__ import annotations

import dsx_zero
import pytest
import torch
from dsx_testkit import MemoryStore, run_ranks, tiny


def built(stage, place="none", dtype=torch.bfloat16, store=None, threshold=0, make=None):
    model = tiny.MLP(depth=5).to(dtype)
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(("layers.2", "layers.4", "layers.3.bias")))
    config = {"stage": stage, "stage3_param_persistence_threshold": threshold}
    if place != "none":
        config["offload_optimizer"] = {"device": place}
        if stage == 3:
            config["offload_param"] = {"device": place, **({"max_in_cpu": 0} if place == "nvme" else {})}
    make = make or (lambda params: torch.optim.AdamW(params, lr=0.05))
    store = MemoryStore() if store is None else store
    return dsx_zero.shard(model, make(list(model.parameters())), config=config, store=store)


def train(model, optimizer, rank, seed=0):
    x, y = model.example(3, seed=seed + rank)
    model.loss(x.to(next(model.parameters()).dtype), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def states(model):
    found = {}
    for name, p in model.named_parameters():
        master = dsx_zero.safe_get_full_fp32_param(p)
        if master is not None:
            found[name] = (master, *(dsx_zero.safe_get_full_optimizer_state(p, k) for k in ("exp_avg", "exp_avg_sq")))
    return found


def unfreeze(model):
    for p in model.parameters():
        p.requires_grad_(True)


def keeps(rank, world, stage, place):
    store = MemoryStore()
    model, optimizer = built(stage, place, store=store)
    for step in range(3):
        train(model, optimizer, rank, step)
    with torch.no_grad():  # an edit that no step has seen: it must not be lost, nor the digits beside it
        dsx_zero.safe_set_full_fp32_param(model.layers[2].bias, torch.full((16,), 1.0 + 2.0**-12))
    before = states(model)
    optimizer.replan()  # nothing to do
    unfreeze(model)
    optimizer.replan()
    after = states(model)
    assert set(before) < set(after) == {name for name, _ in model.named_parameters()}
    for name, values in before.items():
        for old, new in zip(values, after[name], strict=True):
            assert torch.equal(old, new), (stage, place, name)
    assert all(v[1] is None for n, v in after.items() if n not in before)  # states come with their first step
    train(model, optimizer, rank, 3)
    for name, p in model.named_parameters():
        local = dsx_zero.safe_get_local_optimizer_state(p, "exp_avg")
        assert torch.equal(dsx_zero.safe_get_full_optimizer_state(p, "exp_avg"), states(model)[name][1])
        if local is not None and local.numel():
            dsx_zero.safe_set_local_optimizer_state(p, local * 0 + 3, "exp_avg")
        elif local is not None:
            dsx_zero.safe_set_local_optimizer_state(p, local, "exp_avg")
    assert all((v[1] == 3).all() for v in states(model).values())
    # The bytes are those of a model that was sharded so in the beginning.
    twin, other = dsx_zero.shard(
        tiny.MLP(depth=5).bfloat16(),
        lambda p: torch.optim.AdamW(p, lr=0.05),
        config=section(stage, place),
        store=MemoryStore(),
    )
    train(twin, other, rank)
    assert optimizer.state_bytes_by_tier() == other.state_bytes_by_tier()
    if place == "nvme":  # what moved has left nothing on disk
        assert sum(t.nbytes for t in store.tensors.values()) == sum(t.nbytes for t in other.store.tensors.values())


def section(stage, place):
    config = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if place != "none":
        config["offload_optimizer"] = {"device": place}
        if stage == 3:
            config["offload_param"] = {"device": place, **({"max_in_cpu": 0} if place == "nvme" else {})}
    return config


@pytest.mark.parametrize("world", [1, 2])
def test_masters_and_states_keep_their_bits(world):
    for stage, place in (
        ((0, "none"), (2, "nvme"), (3, "cpu")) if world == 1 else ((1, "none"), (2, "cpu"), (3, "nvme"))
    ):
        run_ranks(keeps, world, stage, place)


def same_memory(rank, world):
    model, optimizer = built(2, dtype=torch.float32)
    train(model, optimizer, rank)
    # Units of their own, so that some do not change.
    model, optimizer = dsx_zero.shard(
        frozen(tiny.MLP(depth=5)),
        lambda p: torch.optim.AdamW(p, lr=0.05),
        config={"stage": 3, "stage3_param_persistence_threshold": 0},
    )
    train(model, optimizer, rank)
    shards = {n: p.local_shard.data_ptr() for n, p in model.named_parameters()}
    faces = dict(model.named_parameters())
    optimizer.add_param_group({"params": [unfrozen(p) for p in model.layers[0].parameters()]})
    assert all(p is faces[n] for n, p in model.named_parameters())
    moved = {n for n, p in model.named_parameters() if p.local_shard.data_ptr() != shards[n]}
    assert "layers.0.weight" in moved <= {"layers.0.weight", "layers.0.bias"}


def frozen(model):
    for p in model.layers[0].parameters():
        p.requires_grad_(False)
    return model


def unfrozen(p):
    return p.requires_grad_(True)


def test_units_that_do_not_change_stay_where_they_are():
    run_ranks(same_memory, 2)


def hooks(rank, world, stage):
    model, optimizer = built(stage, dtype=torch.float32, threshold=20)
    seen = []
    kept = model.layers[2].weight.register_hook(lambda grad: seen.append("weight"))
    model.layers[4].weight.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p.shape)))
    handle = model.register_forward_hook(lambda *arguments: seen.append("forward"))
    train(model, optimizer, rank)
    assert sorted(map(str, seen)) == ["(4, 16)", "forward", "weight"]
    unfreeze(model)
    train(model, optimizer, rank)
    assert sorted(map(str, seen)) == ["(4, 16)"] * 2 + ["forward"] * 2 + ["weight"] * 2
    kept.remove()
    handle.remove()
    train(model, optimizer, rank)
    assert len(seen) == 7


def test_hooks_of_users_stay():
    for stage in (0, 2, 3):
        run_ranks(hooks, 2, stage)


def external(rank, world):
    """A module that uses another one's parameter in its forward goes on to find it gathered."""

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])

        def forward(self, x):
            return self.blocks[1](x) + torch.nn.functional.linear(x, self.blocks[0].weight)

    torch.manual_seed(0)
    model = Outer()
    model.blocks[1].requires_grad_(False)
    model, optimizer = dsx_zero.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config={"stage": 3, "stage3_param_persistence_threshold": 0}
    )
    dsx_zero.register_external_parameter(model.blocks[1], model.blocks[0].weight)
    for step in range(4):
        if step == 2:
            model.blocks[1].requires_grad_(True)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    stage = optimizer.runtime.publisher
    used = [n for m, n in stage.hooks._forwards.by_module.items() if m is model.blocks[1]]
    assert [len(units) for units in used] == [2]


def test_external_parameters_stay_registered():
    run_ranks(external, 2)


@pytest.mark.parametrize("kind", ["lion", "cpu adam", "adam8bit", "adam4bit", "adafactor", "muon", "nadam"])
def test_other_optimizers(kind):
    run_ranks(other_optimizers, 2, kind)


def other_optimizers(rank, world, kind):
    """The losses are those of the same training without sharding in parts (stage 0)."""
    import dsx_ops

    makes = {
        "lion": lambda p: dsx_ops.FusedLion(p, lr=1e-2),
        "cpu adam": lambda p: dsx_ops.CPUAdam(p, lr=1e-2),
        "adam8bit": lambda p: dsx_ops.Adam8bit(p, lr=1e-2),
        "adam4bit": lambda p: dsx_ops.Adam4bit(p, lr=1e-2),
        "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
        "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=1e-2),
        "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    }
    results = []
    for stage in (0, 2, 3):
        model, optimizer = built(stage, dtype=torch.float32, make=makes[kind])
        for step in range(5):
            if step == 2:
                for p in model.parameters():
                    p.requires_grad_(p.dim() == 2 or kind != "muon")
            train(model, optimizer, rank, step)
        with dsx_zero.GatheredParameters(model), torch.no_grad():
            results.append([p.detach().clone() for p in model.parameters()])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
