"""Keys of `offload_optimizer` for state on disk: each has an effect that its user can see, and none changes a bit.

Gradients on disk are read once per step: their norm is taken when they are written.
"""

from __future__ import annotations

import dsx_zero
import pytest
import torch
from dsx_testkit import MemoryStore, run_ranks
from dsx_zero.step.plan import Kind
from torch import nn

WIDTH = 32


class Noting(MemoryStore):
    """A store that notes what is read and written, and until when writes are under way."""

    def __init__(self):
        super().__init__()
        self.events, self.under_way, self.most = [], 0, 0

    def put(self, name, tensor):
        self.events.append(("write", name))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        super().put(name, tensor)
        return Later(self)

    def get(self, name, out=None):
        self.events.append(("read", name))
        return super().get(name, out)

    def take(self):
        events, self.events = self.events, []
        return events


class Later:
    """Under way until it is waited for."""

    def __init__(self, store):
        self.store = store

    def wait(self):
        if self.store is not None:
            self.store.under_way -= 1
        self.store = None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def fused(parameters):
    import dsx_ops

    return dsx_ops.FusedAdam(parameters, lr=1e-2)


def built(optimizer=adamw, stage=3, parameters="none", **section):
    store = Noting()
    offload = {"device": "nvme", **section}
    config = {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 300}
    config["offload_optimizer"] = offload
    if parameters != "none":
        config["offload_param"] = {"device": parameters, "max_in_cpu": 0}
    model, sharded = dsx_zero.shard(Net(), optimizer, config=config, store=store)
    return model, sharded, store


def train(model, optimizer, steps=3, rank=0):
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(4, WIDTH, generator=generator)).backward()
        optimizer.step(max_norm=0.5)
        optimizer.zero_grad()
    with dsx_zero.GatheredParameters(model):
        return [p.detach().clone() for p in model.parameters()]


def fetched_ahead(plan):
    """The most sub-groups that are fetched and not yet stepped when one is stepped, besides itself."""
    fetched, most = 0, 0
    for action in plan.actions:
        fetched += action.kind is Kind.FETCH
        if action.kind is Kind.STEP:
            fetched -= 1
            most = max(most, fetched)
    return most


def test_how_far_states_are_read_ahead_and_written_behind():
    cases = [({}, 1), ({"buffer_count": 7}, 1), ({"buffer_count": 8}, 2), ({"pipeline_read": True}, 1),
             ({"pipeline_read": False}, 0), ({"pipeline_read": False, "buffer_count": 12}, 0)]  # fmt: skip
    results, held = [], {}
    for section, ahead in cases:
        model, optimizer, store = built(**section)
        assert len(optimizer.step_plan.sub_groups) > 4
        assert fetched_ahead(optimizer.step_plan) == ahead, section
        results.append(train(model, optimizer))
        held[ahead] = store.peak
        optimizer.release()
    assert held[0] < held[1] < held[2]  # bytes in host memory at once
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_writes_are_waited_for_where_they_are_not_to_run_beside_the_step():
    most = {}
    for behind in (None, True, False):
        model, optimizer, store = built(**({} if behind is None else {"pipeline_write": behind}))
        train(model, optimizer, 1)
        store.most = 0
        train(model, optimizer, 2)
        most[behind] = store.most
        optimizer.release()
    assert most[None] == most[True] > most[False]


@pytest.mark.parametrize("stage", [1, 3])
def test_states_are_on_disk_before_the_first_step(stage, caplog):
    pytest.importorskip("dsx_ops")
    found = []
    for early in (False, True):
        model, optimizer, store = built(fused, stage=stage, fast_init=early)
        names = {name for op, name in store.take() if op == "write" and name.startswith("state.")}
        assert bool(names) == early
        found.append(train(model, optimizer))
        again = {name for op, name in store.take() if op == "write" and name.startswith("state.")}
        assert not early or again == names
        optimizer.release()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with caplog.at_level("WARNING"):
        built(adamw, stage=stage, fast_init=True)[1].release()
    assert len([r for r in caplog.records if "AdamW makes its states in its first step" in r.getMessage()]) == 1


def ratios(rank, world):
    found, bytes_on_disk = [], []
    for ratio in (0.0, 0.5, 1.0):
        model, optimizer, _ = built(ratio=ratio)
        found.append(train(model, optimizer, rank=rank))
        bytes_on_disk.append(optimizer.state_bytes_by_tier()["optimizer"].get("disk", 0))
        optimizer.release()
    assert 0 == bytes_on_disk[0] < bytes_on_disk[1] < bytes_on_disk[2]
    assert bytes_on_disk[1] == pytest.approx(bytes_on_disk[2] / 2, rel=0.3)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_ratio_leaves_units_on_the_device():
    run_ranks(ratios, 2)


