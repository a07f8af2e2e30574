"""Tiles of the sequence give the values and gradients of the whole, without its largest tensors."""

import dsx_activations
import pytest
import torch
from dsx_activations import ActivationArgumentError
from dsx_testkit.recomputation import OperatorWatch
from torch import nn
from torch.nn import functional as F


class Largest:
    """The largest number of elements that an operator gives."""

    numel = 0

    def see(self, _, out):
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_cross_entropy(bias, reduction):
    torch.manual_seed(0)
    hidden, head = torch.randn(3, 50, 8, requires_grad=True), nn.Linear(8, 101, bias=bias)
    targets = torch.randint(0, 101, (3, 50))
    targets[0, :7] = -100

    def gradients(loss):
        return torch.autograd.grad(loss, [hidden, *head.parameters()])

    plain = F.cross_entropy(head(hidden).view(-1, 101), targets.view(-1), reduction=reduction)
    expected = gradients(plain)
    largest = Largest()
    with OperatorWatch(largest.see):
        loss = dsx_activations.linear_cross_entropy(
            hidden, head.weight, targets, bias=head.bias, chunk=16, reduction=reduction
        )
        got = gradients(loss)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(got, expected)
    assert largest.numel <= 16 * 101, largest.numel  # the logits of 150 tokens are 15150
    chunked = dsx_activations.chunked_cross_entropy(head(hidden), targets, chunk=16, reduction=reduction)
    torch.testing.assert_close(gradients(chunked), expected)
    with torch.no_grad():
        torch.testing.assert_close(
            dsx_activations.linear_cross_entropy(hidden, head.weight, targets, bias=head.bias, reduction=reduction),
            plain,
        )


def test_mistakes_are_named():
    hidden, weight, targets = torch.randn(2, 5, 4), torch.randn(7, 4), torch.zeros(2, 5, dtype=torch.long)
    for wrong in ({"reduction": "none"}, {"chunk": 0}):
        with pytest.raises(ActivationArgumentError, match=next(iter(wrong))):
            dsx_activations.linear_cross_entropy(hidden, weight, targets, **wrong)
    with pytest.raises(ActivationArgumentError, match="one target for each row"):
        dsx_activations.linear_cross_entropy(hidden, weight, targets[:, 1:])
    with pytest.raises(ActivationArgumentError, match="tiles"):
        dsx_activations.run_in_tiles(torch.tanh, hidden, tiles=0)
    with pytest.raises(ActivationArgumentError, match="as many elements"):
        dsx_activations.run_in_tiles(lambda x: x[:, :1], hidden, tiles=2)
