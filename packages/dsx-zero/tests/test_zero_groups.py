"""Process groups beside the user's: lent, not lost; made by their members alone."""

import gc
import os
import time

import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

CONFIG = {"stage3_param_persistence_threshold": 0}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def build(stage, process_group=None, seed=0):
    import dsx_zero

    torch.manual_seed(seed)
    return dsx_zero.shard(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), sgd, stage=stage, config=CONFIG, process_group=process_group
    )


def train(model, optimizer, value, steps=3):
    for _ in range(steps):
        model(torch.full((1, 8), float(value))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    first = next(iter(model.parameters()))
    whole = first.full_tensor() if hasattr(first, "full_tensor") else first.detach()
    return whole.clone()


def held():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def settled(most):
    """What is held, once it is at most `most`: Gloo's threads close sockets, and end, a little later."""
    until = time.monotonic() + 10
    while any(now > limit for now, limit in zip(held(), most)) and time.monotonic() < until:
        time.sleep(0.05)
    return held()


def drop_and_build(rank, world, stage):
    seen = []
    for _ in range(4):
        model, optimizer = build(stage)
        train(model, optimizer, 1)
        optimizer.release()
        del model, optimizer
        if len(seen) == 1:
            time.sleep(0.5)  # the measure of later ones: without what ends a little later
        seen.append(settled(seen[1]) if len(seen) > 1 else held())
    return seen


@pytest.mark.parametrize("backend", ["gloo", "dsx"])
@pytest.mark.parametrize("stage", [1, 3])
def test_models_that_come_and_go_hold_no_more_sockets_and_threads(stage, backend):
    import dsx_comm  # noqa: F401  the backend "dsx" is known once it is imported

    for seen in run_ranks(drop_and_build, 2, stage, backend=backend):
        sockets, threads = zip(*seen[1:])
        assert max(sockets) == sockets[0] and max(threads) == threads[0], seen


def a_new_default_group(rank, world, folder):
    import dsx_comm

    def join(number):
        dsx_comm.init_distributed("gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=world)

    join(0)
    _, optimizer = build(3)
    dsx_comm.destroy_process_group()
    join(1)
    optimizer.release()  # its groups went with the old default group
    return train(*build(3), 1)


def test_groups_of_a_job_that_has_ended_are_not_lent(tmp_path):
    first, second = run_ranks(a_new_default_group, 2, str(tmp_path), backend=None, timeout=40)
    assert torch.equal(first, second)


def side_by_side(rank, world, stage):
    """Two models at once, then a third in the place of the first: as each alone."""
    first, second = build(stage, seed=1), build(stage, seed=2)
    got = [train(*first, 1), train(*second, 2)]
    first[1].release()
    third = build(stage, seed=3)
    got += [train(*third, 3), train(*second, 2, steps=1)]
    return got


def test_models_at_once_have_groups_of_their_own():
    for stage in (1, 3):
        expected = run_ranks(side_by_side, 1, 0)[0]
        for got in run_ranks(side_by_side, 2, stage):
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def one_rank_forgets(rank, world):
    kept = build(3)
    if rank == 0:
        kept[1].release()
    return train(*build(3), 1)


def test_a_rank_that_hands_nothing_back_makes_nobody_wait():
    first, second = run_ranks(one_rank_forgets, 2, timeout=40)
    assert torch.equal(first, second)


def apart(rank, world, stage):
    import dsx_comm

    groups = [dsx_comm.new_group(members) for members in ([0, 2], [1, 3])]
    return train(*build(stage, groups[rank % 2], seed=rank % 2), rank % 2 + 1)


@pytest.mark.parametrize("backend, stage", [("gloo", 3), ("dsx", 0), ("dsx", 3)])
def test_disjoint_ranks_shard_models_at_the_same_time(backend, stage):
    import dsx_comm  # noqa: F401

    got = run_ranks(apart, 4, stage, backend=backend, timeout=40)
    for half in (0, 1):
        want = train(*build(0, seed=half), half + 1)
        for value in got[half::2]:
            torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-6)
