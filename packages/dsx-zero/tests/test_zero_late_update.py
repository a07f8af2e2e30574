"""`offload_optimizer.late_update_after`: from then on each update is applied one step late, exactly."""

from __future__ import annotations

import copy
import time
from contextlib import contextmanager

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks, tiny
from dsx_testkit.early_steps import CountedSteps, everything, same_bits, update

WARM_UP = 2


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def fused(parameters):
    import dsx_ops

    return dsx_ops.FusedAdam(parameters, lr=1e-2)


OPTIMIZERS = {"adamw": adamw, "fused": fused, "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)}


def built(stage, kind, late=WARM_UP, model=None, precision=None, offload_param=None, store=None, **section):
    config = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "sub_group_size": 300,
        "offload_optimizer": {"device": "cpu" if store is None else "nvme", "late_update_after": late, **section},
    }
    if offload_param is not None:
        config["offload_param"] = {"device": offload_param, "max_in_cpu": 300}
    model = tiny.Residual(depth=3) if model is None else model
    return dsx_zero.shard(model, OPTIMIZERS[kind], config=config, precision=precision, store=store)


def rate(step):
    return 1e-2 / (1 + step % 3)


class OneStepLate:
    """The oracle: a plain loop that applies gradients, rate and clipping of a step in the next one."""

    def __init__(self, kind):
        self.model = tiny.Residual(depth=3)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.waiting = None

    def train(self, step, world):
        losses = [self.model(self.model.batch(rank, step)) for rank in range(world)]
        (sum(losses) / world).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        now = [p.grad.clone() for p in self.model.parameters()], rate(step)
        if step < WARM_UP:
            self.apply(now)
        else:
            self.flush()
            self.waiting = now
        self.optimizer.zero_grad()
        return [loss.item() for loss in losses]

    def flush(self):
        if self.waiting is not None:
            self.apply(self.waiting)
            self.waiting = None

    def apply(self, update):
        grads, lr = update
        for p, grad in zip(self.model.parameters(), grads):
            p.grad = grad
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()


def trained(rank, world, stage, kind):
    oracle = OneStepLate(kind)
    model, optimizer = built(stage, kind)
    for step in range(7):
        expected = oracle.train(step, world)
        loss = model(model.batch(rank, step))
        loss.backward()
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step(max_norm=0.5)
        optimizer.param_groups[0]["lr"] = 1e3  # what a scheduler does between steps is not for this update
        optimizer.zero_grad()
        assert loss.item() == pytest.approx(expected[rank], rel=2e-5)
    late = [p.detach().clone() for p in oracle.model.parameters()]
    oracle.flush()
    with dsx_zero.GatheredParameters(model):
        for p, want in zip(model.parameters(), late):
            assert torch.allclose(p, want, rtol=1e-4, atol=1e-6)
    optimizer.synchronize()
    with dsx_zero.GatheredParameters(model):
        for p, want in zip(model.parameters(), oracle.model.parameters()):
            assert torch.allclose(p, want, rtol=1e-4, atol=1e-6)
    assert not any(torch.equal(a, b) for a, b in zip(late, oracle.model.parameters()))
    grads = optimizer.state_bytes_by_tier()["grads"]
    numel = sum(m.numel for name, _ in model.named_parameters() for m in optimizer.layout.masters_of(name))
    assert grads["host"] >= 4 * numel


@pytest.mark.parametrize("kind", ["adamw", "fused", "sgd"])
@pytest.mark.parametrize(("stage", "world"), [(1, 2), (2, 1), (2, 2), (3, 2)])
def test_a_plain_loop_one_step_late(stage, world, kind):
    if kind == "fused":
        pytest.importorskip("dsx_ops")
    run_ranks(trained, world, stage, kind)


def shared(rank, world, kind):
    """fp32 parameters in host memory are their own masters: forwards must not see an update that is under way."""
    oracle, done = OneStepLate(kind), []

    @contextmanager
    def span(lane, what, size):
        yield
        done.extend([what] if lane == "host step" else [])

    model, optimizer = built(3, kind, offload_param="cpu")
    optimizer.control.listen(span)
    updates, sub_groups = 0, len(optimizer.step_plan.sub_groups)
    for step in range(6):
        expected = oracle.train(step, world)
        loss = model(model.batch(rank, step))
        loss.backward()
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step(max_norm=0.5)
        optimizer.zero_grad()
        updates += step >= WARM_UP
        end = time.monotonic() + 10
        while len(done) < updates * sub_groups and time.monotonic() < end:
            time.sleep(0.002)  # until the host has computed the update, which must not show yet
        assert len(done) == updates * sub_groups
        assert loss.item() == pytest.approx(expected[rank], rel=2e-5), step
        held = optimizer.state_bytes_by_tier()["params"]["host"]
        assert held == (2 if step >= WARM_UP else 1) * 4 * sum(
            m.numel for n, _ in model.named_parameters() for m in optimizer.layout.masters_of(n)
        )
    optimizer.synchronize()
    oracle.flush()
    with dsx_zero.GatheredParameters(model):
        for p, q in zip(model.parameters(), oracle.model.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "world"), [("adamw", 1), ("fused", 2)])
