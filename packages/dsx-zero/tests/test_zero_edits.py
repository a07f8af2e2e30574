"""In-place edits of parameters between steps last, in every stage, with masters of their own and without."""

from __future__ import annotations

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks, tiny
from torch.utils._python_dispatch import TorchDispatchMode


def whole(parameter):
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().float().clone()


def train(model, optimizer, rank, steps):
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        x, y = model.example(2, seed=10 * step + rank)
        model.loss(x.to(dtype), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def check_edits(rank, world, dtype, persistence):
    for stage in range(4):
        model, optimizer = dsx_zero.shard(
            tiny.MLP().to(dtype),
            lambda params: torch.optim.SGD(params, lr=1e-3),
            stage=stage,
            config={"stage3_param_persistence_threshold": persistence},
        )
        train(model, optimizer, rank, 2)
        names = [name for name, p in model.named_parameters() if p.dim() == 2]
        edited, other = names[0], names[1]
        resident = stage < 3 or persistence  # partitioned parameters refuse indexing
        parameters = dict(model.named_parameters())
        expected = whole(parameters[edited]) * 0.5
        master = dsx_zero.safe_get_full_fp32_param(parameters[other]).clone()
        with torch.no_grad():
            parameters[edited].mul_(0.5)
            if resident:
                parameters[edited][0].zero_()
                expected[0] = 0
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        train(model, optimizer, rank, 1)
        parameters = dict(model.named_parameters())
        where = f"stage {stage}, {dtype}, threshold {persistence}"
        assert torch.equal(whole(parameters[edited]), expected.to(dtype).float()), where
        # What was not edited keeps its master's low bits.
        assert torch.equal(dsx_zero.safe_get_full_fp32_param(parameters[other]), master), where
        taken = dsx_zero.safe_get_full_fp32_param(parameters[edited])
        torch.testing.assert_close(taken, expected, rtol=1e-2, atol=1e-6, msg=where)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_edit_lasts(world, dtype):
    for persistence in (0, 10**9):
        run_ranks(check_edits, world, dtype, persistence)


def check_data_edit(rank, world, stage):
    """Writes through `.data` leave no trace; `refresh_fp32_params` takes them over."""
    model, optimizer = dsx_zero.shard(
        tiny.MLP().bfloat16(), lambda params: torch.optim.SGD(params, lr=1e-3), stage=stage
    )
    assert optimizer.get_global_grad_norm() is None and not optimizer.overflow and optimizer.loss_scale == 1.0
    name = next(name for name, _ in model.named_parameters())
    model.get_parameter(name).data.fill_(0.75)
    optimizer.refresh_fp32_params()
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, rank, 1)
    assert torch.equal(whole(model.get_parameter(name)), torch.full_like(whole(model.get_parameter(name)), 0.75))
    assert optimizer.get_global_grad_norm() > 0 and not optimizer.overflow
    optimizer.control.follow_loss_scale(lambda: 8.0)
    assert optimizer.loss_scale == optimizer.cur_scale == 8.0


@pytest.mark.parametrize("world", [1, 2])
def test_masters_can_be_refreshed(world):
    for stage in range(4):
        run_ranks(check_data_edit, world, stage)


def check_saved_edit(rank, world):
    model, optimizer = dsx_zero.shard(tiny.MLP().bfloat16(), lambda params: torch.optim.SGD(params, lr=1e-3), stage=2)
    name, parameter = next(iter(model.named_parameters()))
    with torch.no_grad():
        parameter.fill_(0.25)
    (part,) = [part for part in optimizer.slices() if part.name == name]
    assert torch.equal(part.master, torch.full_like(part.master, 0.25))


def test_an_edit_before_a_checkpoint_is_in_it():
    run_ranks(check_saved_edit, 2)


class Recorded(TorchDispatchMode):
    """Elements that each operation compared."""

    def __init__(self):
        super().__init__()
        self.compared = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith(("aten.ne.", "aten.where.")):
            self.compared += sum(a.numel() for a in args if isinstance(a, torch.Tensor))
        return func(*args, **(kwargs or {}))


def count_comparisons(rank, world, stage, persistence):
    """Elements compared in a step without edits."""
    model, optimizer = dsx_zero.shard(
        tiny.MLP(hidden=128).bfloat16(), lambda params: torch.optim.SGD(params, lr=1e-3), stage=stage,
        config={"stage3_param_persistence_threshold": persistence},
    )  # fmt: skip
    train(model, optimizer, rank, 2)
    x, y = model.example(2, seed=rank)
    model.loss(x.bfloat16(), y).backward()
    with Recorded() as quiet:
        optimizer.step()
    optimizer.zero_grad()
    return quiet.compared


@pytest.mark.parametrize(("stage", "persistence"), [(1, 0), (3, 10**9), (3, 0)])
def test_a_step_without_edits_compares_no_parameters(stage, persistence):
    """Stage 3 compared every shard with its master in every step: its own updates counted as edits."""
    count = sum(p.numel() for p in tiny.MLP(hidden=128).parameters())
    for compared in run_ranks(count_comparisons, 2, stage, persistence):
        assert compared < count / 4  # sums that tell whether memory was written are compared, a word for each 64 bytes


class Sums(TorchDispatchMode):
    """Counts what looks at the parameters' memory as words of 8 bytes, and what makes the host read a device."""

    def __init__(self):
        super().__init__()
        self.words = self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.words += func._schema.name == "aten::sum" and args[0].dtype == torch.int64 and args[0].dim() == 2
        self.reads += func._schema.name == "aten::_local_scalar_dense"
        return func(*args, **(kwargs or {}))


def masters_follow(rank, world, setting, first_write, last_write):
    """Whether a write through `.data` before update `last_write` lasts; sums and reads of an update after it."""
    model, optimizer = dsx_zero.shard(
        tiny.MLP().bfloat16(),
        lambda params: torch.optim.SGD(params, lr=0.0),
        config={"stage": 1, "notice_data_writes": setting},
    )
    weight = next(model.parameters())
    for update in range(last_write + 1):
        if update in (first_write, last_write):
            weight.data.fill_(0.5 + update)
        train(model, optimizer, rank, 1)
    x, y = model.example(2, seed=rank)
    model.loss(x.bfloat16(), y).backward()
    with Sums() as counted:
        optimizer.step()
    optimizer.zero_grad()
    return bool((weight == 0.5 + last_write).all()), counted.words, counted.reads


@pytest.mark.parametrize(
    ("setting", "first_write", "last_write", "lasts", "watched"),
    [
        (None, 0, 0, True, True),  # weights that are set after sharding, and again at once
        (None, 2, 9, True, True),  # a program that clamps weights so
        (None, None, 9, False, False),
        (True, None, 9, True, True),
        (False, None, 0, False, False),
    ],
)
def test_writes_that_leave_no_trace_are_looked_for_where_there_may_be_some(
    setting, first_write, last_write, lasts, watched
):
    for found, words, reads in run_ranks(masters_follow, 2, setting, first_write, last_write):
        assert found is lasts
        assert bool(words) is watched
        assert reads or not watched
