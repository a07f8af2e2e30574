"""Operators that make the host wait for a device: a forward of dropless experts has one, the reading of the counts."""

import dsx_moe
import pytest
import torch
from dsx_moe import MoE
from dsx_testkit import run_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

# On a device the shape of these results depends on values, or the host reads one.
WAITS = {"bincount", "nonzero", "masked_select", "_local_scalar_dense", "unique", "equal"}


class CountWaits(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in WAITS or by_mask:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def forward(rank, world, k, packed):
    torch.manual_seed(rank)
    expert = dsx_moe.PackedExperts(4, 6, 8) if packed else lambda i: nn.Linear(6, 6)
    layer = MoE(6, expert, 4, world, k=k, drop_tokens=False, top2_2nd_expert_sampling=False)
    x, sent = torch.randn(5, 6), []
    with CountWaits() as waits:
        own = layer.dispatch.exchange

        def gather_counts(values):
            sent.append(list(waits.seen))
            return type(own).gather_counts(own, values)

        if own is not None:
            own.gather_counts = gather_counts
        layer(x)
    return waits.seen, sent


def test_a_forward_of_dropless_experts_waits_once():
    for k in (1, 2, 3):
        for seen, before_counts in run_ranks(forward, 2, k, k == 2, backend="gloo"):
            assert before_counts == [[]]  # the counts are gathered once, and nothing waits before
            # then the gathered counts are on the host, where they are read freely
            assert not {"bincount", "index", "index_put_"} & set(seen)


def test_clipping_reads_nothing():
    model = MoE(6, lambda i: nn.Linear(6, 6), 4, k=2)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    with CountWaits() as waits:
        norm = dsx_moe.clip_grad_norm_(model, 0.5)
    assert waits.seen == []
    expected = torch.linalg.vector_norm(torch.stack([g.norm() for g in before.values()]))
    torch.testing.assert_close(norm.float(), expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, before[name] * (0.5 / (expected + 1e-6)))
    next(model.parameters()).grad.fill_(torch.inf)
    kept = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert not dsx_moe.clip_grad_norm_(model, 0.5).isfinite()
    assert all(torch.equal(p.grad, kept[name]) for name, p in model.named_parameters())


def clipped(rank, world):
    model = MoE(6, lambda i: nn.Linear(6, 6), 4, world, k=2)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, 1.0 if "experts" in name else 2.0)
    dense = sum(p.numel() for name, p in model.named_parameters() if "experts" not in name)
    with CountWaits() as waits:
        norm = dsx_moe.clip_grad_norm_(model, 1.0)
    left = {name: float(p.grad.max()) for name, p in model.named_parameters()}
    return waits.seen, float(norm), dense, left


@pytest.mark.parametrize("world", [2, 4])
def test_clipping_on_several_ranks_reads_nothing_and_counts_each_expert_once(world):
    for seen, norm, dense, left in run_ranks(clipped, world, backend="gloo"):
        assert seen == []
        expected = (4 * dense + 4 * (36 + 6)) ** 0.5  # four experts of 42 elements, whichever rank holds them
        assert norm == pytest.approx(expected, rel=1e-12)
        for name, value in left.items():
            assert value == pytest.approx((1 if "experts" in name else 2) / (expected + 1e-6), rel=1e-6), name