def test_parameters_that_are_their_own_masters_keep_their_values_until_the_update_is_applied(kind, world):
    run_ranks(shared, world, kind)


def disk(rank, world, stage, kind, dtype, parameters, folder):
    """Masters and states on disk, parameters and gradients there too: every step has the bits of host memory."""
    import dsx_nvme

    pairs = []
    for store in (None, dsx_nvme.TensorStore(f"{folder}/{rank}")):
        torch.manual_seed(1)
        place = None if store is None else parameters
        model = tiny.Residual(depth=3, dtype=dtype)
        pairs.append(built(stage, kind, 1, model=model, store=store, offload_param=place))
    for step in range(5):
        for model, optimizer in pairs:
            x = model.batch(rank, step) * (float("inf") if step == 3 and dtype != torch.float32 else 1.0)
            model(x).backward()
            optimizer.step(max_norm=0.5)
            optimizer.zero_grad()
        both = []
        for model, _ in pairs:
            with dsx_zero.GatheredParameters(model):
                both.append([p.detach().clone() for p in model.parameters()])
        assert same_bits(*both), step
    assert "disk" in pairs[1][1].state_bytes_by_tier()["optimizer"]
    for _, optimizer in pairs:
        optimizer.synchronize()
    assert same_bits(*(everything(*pair) for pair in pairs))
    for _, optimizer in pairs:
        optimizer.release()


@pytest.mark.parametrize(
    ("stage", "kind", "dtype", "parameters", "world"),
    [
        (1, "adamw", torch.bfloat16, None, 1),
        (2, "fused", torch.float32, None, 2),
        (3, "sgd", torch.float32, "cpu", 1),
        (3, "adamw", torch.float32, "nvme", 2),  # parameters on disk that are their own masters
        (3, "fused", torch.bfloat16, "nvme", 2),
    ],
)
def test_state_on_disk_has_the_bits_of_state_in_memory(stage, kind, dtype, parameters, world, tmp_path):
    pytest.importorskip("dsx_nvme")
    if kind == "fused":
        pytest.importorskip("dsx_ops")
    run_ranks(disk, world, stage, kind, dtype, parameters, str(tmp_path))


class Weak(tiny.Residual):
    """Its gradients are never clipped."""

    def forward(self, x):
        return super().forward(x) * 1e-3


def warming_up(rank, world):
    """The steps before are stepped during backward, with the bits of those that are not; then nothing is."""
    pairs = []
    with pytest.MonkeyPatch.context() as patch:
        counted = CountedSteps(patch)
        for early in (False, True):
            torch.manual_seed(2)
            pairs.append(built(2, "adamw", 4, model=Weak(depth=3), step_during_backward=early))
        for step in range(6):
            for model, optimizer in pairs:
                update(model, optimizer, [model.batch(rank, step)], 1.0, 1.0, counted)
            assert (counted.announced, counted.undone) == (min(step, 3), 0)
            assert bool(counted.stepped) == (step > 0)
    for _, optimizer in pairs:
        optimizer.synchronize()
    assert same_bits(*(everything(*pair) for pair in pairs))
    plain, speculated = (optimizer.state_bytes_by_tier() for _, optimizer in pairs)
    assert plain == speculated  # a late update is not undone: old values are dropped


def test_the_steps_before_are_stepped_during_backward():
    run_ranks(warming_up, 2)


