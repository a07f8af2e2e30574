"""Gradients that come late, twice, never, or through odd roads; sum and mean; dtypes; pieces. Always against plain
PyTorch.
"""

from __future__ import annotations

import dsx_zero
import pytest
import torch
from dsx_comm.shm import native
from dsx_testkit import assert_close_named, run_ranks, tiny

LR = 0.1


def sgd(params):
    return torch.optim.SGD(params, lr=LR)


def values(model):
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in model.named_parameters()}


def compare(model, reference, rtol=1e-5, atol=1e-6):
    assert_close_named(values(model), {n: p.detach() for n, p in reference.named_parameters()}, rtol=rtol, atol=atol)


def shard(model, stage, **more):
    config = {"stage3_param_persistence_threshold": 0, **more.pop("config", {})}
    return dsx_zero.shard(model, sgd, stage=stage, config=config, **more)


def rows(model, rank, world, seed=0):
    x, y = model.example(2 * world, seed=seed)
    return (x, y), (x[2 * rank : 2 * rank + 2], y[2 * rank : 2 * rank + 2])


def plain(model, losses, scale=1.0):
    """One step of SGD on the sum of the losses."""
    for loss in losses:
        (loss * scale).backward()
    sgd([p for p in model.parameters() if p.requires_grad]).step()


def two_backwards(rank, world, stage):
    """Two losses, two reducing backwards, one step."""
    reference = tiny.MLP()
    model, optimizer = shard(tiny.MLP(), stage)
    for step in range(3):
        batches = [rows(reference, rank, world, seed=10 * step + i) for i in range(2)]
        for _, mine in batches:
            model.loss(*mine).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain(reference, [reference.loss(*whole) for whole, _ in batches])
        reference.zero_grad()
    compare(model, reference)


def uneven_backwards(rank, world, stage):
    """Rank r runs r + 1 reducing backwards in some steps, before and after the order of reductions has settled; then
    all run one again.
    """
    reference = tiny.MLP()
    model, optimizer = shard(tiny.MLP(), stage)
    for step in range(8):
        uneven = step in (0, 4, 5, 6)
        batches = [rows(reference, rank, world, seed=10 * step + i) for i in range(world if uneven else 1)]
        for _, mine in batches[: rank + 1]:
            model.loss(*mine).backward()
        optimizer.step()
        optimizer.zero_grad()
        for i, (whole, _) in enumerate(batches):
            for r in range(i, world):  # the ranks that run backward i
                mine = [t[2 * r : 2 * r + 2] for t in whole]
                (reference.loss(*mine) / world).backward()
        sgd(reference.parameters()).step()
        reference.zero_grad()
    compare(model, reference)


def retained_graph(rank, world, stage):
    """The same graph backwards twice."""
    reference = tiny.Reused()
    model, optimizer = shard(tiny.Reused(), stage)
    whole, mine = rows(reference, rank, world)
    loss = model.loss(*mine)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    plain(reference, [2 * reference.loss(*whole)])
    compare(model, reference)


def late_arrival(rank, world, stage):
    """From the third step on a parameter gets gradients from two backwards inside one (reentrant), where it used to
    get one.
    """
    reference, model = tiny.Checkpointed(reentrant=True), tiny.Checkpointed(reentrant=True)
    model, optimizer = shard(model, stage)
    for step in range(4):
        whole, mine = rows(reference, rank, world, seed=step)
        for m in (model, reference):
            m.reentrant = step >= 2
        model.loss(*mine).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain(reference, [reference.loss(*whole)])
        reference.zero_grad()
    compare(model, reference)


def only_no_sync(rank, world, stage):
    """A step whose backwards all ran under no_sync still reduces."""
    reference = tiny.MLP()
    model, optimizer = shard(tiny.MLP(), stage)
    for step in range(2):
        whole, mine = rows(reference, rank, world, seed=step)
        with optimizer.no_sync():
            model.loss(*mine).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain(reference, [reference.loss(*whole)])
        reference.zero_grad()
    compare(model, reference)


