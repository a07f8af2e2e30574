"""`step_during_backward`: units with masters on the host are stepped while backward goes on, with the bits of a step
after it, and never where that cannot be known.
"""

from __future__ import annotations

import copy
import time

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks, tiny

pytest.importorskip("dsx_ops")

WIDTH = 40


def net(dtype=torch.float32):
    return tiny.Residual(WIDTH, aside=True, dtype=dtype)


def adam(parameters):
    import dsx_ops

    return dsx_ops.FusedAdam(parameters, lr=1e-2, weight_decay=0.1)


def built(stage, dtype=torch.float32, optimizer=adam, model=None, **section):
    offload = {"device": "cpu", **section}
    config = {
        "stage": stage,
        "reduce_bucket_size": WIDTH * WIDTH + WIDTH,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": offload if section.get("device") != "none" else None,
    }
    precision = dsx_zero.Precision(check_overflow=False)
    model = model or net(dtype)
    return dsx_zero.shard(model, optimizer, config=config, precision=precision)


def void(_):
    return None


class Watch:
    """Waits, when backward comes to the first block, until the last block's master has changed."""

    def __init__(self, model, optimizer):
        self.optimizer, self.seen, self.waits = optimizer, [], False
        model.blocks[0].register_forward_hook(lambda module, args, out: void(out.register_hook(self.arrived)))
        for parameter in optimizer.control.gradient_parameters():
            parameter.register_hook(lambda grad: time.sleep(0.002) if self.waits else None)  # reductions go on

    def master(self):
        return [m.tensor.detach().clone() for m in self.optimizer.layout.masters_of("blocks.5.weight")]

    def before(self):
        self.old = self.master()

    def arrived(self, grad):
        if not self.old:
            self.seen.append(None)  # this rank owns nothing of it
            return
        end = time.monotonic() + (5.0 if self.waits else 0.0)
        changed = False
        while not changed and time.monotonic() < end:
            changed = any(not torch.equal(a, b) for a, b in zip(self.master(), self.old))
            time.sleep(0.005)
        self.seen.append(changed)


def whole(model, optimizer):
    found = [dsx_zero.safe_get_full_fp32_param(name, optimizer=optimizer) for name, _ in model.named_parameters()]
    found += [
        dsx_zero.safe_get_full_optimizer_state(name, "exp_avg_sq", optimizer=optimizer)
        for name, _ in model.named_parameters()
    ]
    with dsx_zero.GatheredParameters(model):
        return found + [p.detach().clone() for p in model.parameters()]


def trained(rank, world, stage, dtype, announces, steps=6, micro=2, frozen=""):
    model, optimizer = built(stage, dtype)
    watch = Watch(model, optimizer)
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    said, norms = [], []
    for step in range(steps):
        for part in range(micro):
            last = part == micro - 1
            watch.before()
            watch.waits = False
            if last and announces:
                said.append(optimizer.step_during_backward(grad_scale=2.0))
                watch.waits = said[-1]
            loss = model(model.batch(rank, 10 * step + part)) * (2.0 / micro)
            loss.backward()
        norms.append(optimizer.step(grad_scale=2.0).grad_norm)
        optimizer.zero_grad()
        if step == 3:  # states go out and come back
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return whole(model, optimizer), norms, said, watch.seen


SAMPLE = {(1, 2, torch.float32), (2, 1, torch.bfloat16), (2, 2, torch.float32), (3, 2, torch.bfloat16)}
MATRIX = [
    pytest.param(stage, world, dtype, marks=() if (stage, world, dtype) in SAMPLE else pytest.mark.slow)
    for stage, world in ((1, 2), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2))
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(("stage", "world", "dtype"), MATRIX)
def test_the_bits_of_a_step_after_backward(stage, world, dtype):
    wanted = run_ranks(trained, world, stage, dtype, False)
    found = run_ranks(trained, world, stage, dtype, True)
    owners = 0
    for (want, norms, none, _), (got, same_norms, said, seen) in zip(wanted, found, strict=True):
        assert [torch.equal(a, b) for a, b in zip(got, want, strict=True)] == [True] * len(want)
        assert norms == same_norms
        assert none == []
        assert said == [False, False, True, True, True, True]  # two trials
        early = [changed for changed, waited in zip(seen[1::2], said) if waited]
        owners += True in early
        if stage > 1:  # at stage 1 backward waits for no reduction, so that one may end late
            assert early in ([True] * 4, [None] * 4)
    assert owners  # the last block was stepped while the first one's backward still ran