def readers(rank, world):
    model, optimizer = built(2, "adamw")
    for step in range(4):
        model(model.batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for read in (
        optimizer.state_dict,
        lambda: list(optimizer.slices()),
        lambda: dsx_zero.safe_get_full_fp32_param("blocks.0.weight", optimizer=optimizer),
        lambda: dsx_zero.safe_get_local_optimizer_state("blocks.0.weight", "exp_avg", optimizer=optimizer),
        optimizer.offload_states,
    ):
        with pytest.raises(dsx_zero.ZeroStateError, match="synchronize"):
            read()
    optimizer.synchronize()
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.synchronize()  # nothing is under way

    def go_on(model, optimizer, first):
        losses = []
        for step in range(first, first + 3):
            loss = model(model.batch(rank, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    went_on = go_on(model, optimizer, 4)
    optimizer.load_state_dict(state)  # drops what is under way
    again = go_on(model, optimizer, 4)
    optimizer.release()
    other, resumed = built(2, "adamw")
    resumed.load_state_dict(state)
    resumed.steps_done = 4
    assert went_on == again == go_on(other, resumed, 4)


def test_readers_are_refused_and_a_state_dict_goes_on():
    run_ranks(readers, 2)


def overflowing(rank, world):
    """A step whose gradients are not finite applies what waits and leaves nothing."""
    model, optimizer = built(2, "adamw", late=0, model=tiny.Residual(depth=3, dtype=torch.bfloat16))
    seen = []
    for step in range(6):
        x = model.batch(rank, step)
        if step == 3:
            x = x * float("inf")
        model(x).backward()
        before = [p.detach().clone() for p in model.parameters()]
        outcome = optimizer.step(max_norm=1.0)
        optimizer.zero_grad()
        moved = any(not torch.equal(a, p) for a, p in zip(before, model.parameters()))
        seen.append((outcome.overflow, moved))
    assert seen == [(False, False), (False, True), (False, True), (True, True), (False, False), (False, True)]


def test_an_overflow_leaves_nothing_behind():
    run_ranks(overflowing, 2)


def edited(rank, world):
    model, optimizer = built(2, "adamw", late=0)
    model(model.batch(rank, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model.blocks[0].weight.mul_(0.5)
    model(model.batch(rank, 1)).backward()
    with pytest.raises(dsx_zero.ZeroStateError, match="written while their update was under way"):
        optimizer.step()


def edited_together(rank, world):
    model, optimizer = built(3, "adamw", late=0)
    model(model.batch(rank, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(dsx_zero.ZeroStateError, match="written while their update was under way"):
        with dsx_zero.GatheredParameters(model, modifier_rank=0), torch.no_grad():
            model.blocks[0].weight.mul_(0.5)


@pytest.mark.parametrize("edit", [edited, edited_together])
def test_parameters_written_meanwhile_raise(edit):
    run_ranks(edit, 2)


def failing(rank, world):
    class Breaks(torch.optim.SGD):
        steps_in_parts = True
        needs_whole_tensors = False  # else `shard` tries a step, on this rank too

        def step(self, closure=None):
            if rank == 1:
                raise OSError("broken")
            return super().step(closure)

    config = {"stage": 2, "offload_optimizer": {"device": "cpu", "late_update_after": 0}}
    model, optimizer = dsx_zero.shard(tiny.Residual(depth=3), lambda p: Breaks(p, lr=0.1), config=config)
    model(model.batch(rank, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(model.batch(rank, 1)).backward()
    with pytest.raises(dsx_zero.ZeroStateError, match="rank 1: the update of the step before failed: OSError: broken"):
        optimizer.step()


def test_a_failure_reaches_all_ranks_in_the_next_step():
    run_ranks(failing, 2)


@pytest.mark.parametrize(
    ("section", "text"),
    [
        (
            {"device": "nvme", "late_update_after": 3, "max_in_cpu": 100},
            "whose masters are on disk would wait .* room for 100;",
        ),
        ({"device": "cpu", "late_update_after": 3, "ratio": 0.5}, "set ratio to 1"),
        ({"device": "cpu", "late_update_after": -1}, "greater than or equal to 0"),
    ],
)
def test_what_cannot_be_late_is_refused(section, text, tmp_path):
    store = None
    if section["device"] == "nvme":
        store = pytest.importorskip("dsx_nvme").TensorStore(str(tmp_path))
    config = {"stage": 2, "offload_optimizer": section}
    with pytest.raises(dsx_zero.ZeroConfigError, match=text):
        dsx_zero.shard(tiny.Residual(depth=3), adamw, config=config, store=store)


def test_an_optimizer_that_is_stepped_at_once_is_refused():
    class Counting(torch.optim.SGD):
        pass

    config = {"stage": 2, "offload_optimizer": {"device": "cpu", "late_update_after": 3}}
    with pytest.raises(dsx_zero.ZeroConfigError, match="does not say that it can be stepped in parts"):
        dsx_zero.shard(tiny.Residual(depth=3), lambda p: Counting(p, lr=0.1), config=config)
