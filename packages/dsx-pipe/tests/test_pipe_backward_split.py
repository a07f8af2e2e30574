"""Input backward followed by weight backward gives the gradients of one backward, for modules of every kind."""

import pytest
import torch
from dsx_pipe.runtime.backward import input_backward, whole_backward
from torch import nn
from torch.utils.checkpoint import checkpoint


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x):
        y = torch.tanh(self.a(x)) + x * self.scale
        return self.b(self.a(y)) @ (2 * self.a.weight)  # one weight is used three times


class OutputWithoutInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.free = nn.Linear(6, 6), nn.Parameter(torch.rand(6))

    def forward(self, x):
        return self.a(x), (self.free * 3).exp()  # the second output does not depend on the input


class Recomputed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)), reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


KINDS = {
    "mlp": lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)),
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True),
    "conv": lambda: nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU()),
    "no parameters": lambda: nn.Tanh(),
    "pass through": lambda: nn.Identity(),
    "tied": Tied,
    "an output without input": OutputWithoutInput,
    "reentrant checkpoint": lambda: Recomputed(True),
    "checkpoint": lambda: Recomputed(False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_input_and_weight_backward_give_the_gradients_of_one_backward(kind):
    torch.manual_seed(0)
    module, x = KINDS[kind]().double(), torch.randn(3, 4, 6, dtype=torch.float64)

    def gradients(split):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        outputs = list(out) if isinstance(out, tuple) else [out]
        grads = [torch.cos(torch.arange(o.numel(), dtype=o.dtype)).view_as(o) for o in outputs]
        if split:
            weight_backward = input_backward(outputs, grads, [leaf])
            early = {n for n, p in module.named_parameters() if p.grad is not None}
            weight_backward.run()
        else:
            whole_backward(outputs, grads)
            early = set()
        return leaf.grad, {n: p.grad for n, p in module.named_parameters()}, early

    (expected, expected_of, _), (found, found_of, early) = gradients(False), gradients(True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for name in expected_of:
        torch.testing.assert_close(found_of[name], expected_of[name], rtol=1e-12, atol=1e-12, msg=name)
    if kind in ("mlp", "attention", "conv"):
        assert not early, "the input backward computed gradients of parameters"


def test_each_part_of_the_backward_computes_its_own_gradients_only():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
    leaf = torch.randn(5, 6).requires_grad_()
    out = module(leaf)

    def count_matmuls(run):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            run()
        return sum(e.count for e in seen.key_averages() if e.key == "aten::mm")

    found = []
    first = count_matmuls(lambda: found.append(input_backward([out], [torch.ones_like(out)], [leaf])))
    assert (first, count_matmuls(found[0].run)) == (2, 2)


def test_scalar_losses_and_unused_outputs():
    module, leaf = nn.Linear(4, 2), torch.randn(3, 4).requires_grad_()
    a, b = module(leaf).unbind(1)
    loss = a.mean()
    input_backward([loss, b], [None, None], [leaf]).run()
    expected = torch.zeros(2, 4)
    expected[0] = leaf.detach().mean(0)
    torch.testing.assert_close(module.weight.grad, expected)
    assert input_backward([torch.ones(2)], [None], [leaf]).junctions == []


def test_without_a_differentiable_input_all_gradients_belong_to_the_weight_backward():
    module = nn.Embedding(5, 3)
    out = module(torch.tensor([1, 1, 4]))
    weight_backward = input_backward([out], [torch.ones_like(out)], [])
    assert module.weight.grad is None
    weight_backward.run()
    assert module.weight.grad[1].tolist() == [2.0, 2.0, 2.0]
