"""Loading slices: everything is read and checked before anything changes, and states keep their form."""

from __future__ import annotations

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks


class CountedSGD(torch.optim.Optimizer):
    """SGD with momentum whose `step` is a tensor of shape (1,), as some optimizers outside of torch keep it."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["momentum"] = torch.zeros(1, dtype=torch.int64), torch.zeros_like(p)
                state["step"] += 1
                state["momentum"].mul_(0.9).add_(p.grad)
                p.sub_(group["lr"] / state["step"].item() * state["momentum"])


class Model(torch.nn.Module):
    """Parameters of no dimension, of one element and of more."""

    def __init__(self):
        super().__init__()
        self.gain, self.one = torch.nn.Parameter(torch.tensor(1.5)), torch.nn.Parameter(torch.ones(1))
        self.layer = torch.nn.Linear(3, 5)
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        return self.gain * self.layer(x).sum() + self.one.sum()


def build(stage, optimizer=CountedSGD):
    torch.manual_seed(0)
    return dsx_zero.shard(Model(), optimizer, stage=stage, config={"stage3_param_persistence_threshold": 0})


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        model(torch.full((2, 3), step + 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def collect(rank, world, stage, steps):
    model, optimizer = build(stage)
    train(model, optimizer, steps)
    return [
        (s.name, s.start, s.stop, s.param.clone(), {k: torch.as_tensor(v).clone() for k, v in s.states.items()})
        for s in optimizer.slices()
    ]


class Merged:
    """A reader of all ranks' slices; `fail_at` raises at that read, `without` has lost a state."""

    def __init__(self, ranks, fail_at=None, without=None):
        self.fail_at, self.without, self.reads = fail_at, without, 0
        self.params, self.states = {}, {}
        for pieces in zip(*ranks):
            name = pieces[0][0]
            self.params[name] = torch.cat([p for *_, p, _ in sorted(pieces, key=lambda s: s[1])])
            owners = [states for *_, states in sorted(pieces, key=lambda s: s[1]) if states]
            if owners:
                whole = {k: torch.cat([o[k] for o in owners]) if v.dim() else v.item() for k, v in owners[0].items()}
                self.states[name] = whole

    def _count(self):
        self.reads += 1
        if self.reads == self.fail_at:
            raise OSError("Input/output error")

    def param(self, name, start, stop):
        self._count()
        return self.params[name][start:stop]

    def master(self, name, start, stop):
        return self.param(name, start, stop)

    def state_keys(self, name):
        return tuple(key for key in self.states.get(name, ()) if key != self.without)

    def state(self, key, name, start, stop):
        self._count()
        value = self.states[name][key]
        return value[start:stop] if isinstance(value, torch.Tensor) else value


def everything(optimizer):
    found = {}
    for s in optimizer.slices(held=True):
        found[s.name] = s.param.clone()
        found |= {f"{k}/{s.name}": torch.as_tensor(v).clone() for k, v in s.states.items()}
    return found


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def go_on(rank, world, merged, stage):
    """Parameters after loading into a fresh optimizer, and into one that has trained, and two more steps."""
    found = []
    for trained in (0, 1):
        model, optimizer = build(stage)
        train(model, optimizer, trained, first=7)
        optimizer.load_slices(merged)
        for state in optimizer.state.values():
            assert state["step"].shape == (1,) and state["step"].dtype == torch.int64
        train(model, optimizer, 2, first=2)
        found.append([p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()])
    return found


@pytest.mark.parametrize(("before", "after"), [((0, 1), (3, 2)), ((2, 2), (0, 1)), ((3, 3), (1, 2))])
def test_single_values_of_shape_one_go_from_any_layout_to_any(before, after):
    straight_model, straight = build(0)
    train(straight_model, straight, 4)
    merged = Merged(run_ranks(collect, before[1], before[0], 2))
    assert merged.states["gain"]["step"] == merged.states["layer.weight"]["step"] == 2
    assert merged.states["one"]["momentum"].shape == merged.states["gain"]["momentum"].shape == (1,)
    for fresh_and_trained in run_ranks(go_on, after[1], merged, after[0]):
        for values in fresh_and_trained:
            for got, expected in zip(values, straight_model.parameters(), strict=True):
                torch.testing.assert_close(got, expected.detach(), rtol=1e-6, atol=1e-6)


def test_a_read_that_fails_changes_nothing():
    merged = Merged([collect(0, 1, 0, 2)])
    build(0)[1].load_slices(merged)
    reads = merged.reads
    assert reads > 5
    model, optimizer = build(0)
    train(model, optimizer, 1, first=5)
    before = everything(optimizer)
    for k in range(1, reads + 1):
        merged.reads, merged.fail_at = 0, k
        with pytest.raises(OSError, match="Input/output error"):
            optimizer.load_slices(merged)
        assert same(everything(optimizer), before), k


def fails_on_rank_one(rank, world, merged, stage):
    """Reading is not collective: the other rank learns nothing of the failure and waits for nobody."""
    merged.fail_at = 3 if rank == 1 else None
    _, optimizer = build(stage)
    before = everything(optimizer)
    try:
        optimizer.read_slices(merged)
    except OSError as error:
        return same(everything(optimizer), before), str(error)
    return same(everything(optimizer), before), "read"


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_reading_changes_nothing_and_waits_for_no_rank(stage):
    merged = Merged([collect(0, 1, 0, 2)])
    outcomes = run_ranks(fails_on_rank_one, 2, merged, stage)
    assert outcomes == [(True, "read"), (True, "Input/output error")]


@pytest.mark.parametrize("lost", ["momentum", "step"])
def test_a_parameter_has_all_its_states_or_none(lost):
    ranks = [collect(0, 1, 0, 2)]
    for trained in (0, 1):
        model, optimizer = build(0)
        train(model, optimizer, trained)
        before = everything(optimizer)
        with pytest.raises(dsx_zero.ZeroStateError, match=rf"gain: got the optimizer states .*also keeps {lost}"):
            optimizer.load_slices(Merged(ranks, without=lost))
        assert same(everything(optimizer), before)


def test_states_of_another_form_are_refused():
    merged = Merged([collect(0, 1, 0, 2)])
    merged.states["layer.weight"]["momentum"] = 3.0
    with pytest.raises(dsx_zero.ZeroStateError, match=r"layer.weight: got 1 elements .*'momentum', expected 15"):
        build(0)[1].load_slices(merged)
    merged.states["layer.weight"]["momentum"] = torch.zeros(15)
    merged.states["layer.weight"]["step"] = torch.zeros(15)
    with pytest.raises(dsx_zero.ZeroStateError, match=r"layer.weight: got 15 elements .*'step', expected 1"):
        build(0)[1].load_slices(merged)


def test_a_state_dict_that_does_not_fit_changes_nothing():
    _, saved = build(0)
    model, optimizer = build(0)
    train(model, optimizer, 1)
    before = everything(optimizer)
    state = saved.state_dict()
    state["slices"]["layer.bias"] = {**state["slices"]["layer.bias"], "start": 2}  # of another rank
    for wrong in (state, {"state": {}, "param_groups": []}, {"slices": {}, "param_groups": []}):
        with pytest.raises(dsx_zero.ZeroStateError):
            optimizer.load_state_dict(wrong)
        assert same(everything(optimizer), before)