def not_the_models_output(rank, world, stage):
    """The loss comes from an inner module; the model itself never runs."""
    reference = tiny.Tied()
    model, optimizer = shard(tiny.Tied(), stage)
    for step in range(3):
        whole, mine = rows(reference, rank, world, seed=step)
        model.decoder(model.middle(mine[0])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        plain(reference, [reference.decoder(reference.middle(whole[0])).square().mean()])
        reference.zero_grad()
    compare(model, reference)


def failed_backward(rank, world, stage):
    """A backward that raises half-way (on every rank) leaves a model that trains on after zero_grad."""
    reference = tiny.MLP()
    model, optimizer = shard(tiny.MLP(), stage)
    whole, mine = rows(reference, rank, world)

    def fail(grad):
        raise RuntimeError("planted")

    if stage < 3:  # at stage 3 an interrupted pass has to be ended by all ranks alike, which its own tests cover
        x = model.layers[0](mine[0])
        x.register_hook(fail)
        with pytest.raises(RuntimeError, match="planted"):
            model.layers[2](model.layers[1](x)).sum().backward()
        optimizer.zero_grad()
    for step in range(2):
        whole, mine = rows(reference, rank, world, seed=step)
        model.loss(*mine).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain(reference, [reference.loss(*whole)])
        reference.zero_grad()
    compare(model, reference)


ROADS = [
    two_backwards,
    uneven_backwards,
    retained_graph,
    late_arrival,
    only_no_sync,
    not_the_models_output,
    failed_backward,
]


def run_roads(rank, world, roads, stages):
    for road in roads:
        for stage in stages:
            try:
                road(rank, world, stage)
            except Exception as error:
                raise AssertionError(f"{road.__name__}, stage {stage}: {error!r}") from error


def shared(world):
    """Over the dsx backend, where gradient buffers come from an arena."""
    marks = (pytest.mark.native, pytest.mark.skipif(native.module() is None, reason="no compiled module"))
    return pytest.param(world, "dsx", marks=marks)


@pytest.mark.parametrize("world, backend", [(1, "gloo"), (2, "gloo"), shared(2)])
@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.__name__)
def test_every_road_of_a_gradient(road, world, backend):
    run_ranks(run_roads, world, [road], [0, 1, 2], backend=backend, timeout=90)


REDUCTIONS = [
    (dsx_zero.Reduction(), 1.0),
    (dsx_zero.Reduction(op="sum"), None),
    (dsx_zero.Reduction(prescale=True), 1.0),
    (dsx_zero.Reduction(predivide_factor=2.0), 1.0),
    (dsx_zero.Reduction(predivide_factor=5.0), 1.0),
]


PRECISIONS = [
    None,
    dsx_zero.Precision(gradients=torch.float64),
    dsx_zero.Precision(communication=torch.float64),
]


def run_reductions(rank, world):
    """Every reduction at every stage, in small and large buckets; on several ranks with one of the dtypes each time, so
    that every stage and every reduction meets all of them.
    """
    for number, (reduction, scale) in enumerate(REDUCTIONS):
        for stage in range(4):
            for precision in PRECISIONS if world == 1 else [PRECISIONS[(number + stage) % len(PRECISIONS)]]:
                for bucket in (500_000_000, 64):
                    reference = tiny.MLP()
                    config = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
                    model, optimizer = shard(tiny.MLP(), stage, reduction=reduction, precision=precision, config=config)
                    for step in range(2):
                        batches = [rows(reference, rank, world, seed=10 * step + i) for i in range(2)]
                        for _, mine in batches:  # two reducing backwards: what is reduced must not be reduced again
                            model.loss(*mine).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        factor = world if scale is None else scale
                        plain(reference, [reference.loss(*whole) for whole, _ in batches], factor)
                        reference.zero_grad()
                    compare(model, reference)


@pytest.mark.parametrize("world, backend", [(1, "gloo"), (3, "gloo"), shared(2)])
def test_reductions_dtypes_and_pieces(world, backend):
    run_ranks(run_reductions, world, backend=backend, timeout=120)


def check_exposed_grads(rank, world):
    reference = tiny.MLP()
    whole, mine = rows(reference, rank, world)
    reference.loss(*whole).backward()
    model, optimizer = dsx_zero.shard(tiny.MLP(), sgd, stage=0)
    model.loss(*mine).backward()
    want = {n: p.grad for n, p in reference.named_parameters()}
    assert_close_named({n: p.grad for n, p in model.named_parameters()}, want, rtol=1e-5, atol=1e-7)
    model.zero_grad()  # not the optimizer's: the user's way in plain PyTorch
    model.loss(*mine).backward()
    assert_close_named({n: p.grad for n, p in model.named_parameters()}, want, rtol=1e-5, atol=1e-7)
    model.zero_grad()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("world", [1, 2])
def test_stage_0_leaves_averaged_grads_on_the_parameters(world):
    run_ranks(check_exposed_grads, world)


def sparse_embedding(rank, world, stage):
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 2))
    model, optimizer = dsx_zero.shard(model, lambda p: torch.optim.SGD(p, lr=0.1), stage=stage)
    with pytest.raises(
        dsx_zero.ZeroModelError, match=r"0\.weight: got a sparse gradient.*sparse=False.*stage 0.*sparse_gradients"
    ):
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("world, stage", [(1, 0), (2, 0), (2, 2)])
def test_sparse_gradients_are_refused_by_name(world, stage):
    run_ranks(sparse_embedding, world, stage)