def frozen_after_sharding(rank, world):
    values, norms, _, _ = trained(rank, world, 2, torch.float32, False, frozen="blocks.5.bias")
    same, same_norms, said, seen = trained(rank, world, 2, torch.float32, True, frozen="blocks.5.bias")
    pairs = [(a, b) for a, b in zip(values, same, strict=True) if a is not None]  # it has no optimizer state
    assert all(torch.equal(a, b) for a, b in pairs) and norms == same_norms
    assert said == [False, False, True, True, True, True]
    assert [changed for changed, waited in zip(seen[1::2], said) if waited] == [True] * 4


def test_a_unit_does_not_wait_for_a_parameter_that_was_frozen_after_sharding():
    run_ranks(frozen_after_sharding, 1)


def refusals(rank, world):
    class Counting(torch.optim.SGD):
        """It does not say that it can be stepped in parts."""

    cases = [
        ({"step_during_backward": False}, adam, torch.float32, True),
        ({"device": "none"}, adam, torch.float32, True),
        ({"step_during_backward": True}, lambda p: Counting(p, lr=1e-2), torch.float32, True),
        (
            {},
            lambda p: torch.optim.AdamW(p, lr=1e-2),
            torch.float32,
            True,
        ),  # as its steps could be undone
        ({}, adam, torch.bfloat16, None),  # overflow is checked
    ]
    for section, optimizer, dtype, check in cases:
        config = {"stage": 2, "offload_optimizer": {"device": "cpu", **section}}
        precision = dsx_zero.Precision(check_overflow=None if check is None else False)
        model, sharded = dsx_zero.shard(net(dtype), optimizer, config=config, precision=precision)
        for step in range(4):
            assert not sharded.step_during_backward()
            model(model.batch(rank, step)).backward()
            sharded.step(max_norm=1.0)
            sharded.zero_grad()
        sharded.release()


def test_units_that_are_never_stepped_early():
    run_ranks(refusals, 2)


def unused(rank, world):
    """A unit whose gradients come on one rank only, and not in every step: it is stepped when all is known."""
    plain = net()
    model, optimizer = built(2, model=copy.deepcopy(plain))
    reference = adam(plain.parameters())
    said = []
    for step in range(8):
        # In steps 5 and 7 a gradient is late: what came before it has been reduced.
        uses = ["all" if step in (5, 7) and r == 0 else "weight" for r in range(world)]
        for r in range(world):
            plain.uses_aside = uses[r]
            (plain(plain.batch(r, step)) / world).backward()
        if plain.aside.bias.grad is None:
            plain.aside.bias.grad = torch.zeros_like(plain.aside.bias)
        reference.step()
        reference.zero_grad()
        model.uses_aside = uses[rank]
        said.append(optimizer.step_during_backward())
        model(model.batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert said[-1]
    for name, p in plain.named_parameters():
        got = dsx_zero.safe_get_full_fp32_param(name, optimizer=optimizer)
        assert torch.allclose(got, p, rtol=1e-4, atol=1e-6), name


def test_gradients_that_only_some_ranks_have():
    run_ranks(unused, 2)


def scheduled(rank, world):
    """What is done in the trials decides: rates set between backward and step, and units are never stepped early."""
    model, optimizer = built(2)
    said = []
    for step in range(5):
        said.append(optimizer.step_during_backward())
        model(model.batch(rank, step)).backward()
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        optimizer.step()
        optimizer.zero_grad()
    assert said == [False] * 5


def test_a_loop_that_changes_rates_before_the_step_keeps_its_meaning():
    run_ranks(scheduled, 2)


def change_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] *= 0.5


def clip(model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-4)


def set_gradient(model, optimizer):
    p = next(iter(model.parameters()))
    dsx_zero.safe_set_full_grad(p, torch.ones(p.shape))


def drop_gradients(model, optimizer):
    model.zero_grad()


def write_parameter(model, optimizer):
    with torch.no_grad():
        model.blocks[2].weight.mul_(0.5)


def write_data(model, optimizer):
    model.blocks[2].weight.data.mul_(0.5)


def nothing(model, optimizer):
    pass


CHANGES = [
    (change_rate, {}, "settings of the parameter groups"),
    (clip, {}, "gradients or masters of unit"),
    (set_gradient, {}, "gradients or masters of unit"),
    (drop_gradients, {}, "gradients or masters of unit"),
    (write_parameter, {}, "were written between backward and step"),
    (write_data, {}, "were written between backward and step"),
    (nothing, {"max_norm": 1.0}, "needs the norm of the gradients before the first update"),
    (nothing, {"grad_scale": 4.0}, "expected the announced 1.0"),
]


