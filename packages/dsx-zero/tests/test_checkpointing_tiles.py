"""Tiles of the sequence give the values and gradients of the whole, without its largest tensors."""

import pytest
import torch
from dsx_testkit import run_ranks
from dsx_testkit.recomputation import OperatorWatch, losses_when_sharded
from dsx_zero import ZeroModelError, checkpointing
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
        loss = checkpointing.linear_cross_entropy(
            hidden, head.weight, targets, bias=head.bias, chunk=16, reduction=reduction
        )
        got = gradients(loss)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(got, expected)
    assert largest.numel <= 16 * 101, largest.numel  # the logits of 150 tokens are 15150
    chunked = checkpointing.chunked_cross_entropy(head(hidden), targets, chunk=16, reduction=reduction)
    torch.testing.assert_close(gradients(chunked), expected)
    with torch.no_grad():
        torch.testing.assert_close(
            checkpointing.linear_cross_entropy(hidden, head.weight, targets, bias=head.bias, reduction=reduction), plain
        )


def test_mistakes_are_named():
    hidden, weight, targets = torch.randn(2, 5, 4), torch.randn(7, 4), torch.zeros(2, 5, dtype=torch.long)
    for wrong in ({"reduction": "none"}, {"chunk": 0}):
        with pytest.raises(ZeroModelError, match=next(iter(wrong))):
            checkpointing.linear_cross_entropy(hidden, weight, targets, **wrong)
    with pytest.raises(ZeroModelError, match="one target for each row"):
        checkpointing.linear_cross_entropy(hidden, weight, targets[:, 1:])
    with pytest.raises(ZeroModelError, match="tiles"):
        checkpointing.run_in_tiles(torch.tanh, hidden, tiles=0)
    with pytest.raises(ZeroModelError, match="as many elements"):
        checkpointing.run_in_tiles(lambda x: x[:, :1], hidden, tiles=2)


class Net(nn.Module):
    def __init__(self, tiles):
        super().__init__()
        torch.manual_seed(0)
        mlp = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6))
        self.blocks = nn.ModuleList([checkpointing.TiledMLP(mlp, tiles) if tiles else mlp])

    def forward(self, x):
        return self.blocks[0](x).square().mean()


def tiled(rank, world, stage):
    want, got = (losses_when_sharded(Net(tiles), stage, rank, (2, 11, 6), lr=0.5)[0] for tiles in (0, 4))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_tiled_module_trains_as_the_module(stage):
    run_ranks(tiled, 2, stage)
