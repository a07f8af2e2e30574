"""Rows, columns, matrices and lists of them that optimizers of whole tensors keep (Adafactor, Shampoo, SOAP): in
checkpoints they are tensors of their own shape, and go on at another stage and number of ranks with the same bits.
"""

import dsx_checkpoint
import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

LAYOUTS = [((2, 3), (4, 1)), ((4, 2), (1, 3)), ((1, 0), (2, 2)), ((2, 1), (2, 0)), ((2, 0), (1, 0))]


class Preconditioned(torch.optim.Optimizer):
    """Both sides of a matrix are preconditioned, as by Shampoo; a vector is stepped by its momentum."""

    needs_whole_tensors = True

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad, self.state[p]
                state["step"] = state.get("step", 0) + 1
                if grad.dim() != 2:
                    buffer = state.setdefault("momentum", torch.zeros_like(p))
                    p.sub_(group["lr"] * buffer.mul_(0.9).add_(grad))
                    continue
                left = state.setdefault("left", torch.eye(grad.shape[0]) * 1e-2)
                right = state.setdefault("right", torch.eye(grad.shape[1]) * 1e-2)
                left.add_(grad @ grad.t())
                right.add_(grad.t() @ grad)
                p.sub_(group["lr"] * torch.linalg.solve(left, grad) @ torch.linalg.inv(right) * 1e-3)


class SOAP(torch.optim.Optimizer):
    """Adam in the eigenvectors of Shampoo's matrices, whose states are lists with one entry per side of a matrix, and
    an empty list for a long side (as in the published program); the first step only makes the states.
    """

    def __init__(self, params, lr=0.05, longest=20):
        super().__init__(params, {"lr": lr, "longest": longest})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, sides = self.state[p], p.grad.shape if p.dim() == 2 else ()
                if "step" not in state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p), Q=None)
                    state["GG"] = [torch.zeros(n, n) if n <= group["longest"] else [] for n in sides]
                    self.refresh(p, state)
                    continue
                self.refresh(p, state)
                state["step"] += 1
                turned = self.turned(p.grad, state, back=False)
                state["exp_avg"].lerp_(p.grad, 0.1)
                state["exp_avg_sq"].lerp_(turned.square(), 0.05)
                update = self.turned(state["exp_avg"], state, back=False) / (state["exp_avg_sq"].sqrt() + 1e-8)
                p.sub_(group["lr"] * self.turned(update, state, back=True))

    @staticmethod
    def refresh(p, state):
        for side, found in enumerate(state["GG"]):
            if len(found):
                found.lerp_(p.grad @ p.grad.t() if side == 0 else p.grad.t() @ p.grad, 0.05)
        state["Q"] = [torch.linalg.eigh(gg + 1e-6 * torch.eye(len(gg)))[1] if len(gg) else [] for gg in state["GG"]]

    @staticmethod
    def turned(x, state, *, back):
        for side, q in enumerate(state["Q"]):
            if len(q):
                q = q if back else q.t()
                x = q @ x if side == 0 else x @ q.t()
        return x


KINDS = {
    "soap": SOAP,
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.02),
    "shampoo": Preconditioned,
}


class Model(nn.Module):
    """Matrices of odd sizes, one of a single row, one that is frozen, a tied one, a number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(13, 21), nn.Tanh(), nn.Linear(21, 13)) for _ in range(2))
        self.row, self.frozen = nn.Linear(13, 1, bias=False), nn.Linear(13, 13)
        self.square = nn.Linear(13, 13)
        self.tied = nn.Linear(13, 13, bias=False)
        self.tied.weight = self.square.weight
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        x = self.frozen(self.tied(torch.tanh(self.square(x)))) + self.row(x)
        return (x * self.scale).square().mean()


def sharded(kind, stage):
    return dsx_zero.shard(Model(), KINDS[kind], config={"stage": stage, "stage3_param_persistence_threshold": 0})


def train(model, optimizer, steps):
    for step in steps:
        x = torch.randint(-8, 9, (5, 13), generator=torch.Generator().manual_seed(step)).float() / 8
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model):
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for n, p in model.named_parameters()}  # fmt: skip


def plain(kind, steps):
    model = Model()
    optimizer = KINDS[kind]([p for p in model.parameters() if p.requires_grad])
    train(model, optimizer, range(steps))
    return model, optimizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source,target", LAYOUTS, ids=str)
def test_a_checkpoint_goes_on_with_the_same_bits_in_another_layout(tmp_path, kind, source, target):
    run_ranks(save, source[0], str(tmp_path), kind, source[1])
    check_files(tmp_path, kind)
    run_ranks(go_on, target[0], str(tmp_path), kind, target[1])


def save(rank, world, folder, kind, stage):
    model, optimizer = sharded(kind, stage)
    train(model, optimizer, range(3))
    dsx_checkpoint.save(folder, "here", module=model, slices=optimizer.slices(), state={})


def go_on(rank, world, folder, kind, stage):
    expected, _ = plain(kind, 6)
    model, optimizer = sharded(kind, stage)
    train(model, optimizer, range(world % 2))  # something to be replaced, or no states yet
    assert dsx_checkpoint.load(folder, "here", module=model, optimizer=optimizer) is not None
    train(model, optimizer, range(3, 6))
    for name, value in whole(model).items():
        assert torch.equal(value, dict(expected.named_parameters())[name]), name


def check_files(folder, kind):
    """Every state of the plain optimizer lies in the checkpoint, in its shape and with its values."""
    model, optimizer = plain(kind, 3)
    reader = dsx_checkpoint.open_checkpoint(folder, "here")
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            listed = [(f"{key}.{place}", one) for place, one in enumerate(value)] if isinstance(value, list) else []
            for known, one in listed or [(key, value)]:
                if isinstance(one, torch.Tensor) and one.numel() > 1:
                    assert torch.equal(reader.stored("optimizer", f"{known}/{name}"), one), (name, known)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_of_this_rank_goes_on(kind):
    run_ranks(by_state_dict, 2, kind)


def by_state_dict(rank, world, kind):
    expected, _ = plain(kind, 5)
    model, optimizer = sharded(kind, 2)
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()
    other, fresh = sharded(kind, 2)
    fresh.load_state_dict(saved)
    train(other, fresh, range(3, 5))
    for name, value in whole(other).items():
        assert torch.equal(value, dict(expected.named_parameters())[name]), name


def test_another_optimizer_refuses_them(tmp_path):
    run_ranks(save, 2, str(tmp_path), "adafactor", 2)
    run_ranks(refused, 2, str(tmp_path))


def refused(rank, world, folder):
    model, optimizer = dsx_zero.shard(Model(), lambda p: torch.optim.AdamW(p), config={"stage": 2})
    values = whole(model)
    with pytest.raises(dsx_checkpoint.CheckpointError, match="also keeps exp_avg"):
        dsx_checkpoint.load(folder, "here", module=model, optimizer=optimizer)
    assert all(torch.equal(value, values[name]) for name, value in whole(model).items())
