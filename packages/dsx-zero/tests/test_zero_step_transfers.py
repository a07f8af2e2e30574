"""Transfers of sub-groups around their step: how many are in memory, what is waited for, and what an error leaves."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import dsx_zero
import pytest
import torch
from dsx_comm.lanes import HostLane
from dsx_testkit import MemoryStore, run_ranks, tiny
from dsx_testkit.early_steps import everything, same_bits
from dsx_zero.step.norm import StepNorm
from dsx_zero.step.states import Visit
from dsx_zero.step.transfers import SubGroupTransfers


class Ticket:
    def __init__(self, log, what, error=None):
        self.log, self.what, self.error = log, what, error

    def synchronize(self):
        self.log.append(f"waited for {self.what}")
        if self.error is not None:
            raise self.error


class States:
    """Notes what is asked of it. `fails`: masters whose stores fail when they are waited for."""

    def __init__(self, fails=()):
        self.log, self.fails = [], fails

    def fetch(self, master, lane):
        self.log.append(f"fetch {master.name}")
        return Visit(master, values=torch.ones(4), tickets=[Ticket(self.log, f"fetch {master.name}")])

    def attach(self, visit):
        visit.wait()
        visit.master.tensor.data = visit.values

    def store(self, visit, lane):
        self.log.append(f"store {visit.master.name}")
        error = OSError("no room") if visit.master.name in self.fails else None
        visit.tickets.append(Ticket(self.log, f"store {visit.master.name}", error))
        visit.master.tensor.data = torch.empty(0)


def masters(*names):
    return [SimpleNamespace(name=name, tensor=torch.empty(0), group=SimpleNamespace(master=None)) for name in names]


def stepped(transfers, groups, ahead):
    """What a plan does with sub-groups, the last `ahead` of which are fetched beside the step before."""
    for number in range(len(groups)):
        for wanted in range(number, min(number + 1 + ahead, len(groups))):
            transfers.fetch(wanted, groups[wanted])
        transfers.attach(number)
        transfers.store(number)


@pytest.mark.parametrize("behind", [0, 1, 2])
def test_a_sub_group_is_fetched_only_when_few_are_still_stored(behind):
    states = States()
    transfers = SubGroupTransfers(states, HostLane(), behind=behind)
    stepped(transfers, [masters(name) for name in "abcdef"], ahead=1)
    under_way, most = set(), 0
    for entry in states.log:
        *what, name = entry.split()
        if what == ["store"]:
            under_way.add(name)
        elif what == ["waited", "for", "store"]:
            under_way.remove(name)
        elif what == ["fetch"]:
            assert len(under_way) <= behind, entry
            most = max(most, len(under_way))
    assert most == behind
    if not behind:  # a store ends before anything else begins
        after = [states.log[place + 1] for place, entry in enumerate(states.log) if entry.startswith("store")]
        assert after == [f"waited for store {name}" for name in "abcdef"]
    transfers.wait()
    assert [entry for entry in states.log if entry.startswith("waited for store")] == [
        f"waited for store {name}" for name in "abcdef"
    ]
    assert states.log.count("fetch c") == 1  # it was asked for twice


def test_what_was_not_fetched_needs_no_transfer():
    states = States()
    transfers = SubGroupTransfers(states, HostLane(), behind=1)
    transfers.attach(0)
    transfers.fetch(0, ())  # a plan that moves nothing
    transfers.attach(0)
    transfers.store(0)
    transfers.end()
    assert states.log == []


def test_at_the_end_what_is_still_fetched_is_stored_as_it_is():
    states = States()
    transfers = SubGroupTransfers(states, HostLane(), behind=1)
    transfers.fetch(0, masters("a"))
    transfers.fetch(1, masters("b", "c"))
    transfers.attach(0)  # and then the optimizer fails
    transfers.end()
    for name in "abc":
        told = [entry for entry in states.log if entry.endswith(name)]
        assert told == [f"fetch {name}", f"waited for fetch {name}", f"store {name}", f"waited for store {name}"]


def test_a_store_that_fails_is_told_where_it_is_waited_for():
    transfers = SubGroupTransfers(States(fails="a"), HostLane(), behind=1)
    transfers.fetch(0, masters("a"))
    transfers.store(0)
    with pytest.raises(OSError, match="no room"):
        transfers.wait()
    transfers.wait()  # it is told once


def test_abandoned_buffers_are_let_go_when_no_transfer_uses_them():
    states = States(fails="a")
    transfers = SubGroupTransfers(states, HostLane(), behind=1)
    first, second = masters("a"), masters("b")
    transfers.fetch(0, first)
    transfers.store(0)
    transfers.fetch(1, second)
    transfers.attach(1)
    transfers.fetch(2, third := masters("c"))
    transfers.abandon()
    assert {"waited for store a", "waited for fetch b", "waited for fetch c"} <= set(states.log)
    assert [m.tensor.numel() for m in (*first, *second, *third)] == [0, 0, 0]
    before = len(states.log)
    transfers.wait()
    transfers.abandon()
    transfers.attach(1)
    assert len(states.log) == before  # nothing is left
    transfers.fetch(1, second)
    assert states.log[before:] == ["fetch b"]  # of new values


# Before the norm is known ---------------------------------------------------------------------------------------------


class Watched(MemoryStore):
    """Notes the names that are read."""

    def __init__(self):
        super().__init__()
        self.log = []

    def get(self, name, out=None):
        self.log.append(name)
        return super().get(name, out)


def pair(stage, kind):
    """The same model with states in memory, and on a disk that is watched."""
    made = []
    for store in (None, Watched()):
        torch.manual_seed(5)
        section = {"device": "cpu" if store is None else "nvme", "step_during_backward": False}
        config = {"stage": stage, "sub_group_size": 512, "offload_optimizer": section}
        model = tiny.Residual(depth=3, dtype=torch.bfloat16)
        made.append((*dsx_zero.shard(model, lambda p: kind(p, lr=1e-2), config=config, store=store), store))
    return made


def read_before_the_norm(rank, world, stage):
    made, norm = pair(stage, torch.optim.AdamW), StepNorm.norm
    store = made[1][2]

    def noting(self, *args, **options):
        store.log.append("norm")
        return norm(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepNorm, "norm", noting)
        for step in range(6):
            store.log.clear()
            for model, optimizer, _ in made:
                x = model.batch(rank, step) * (float("inf") if step == 2 else 1.0)
                model(x).backward()
                if step == 4 and stage < 3:  # reaches the master in the step, behind the read
                    with torch.no_grad():
                        model.blocks[0].weight.mul_(0.5)
                optimizer.step(max_norm=0.1)
                optimizer.zero_grad()
            before = store.log[: len(store.log) - 1 - store.log[::-1].index("norm")]
            assert [name for name in before if name != "norm"], step
            assert same_bits(*(everything(model, optimizer) for model, optimizer, _ in made)), step
            if step == 3:  # what a skipped step has read is not used
                for _, optimizer, _ in made:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _, optimizer, _ in made:
        optimizer.release()


@pytest.mark.parametrize(("stage", "world"), [(2, 1), (3, 2)])
def test_a_disk_is_read_before_the_norm_is_known(stage, world):
    run_ranks(read_before_the_norm, world, stage)
