"""Token gather and scatter against indexing in plain torch, forward and backward, and what they refuse."""

import contextlib

import dsx_ops
import pytest
import torch

WAYS = {"native": contextlib.nullcontext, "reference": dsx_ops.reference_only}


@pytest.fixture(params=WAYS)
def way(request):
    """Runs the test over the compiled kernels and over the reference."""
    with WAYS[request.param]():
        yield request.param


def picked(batch, kept, sequence):
    """Distinct positions, in random order."""
    return torch.stack([torch.randperm(sequence)[:kept] for _ in range(batch)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "batch,sequence,kept,hidden", [(1, 1, 1, 1), (3, 10, 4, 7), (2, 300, 200, 130), (2, 5, 0, 3), (0, 5, 2, 3)]
)
def test_gather_and_scatter(way, batch, sequence, kept, hidden, batch_first, dtype):
    torch.manual_seed(0)
    x = (torch.randn(batch, sequence, hidden) * 9).to(dtype)
    indices = picked(batch, kept, sequence) if batch else torch.empty(0, kept, dtype=torch.int64)
    rows = torch.arange(batch)[:, None]
    part = x[rows, indices]
    given = x if batch_first else x.transpose(0, 1).contiguous()

    def turned(t):
        return t if batch_first else t.transpose(0, 1)

    got = dsx_ops.token_gather(given, indices, batch_first)
    assert torch.equal(turned(got), part)
    new = (torch.randn(part.shape) * 9).to(dtype)
    wanted = x.clone()
    wanted[rows, indices] = new
    result = dsx_ops.tokens.token_scatter(given, turned(new).contiguous(), indices, batch_first)
    assert torch.equal(turned(result), wanted)
    before = given.clone()
    assert torch.equal(given, before), "scatter leaves its input alone"
    assert dsx_ops.token_scatter_(given, turned(new).contiguous(), indices, batch_first) is given
    assert torch.equal(turned(given), wanted)


@pytest.mark.parametrize("batch_first", [True, False])
def test_gradients_are_those_of_indexing(way, batch_first):
    torch.manual_seed(1)
    shape = (3, 12, 5) if batch_first else (12, 3, 5)
    indices = dsx_ops.token_sort_(picked(3, 7, 12))
    x = torch.randn(shape, requires_grad=True)
    y = torch.randn(shape, requires_grad=True)
    g = torch.randn(shape)
    rows = torch.arange(3)[:, None]

    def by_indexing(x, y):
        a, b = (x, y) if batch_first else (x.transpose(0, 1), y.transpose(0, 1))
        full = b.clone()
        full[rows, indices] = a[rows, indices].sin()
        return full if batch_first else full.transpose(0, 1)

    wanted = torch.autograd.grad(by_indexing(x, y), (x, y), g)
    part = dsx_ops.token_gather(x, indices, batch_first).sin()
    got = torch.autograd.grad(dsx_ops.tokens.token_scatter(y, part, indices, batch_first), (x, y), g)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted))


def test_masks_of_the_kept_tokens():
    mask = torch.arange(2 * 6 * 6.0).view(2, 1, 6, 6)
    indices = torch.tensor([[0, 2, 5], [1, 3, 4]])
    got = dsx_ops.mask_gather_bert(mask, indices)
    assert got.shape == (2, 1, 3, 3)
    for b in range(2):
        for i in range(3):
            for j in range(3):
                assert got[b, 0, i, j] == mask[b, 0, indices[b, i], indices[b, j]]
    assert torch.equal(dsx_ops.mask_gather_bert(mask[:1], indices)[1], mask[0][:, indices[1]][:, :, indices[1]])
    causal = torch.ones(1, 1, 6, 6).tril()
    assert torch.equal(dsx_ops.mask_gather_gpt(causal, 4), torch.ones(1, 1, 4, 4).tril())


def test_sorting_is_in_place_and_per_row():
    indices = torch.tensor([[3, 1, 2], [9, 0, 4]])
    assert dsx_ops.token_sort_(indices) is indices
    assert indices.tolist() == [[1, 2, 3], [0, 4, 9]]


def test_unfit_arguments_are_named_and_nothing_is_written():
    x = torch.zeros(2, 6, 4)
    good, part = torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2, 4)
    for words, call in (
        ("from -1 to 1", lambda: dsx_ops.token_gather(x, torch.tensor([[0, -1], [0, 1]]))),
        (
            "from 0 to 6, expected positions from 0 to 5",
            lambda: dsx_ops.token_scatter_(x, part, torch.tensor([[0, 1], [0, 6]])),
        ),
        ("twice", lambda: dsx_ops.token_scatter_(x, part, torch.tensor([[0, 1], [3, 3]]))),
        (r"expected \[2, kept\]", lambda: dsx_ops.token_gather(x, good[:1])),
        ("indices: got int32", lambda: dsx_ops.token_gather(x, good.int())),
        ("contiguous", lambda: dsx_ops.token_gather(x.transpose(0, 1), good)),
        ("three dimensions", lambda: dsx_ops.token_gather(x[0], good)),
        (r"tokens: got shape \(2, 1, 4\)", lambda: dsx_ops.token_scatter_(x, part[:, :1].contiguous(), good)),
        ("tokens: got bfloat16", lambda: dsx_ops.tokens.token_scatter(x, part.bfloat16(), good)),
        ("requires? gradients", lambda: dsx_ops.token_scatter_(x, part.requires_grad_(), good)),
        ("kept: got 7", lambda: dsx_ops.mask_gather_gpt(torch.zeros(6, 6), 7)),
    ):
        with pytest.raises(dsx_ops.errors.TensorError, match=words):
            call()
        part = part.detach()
    assert not x.any()
