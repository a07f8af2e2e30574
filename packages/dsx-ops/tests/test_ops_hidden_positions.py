"""What a boolean mask hides never reaches a result of masked_softmax: not NaN, not infinity, whatever was left in
memory there.
"""

import dsx_ops
import pytest
import torch
from dsx_ops.cuda.operators import KERNELS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
GARBAGE = (float("nan"), float("inf"), float("-inf"), 3e4)
LENGTHS = (1, 2, 15, 16, 17, 33, 100)


def native(x, mask, scale):
    return dsx_ops.masked_softmax(x, mask, scale)


def reference(x, mask, scale):
    with dsx_ops.reference_only():
        return dsx_ops.masked_softmax(x, mask, scale)


@pytest.fixture(params=["native", "reference", "cuda"])
def softmax(request):
    if request.param == "cuda":
        emulator = request.getfixturevalue("emulator")
        return lambda x, mask, scale: KERNELS["masked_softmax"].run(emulator, x, mask, scale)
    return {"native": native, "reference": reference}[request.param]


def oracle(x, mask, scale):
    """float64; hidden positions are taken out before anything is computed."""
    clean = x.double().masked_fill(~mask, 0.0) * scale
    weights = clean.masked_fill(~mask, -torch.inf).softmax(-1)
    return weights.masked_fill(~mask, 0.0).nan_to_num(0.0)  # a row of which nothing takes part


def masks(length):
    """As wide as the scores, constant down the rows, constant along a row, one for all, and not contiguous."""
    generator = torch.Generator().manual_seed(length)
    full = torch.rand(3, 4, length, generator=generator) < 0.6
    yield full
    yield full[:1, :1]
    yield full[..., :1]
    yield full[0, 0, :1]
    yield torch.rand(length, 4, 3, generator=generator).permute(2, 1, 0) < 0.6


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_hidden_garbage_changes_nothing(softmax, dtype, garbage):
    for length in LENGTHS:
        scores = torch.randn(3, 4, length, generator=torch.Generator().manual_seed(1)).to(dtype)
        for mask in masks(length):
            wide = mask.expand(scores.shape)
            got = softmax(scores.masked_fill(~wide, garbage), mask, 0.7)
            torch.testing.assert_close(got.double(), oracle(scores, wide, 0.7), rtol=8e-3, atol=2e-3)
            assert torch.equal(got, softmax(scores, mask, 0.7)), f"length {length}, mask {tuple(mask.shape)}"


def test_visible_garbage_still_shows(softmax):
    """A NaN that takes part makes its row NaN, and no other."""
    scores, mask = torch.zeros(2, 20), torch.ones(2, 20, dtype=torch.bool)
    scores[0, 3] = float("nan")
    got = softmax(scores, mask, 1.0)
    assert got[0].isnan().all()
    torch.testing.assert_close(got[1], torch.full((20,), 0.05))


def test_an_added_mask_is_an_addition(softmax):
    """As in torch: -inf excludes every finite score, but the sum of NaN and -inf is NaN."""
    mask = torch.tensor([0.0, -torch.inf, 0.0])
    torch.testing.assert_close(softmax(torch.zeros(1, 3), mask, 1.0), torch.tensor([[0.5, 0.0, 0.5]]))
    spoilt = torch.tensor([[0.0, float("nan"), 0.0]])
    assert softmax(spoilt, mask, 1.0).isnan().all() and (spoilt + mask).softmax(-1).isnan().all()


@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_hidden_tokens_do_not_reach_visible_ones_in_a_layer(ratio):
    """Both ways through attention: torch's fused one, and the explicit one that dropout needs."""
    config = dsx_ops.TransformerConfig(
        hidden_size=32, heads=4, num_hidden_layers=1, attn_dropout_ratio=ratio, hidden_dropout_ratio=0.0
    )
    torch.manual_seed(0)
    layer = dsx_ops.TransformerLayer(config)
    kept = torch.tensor([[True] * 5 + [False] * 3, [True] * 8])
    x = torch.randn(2, 8, 32)
    results = []
    for hidden in (0.0, 1e3):
        given = x.masked_fill(~kept[..., None], hidden).requires_grad_()
        torch.manual_seed(1)
        out = layer(given, kept)
        out[kept].square().sum().backward()
        results.append((out[kept], given.grad[kept]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