def test_the_units_nearest_to_the_ratio_are_offloaded_from_the_end():
    for percent in range(0, 101, 5):
        _, optimizer, _ = built(ratio=percent / 100)
        on_device = [unit.placement.on_device for unit in optimizer.placements]
        sizes = [unit.elements for unit in optimizer.placements]
        offloaded = sum(size for size, stays in zip(sizes, on_device) if not stays)
        assert abs(offloaded - sum(sizes) * percent / 100) <= max(sizes) / 2, percent
        assert on_device == sorted(on_device, reverse=True)  # the first units stay
        optimizer.release()


def gradients_once(rank, world):
    model, optimizer, store = built(parameters="nvme")
    generator = torch.Generator().manual_seed(rank)
    for micro in (1, 3):
        for _ in range(micro):
            model(torch.randn(4, WIDTH, generator=generator)).backward()
        backward = [name for op, name in store.take() if op == "read" and name.startswith("gradient.")]
        optimizer.step(max_norm=0.5)
        step = [name for op, name in store.take() if op == "read" and name.startswith("gradient.")]
        optimizer.zero_grad()
        assert step
        assert len(step) == len(set(step))  # once, although the norm was needed before the first update
        assert len(backward) == (micro - 1) * len(step)  # what each further micro-batch adds to


def test_gradients_on_disk_are_read_once():
    run_ranks(gradients_once, 2)


def edited(rank, world):
    """The norm kept from writing is not used for gradients that were changed since."""
    norms = []
    for parameters in ("none", "nvme"):
        model, optimizer, _ = built(parameters=parameters)
        model(torch.ones(4, WIDTH)).backward()
        found = []
        for change in (
            lambda: dsx_zero.safe_set_full_grad("blocks.1.weight", torch.ones(WIDTH, WIDTH), optimizer=optimizer),
            lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4),
            lambda: dsx_zero.safe_set_local_grad(
                "blocks.2.bias",
                dsx_zero.safe_get_local_grad("blocks.2.bias", optimizer=optimizer) * 3,
                optimizer=optimizer,
            ),
        ):
            change()
            found.append(torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()])).item())
        found.append(optimizer.step().grad_norm)
        norms.append(found)
        assert found[-1] == pytest.approx(found[-2], rel=1e-5)
        optimizer.release()
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_the_norm_follows_edits_of_gradients_on_disk():
    run_ranks(edited, 2)


@pytest.fixture
def small_sizes(monkeypatch):
    """The default size of a sub-group and the smallest one, for models of a test's size."""
    monkeypatch.setattr("dsx_zero.homes.chosen._MOVING", 1024)
    monkeypatch.setattr("dsx_zero.homes.chosen._LEAST_MOVING", 256)


def sub_groups(caplog, size=None, place="nvme", **section):
    """Elements of the largest sub-group, the number of sub-groups, and the warnings."""
    caplog.clear()
    config = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": {"device": place, **section}}
    config |= {} if size is None else {"sub_group_size": size}
    store = Noting()
    model, optimizer = dsx_zero.shard(Net(), adamw, config=config, store=store)
    train(model, optimizer, 1)
    plan, texts = optimizer.step_plan, [r.getMessage() for r in caplog.records if "sub_group_size" in r.getMessage()]
    optimizer.release()
    return max(group.numel for group in plan.sub_groups), len(plan.sub_groups), texts


def test_the_room_in_host_memory_bounds_sub_groups(small_sizes, caplog):
    assert sub_groups(caplog)[0] <= 1024
    for room, most in [(3 * 512, 512), (0, 256), (3 * 2048, 1024)]:
        numel, count, texts = sub_groups(caplog, max_in_cpu=room)
        assert most / 2 <= numel <= most and count >= 4 * WIDTH * WIDTH // most and not texts, (room, numel)
    assert sub_groups(caplog, 10**9, max_in_cpu=3 * 512)[0] <= 512
    assert 512 < sub_groups(caplog, 10**9, max_in_cpu=2 * 800, pipeline_write=False)[0] <= 800
    assert sub_groups(caplog, 300, max_in_cpu=10**9)[0] <= 512


def test_one_warning_where_all_states_are_in_host_memory_at_once(small_sizes, caplog):
    elements = 4 * WIDTH * (WIDTH + 1)
    numel, count, texts = sub_groups(caplog, 10**9)
    assert (numel, count) == (elements, 1)
    assert len(texts) == 1 and "1,000,000,000" in texts[0] and f"{elements:,}" in texts[0], texts
    for size, place, section in [(None, "nvme", {}), (300, "nvme", {}), (10**9, "nvme", {"max_in_cpu": 10**9}),
                                 (10**9, "cpu", {}), (1280, "nvme", {"pipeline_read": False})]:  # fmt: skip
        assert not sub_groups(caplog, size, place, **section)[2], (size, place, section)
