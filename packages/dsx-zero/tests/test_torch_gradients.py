"""What PyTorch users do with gradients, on a sharded model as on a plain one: a row of the README's table each."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dsx_testkit import run_ranks
from dsx_testkit.torch_calls import Row, Training, misdocumented, outcomes, unexpected, worse
from torch import nn

README = Path(__file__).resolve().parents[1] / "README.md"
NO_VALUES = "no rank holds its values"
IN_BACKWARD = "inside a backward"


def each_step(treat, steps=3):
    """Train, and treat the gradients of each step before it."""

    def run(t: Training) -> None:
        for index in range(steps):
            t.loss(index).backward()
            treat(t)
            t.step()

    return run


def on_gradients(treat):
    def all_of_them(t: Training) -> None:
        gradients = [p.grad for p in t.model.parameters() if p.grad is not None]
        assert len(gradients) == 6
        for grad in gradients:
            treat(grad)

    return each_step(all_of_them)


def clearing(clear):
    def run(t: Training) -> None:
        for index in range(3):
            t.loss(100 + index).backward()
            clear(t)
            t.loss(index).backward()
            t.optimizer.step()
            clear(t)

    return run


def clear_parameters(t):
    for p in t.model.parameters():
        p.grad = None


def delete(t):
    for p in t.model.parameters():
        del p.grad


def clear_groups(t):
    for group in t.optimizer.param_groups:
        for p in group["params"]:
            p.grad = None


def clear_part(t):
    t.loss(100).backward()
    t.model.head.zero_grad()
    t.loss(0).backward()
    t.step()
    t.train()


def between_backward_and_step(t):
    t.train(1)
    t.loss(0).backward()
    t.model.zero_grad()
    t.optimizer.step()


def clip(**options):
    def treat(t):
        parameters = list(t.model.parameters())
        want = torch.linalg.vector_norm(torch.stack([p.grad.norm(options.get("norm_type", 2.0)) for p in parameters]),
                                        options.get("norm_type", 2.0))  # fmt: skip
        found = nn.utils.clip_grad_norm_(parameters, 0.05, **options)
        assert math.isclose(found.item(), want.item(), rel_tol=1e-4)

    return each_step(treat)


def in_two_calls(t):
    gradients = [p.grad for p in t.model.parameters()]
    nn.utils.clip_grads_with_norm_(t.model.parameters(), 0.05, nn.utils.get_total_norm(gradients))


def clip_groups(t):
    nn.utils.clip_grad_norm_([p for group in t.optimizer.param_groups for p in group["params"]], 0.05)


def non_finite(t):
    (t.loss(0) * math.inf).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(t.model.parameters(), 0.05, error_if_nonfinite=True)
    t.model.zero_grad()
    t.train()


def assign(t):
    for p in t.model.parameters():
        p.grad = torch.full_like(p, 0.1)
    t.step()
    t.loss(0).backward()
    for p in t.model.parameters():
        p.grad = torch.full_like(p, -0.1)
    t.step()
    t.train()


def assign_then_add(t):
    for p in t.model.parameters():
        p.grad = torch.full_like(p, 0.1)
    t.train()


def autograd_grad(t):
    for index in range(2):
        parameters = list(t.model.parameters())
        for p, grad in zip(parameters, torch.autograd.grad(t.loss(index), parameters)):
            p.grad = grad
        t.step()


def noise(grad):
    generator = torch.Generator().manual_seed(grad.numel())
    grad.add_(torch.randn(grad.shape, generator=generator, dtype=grad.dtype) * 0.1)


def mask(grad):
    grad.data[..., 0] = 0


def foreach(t):
    torch._foreach_mul_([p.grad for p in t.model.parameters()], 0.1)


def norms(t):
    t.loss(0).backward()
    found = [p.grad.norm().item() for p in t.model.parameters()]
    t.step()
    for p, norm in zip(t.model.parameters(), found):  # a rate for each tensor from its gradient
        with torch.no_grad():
            p.mul_(1.0 / (1.0 + norm))
    t.train()


def sgd_by_hand(t):
    for index in range(2):
        t.loss(index).backward()
        with torch.no_grad():
            for p in t.model.parameters():
                p.sub_(0.1 * p.grad)
        t.model.zero_grad()


def average_by_hand(t):
    t.loss(0).backward()
    for p in t.model.parameters():
        if t.sharded:
            dist.all_reduce(p.grad)
            p.grad.div_(t.world)
    t.step()


def tensor_hook(t):
    t.model.head.weight.register_hook(lambda grad: grad * 0.5)
    t.train()


def accumulate_hook(t):
    seen, weight = [], t.model.head.weight
    handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(p is weight))
    t.train(1)
    handle.remove()
    t.train(1)
    assert seen == [True]
    handle = weight.register_post_accumulate_grad_hook(lambda p: 1)
    with pytest.raises((TypeError, RuntimeError), match="hook"):
        t.loss(0).backward()
    handle.remove()
    t.model.zero_grad()


def change_in_accumulate_hook(t):
    def halve(p):
        p.grad.mul_(0.5)

    t.model.head.weight.register_post_accumulate_grad_hook(halve)
    t.train()


def step_in_backward(t):
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in t.model.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in t.model.parameters():
        p.register_post_accumulate_grad_hook(step)
    t.loss(0).backward()


def module_hook(t):
    t.model.layers[1].register_full_backward_hook(lambda module, given, taken: tuple(g * 0.5 for g in given))
    t.train()


def accumulate(t):
    for index in range(2):
        (t.loss(index) / 2).backward()
        (t.loss(10 + index) / 2).backward()
        t.step()


def accumulate_without_sync(t):
    from contextlib import nullcontext

    for index in range(4):
        with t.optimizer.no_sync() if t.sharded else nullcontext():
            (t.loss(index) / 2).backward()
        (t.loss(10 + index) / 2).backward()
        nn.utils.clip_grad_norm_(t.model.parameters(), 0.5)
        t.step()


def retain(t):
    for index in range(2):
        loss = t.loss(index)
        loss.backward(retain_graph=True)
        loss.backward()
        t.step()


def create_graph(t):
    for index in range(2):
        t.loss(index).backward(create_graph=True)
        t.loss(10 + index).backward(create_graph=True)
        t.step()


def only_some(t):
    for index in range(2):
        t.loss(index).backward(inputs=list(t.model.head.parameters()))
        assert t.model.head.weight.grad is not None
        nn.utils.clip_grad_norm_(t.model.head.parameters(), 0.1)
    for p in t.model.layers.parameters():
        p.grad = torch.zeros_like(p)
    t.step()


def grad_scaler(t, clips):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    for index in range(4):
        last = t.rank == t.world - 1 or not t.sharded
        scaler.scale(t.loss(index) * (math.inf if index == 2 and last else 1.0)).backward()
        if clips:
            scaler.unscale_(t.optimizer)
            nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
        scaler.step(t.optimizer)
        scaler.update()
        t.optimizer.zero_grad()
    assert scaler.get_scale() == 16.0  # up, up, down, up


def stale(t):
    loss = t.loss(0)
    t.train(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    t.model.zero_grad()
    t.train()


def nan_check(t):
    t.loss(0).backward()
    assert not any(torch.isnan(p.grad).any() for p in t.model.parameters())
    t.step()


ROWS = [
    Row("`model.zero_grad()`", clearing(lambda t: t.model.zero_grad())),
    Row("`model.zero_grad(set_to_none=False)`", clearing(lambda t: t.model.zero_grad(set_to_none=False))),
    Row("`optimizer.zero_grad(set_to_none=False)`", clearing(lambda t: t.optimizer.zero_grad(set_to_none=False))),
    Row("`p.grad = None`, `del p.grad`", clearing(clear_parameters)),
    Row("`p.grad = None`, `del p.grad`", clearing(delete), variant="deleted"),
    Row("`p.grad = None` for the parameters of `optimizer.param_groups`", clearing(clear_groups)),
    Row("`module.zero_grad()` of a part of the model", clear_part),
    # A gradient that is missing counts as zeros in dsx-zero: with momentum the two differ, as documented.
    Row(
        "`zero_grad()` between backward and step",
        between_backward_and_step,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.3),
    ),
    Row("`clip_grad_norm_(model.parameters(), m)`", clip()),
    Row("`clip_grad_norm_` with another `norm_type`", clip(norm_type=math.inf)),
    Row("`clip_grad_norm_` with another `norm_type`", clip(norm_type=1.0), variant="1"),
    Row("`get_total_norm`, `clip_grads_with_norm_`", each_step(in_two_calls)),
    Row("`clip_grad_norm_` of the parameters of `optimizer.param_groups`", each_step(clip_groups)),
    Row("`clip_grad_norm_(..., error_if_nonfinite=True)`", non_finite),
    Row("`clip_grad_value_`", each_step(lambda t: nn.utils.clip_grad_value_(t.model.parameters(), 0.01))),
    Row(
        "`p.grad.mul_(c)`, `p.grad /= c`, `p.grad.clamp_(...)`",
        on_gradients(lambda grad: grad.mul_(0.5).clamp_(-0.1, 0.1)),
    ),
    Row("`p.grad.copy_(x)`, `p.grad.add_(noise)`, `p.grad.data[...] = 0`", on_gradients(noise)),
    Row("`p.grad.copy_(x)`, `p.grad.add_(noise)`, `p.grad.data[...] = 0`", on_gradients(mask), variant="a part"),
    Row("`torch._foreach_mul_(grads, c)`", each_step(foreach)),
    Row("`p.grad = x`", assign),
    Row("`p.grad = x`, then a backward", assign_then_add),
    Row("`p.grad.norm()`", norms),
    Row(
        "other reads of `p.grad` (`p.grad.abs()`, `torch.isnan(p.grad)`)",
        nan_check,
        {1: NO_VALUES, 2: NO_VALUES, 3: NO_VALUES},
    ),
    Row("SGD by hand: `p.sub_(lr * p.grad)`", sgd_by_hand, {1: NO_VALUES, 2: NO_VALUES, 3: NO_VALUES}),
    Row("averaging by hand: `dist.all_reduce(p.grad)`", average_by_hand, {1: NO_VALUES, 2: NO_VALUES, 3: NO_VALUES}),
    Row("`torch.autograd.grad(loss, parameters)`", autograd_grad, {3: "GatheredParameters"}),
    Row("`p.register_hook`", tensor_hook),
    Row("`p.register_post_accumulate_grad_hook`", accumulate_hook),
    Row("`p.grad` changed in such a hook", change_in_accumulate_hook, {1: IN_BACKWARD, 2: IN_BACKWARD, 3: IN_BACKWARD}),
    Row(
        "an optimizer step in such a hook",
        step_in_backward,
        {0: "differs", 1: IN_BACKWARD, 2: IN_BACKWARD, 3: IN_BACKWARD},
    ),
    Row("`module.register_full_backward_hook`", module_hook),
    Row("several backwards before a step", accumulate),
    Row("several backwards before a step", accumulate_without_sync, variant="some in `no_sync`, clipped"),
    Row("`backward(retain_graph=True)`", retain),
    Row("`backward(create_graph=True)`", create_graph),
    Row("`backward(inputs=[...])`", only_some, {3: "GatheredParameters"}),
    Row("`torch.amp.GradScaler`: `scale`, `step`, `update`", lambda t: grad_scaler(t, clips=False)),
    Row("`torch.amp.GradScaler`: `unscale_` and clipping", lambda t: grad_scaler(t, clips=True)),
    Row("backward through a graph of before the step", stale),
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_mean_what_they_mean_in_torch(stage):
    assert not (wrong := unexpected(ROWS, stage, run_ranks(outcomes, 2, ROWS, stage))), "\n".join(wrong)


def test_one_rank():
    plain = [dataclasses.replace(row, raises={}) for row in ROWS if row.run is not average_by_hand]
    assert not (wrong := unexpected(plain, 1, run_ranks(outcomes, 1, plain, 1))), "\n".join(wrong)
    assert not (wrong := worse(ROWS, 3, run_ranks(outcomes, 1, ROWS, 3)[0])), "\n".join(wrong)


def test_three_ranks_in_16_bits():
    rows = [row for row in ROWS if row.run not in (stale, create_graph, non_finite) and "GradScaler" not in row.name]
    assert not (wrong := unexpected(rows, 2, run_ranks(outcomes, 3, rows, 2, torch.bfloat16))), "\n".join(wrong)


def test_the_readme_says_what_is_tested():
    assert not (wrong := misdocumented(ROWS, README.read_text(), "Gradients")), "\n".join(wrong)