def changed(rank, world, stage, number):
    change, arguments, text = CHANGES[number]
    model, optimizer = built(stage)
    for step in range(3):
        early = optimizer.step_during_backward()
        model(model.batch(rank, step)).backward()
        if not early:
            optimizer.step()
            optimizer.zero_grad()
    change(model, optimizer)
    with pytest.raises(dsx_zero.ZeroStateError, match=text) as raised:
        optimizer.step(**arguments)
    assert "step_during_backward to false" in str(raised.value)
    with pytest.raises(dsx_zero.ZeroStateError, match="begun during backward"):
        optimizer.state_dict()
    optimizer.release()


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_a_change_between_backward_and_step_raises(number):
    run_ranks(changed, 2, 2, number)


@pytest.mark.parametrize("number", [1, 4])
def test_a_change_at_stage_3_raises(number):
    run_ranks(changed, 2, 3, number)


def another_backward(rank, world):
    model, optimizer = built(2)
    saved = None
    for step in range(3):
        saved = copy.deepcopy(optimizer.state_dict())
        early = optimizer.step_during_backward()
        model(model.batch(rank, step)).backward()
        if not early:
            optimizer.step()
            optimizer.zero_grad()
    assert early
    assert dsx_zero.safe_get_full_grad("blocks.0.weight", optimizer=optimizer) is not None  # reading is fine
    with pytest.raises(dsx_zero.ZeroStateError, match=r"began|begun|came after the one"):
        model(model.batch(rank, 9)).backward()
    with pytest.raises(dsx_zero.ZeroStateError, match="call step"):
        dsx_zero.safe_get_full_fp32_param("blocks.0.weight", optimizer=optimizer)
    optimizer.zero_grad()
    optimizer.load_state_dict(saved)  # the way out
    for step in range(2, 4):
        optimizer.step_during_backward()
        model(model.batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    got = whole(model, optimizer)
    optimizer.release()
    other, plain = built(2, step_during_backward=False)
    for step in range(4):
        other(other.batch(rank, step)).backward()
        plain.step()
        plain.zero_grad()
    assert [torch.equal(a, b) for a, b in zip(got, whole(other, plain), strict=True)] == [True] * len(got)


def test_another_backward_is_refused_and_a_checkpoint_is_the_way_out():
    run_ranks(another_backward, 2)


def failing(rank, world):
    """The optimizer of one rank fails on the worker: all ranks raise the same."""
    import dsx_ops

    class Breaks(dsx_ops.FusedAdam):
        broken = False

        def step_flat(self, *args, **kwargs):
            if type(self).broken:
                raise OSError("the host has had enough")
            super().step_flat(*args, **kwargs)

    model, optimizer = built(2, optimizer=lambda p: Breaks(p, lr=1e-2))
    for step in range(3):
        Breaks.broken = rank == 1 and step == 2
        optimizer.step_during_backward()
        model(model.batch(rank, step)).backward()
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(dsx_zero.ZeroStateError, match=r"rank 1: .*OSError: the host has had enough") as raised:
        optimizer.step()
    assert isinstance(raised.value.__cause__, OSError) == (rank == 1)
    optimizer.release()
    return str(raised.value)


def test_a_failure_on_the_worker_is_the_same_error_on_all_ranks():
    first, second = run_ranks(failing, 2)
    assert first == second


def reentrant(rank, world):
    """Reentrant checkpointing brings a parameter several gradients: nothing is stepped early, and results hold."""
    from torch.utils.checkpoint import checkpoint

    class Twice(tiny.Residual):
        def forward(self, x):
            x = torch.tanh(self.blocks[0](x))
            for _ in range(2):
                x = checkpoint(self.blocks[0], x, use_reentrant=True)
            for block in self.blocks[1:]:
                x = x + torch.tanh(block(x))
            return x.square().mean()

    found = []
    for early in (False, True):
        model, optimizer = built(2, model=Twice(WIDTH, aside=True), step_during_backward=early)
        for step in range(5):
            optimizer.step_during_backward()
            model(model.batch(rank, step).requires_grad_()).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole(model, optimizer))
        optimizer.release()
    assert [torch.equal(a, b) for a, b in zip(*found, strict=True)] == [True] * len(found[0])


def test_backwards_inside_of_backward():
    run_ranks(reentrant, 2)
