"""float64 goes through the functions of a transformer layer in float64: torch.autograd.gradcheck passes, results are
torch's.
"""

import dsx_ops
import pytest
import torch
from torch.autograd import gradcheck
from torch.nn import functional as F


def leaf(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


W, B = leaf(6, seed=1), leaf(6, seed=2)
KEPT = torch.tensor([[True, True, False, True, True, False]])
CASES = {
    "layer_norm": lambda x: dsx_ops.layer_norm(x, W, B),
    "layer_norm from output": lambda x: dsx_ops.layer_norm(x, W, B, from_output=True),
    "add_layer_norm": lambda x: sum(dsx_ops.add_layer_norm(x, x * 2, W, B)),
    "gelu tanh": lambda x: dsx_ops.bias_gelu(x, B),
    "gelu exact": lambda x: dsx_ops.bias_gelu(x, B, "none"),
    "dropout": lambda x: dsx_ops.dropout(x, 0.4, 3),
    "bias_dropout_residual": lambda x: dsx_ops.bias_dropout_residual(x, B, x * 3, 0.4, 3),
    "masked_softmax bool": lambda x: dsx_ops.masked_softmax(x, KEPT, 0.7),
    "masked_softmax added": lambda x: dsx_ops.masked_softmax(x, torch.randn(6, dtype=torch.float64), 0.7),
}


@pytest.mark.parametrize("case", CASES)
def test_gradcheck(case):
    def function(x, w, b):
        torch.manual_seed(0)
        return CASES[case](x)

    assert gradcheck(function, (leaf(3, 6), W, B))


def test_values_are_torchs_to_float64_rounding():
    x = leaf(4, 6)
    pairs = (
        (dsx_ops.layer_norm(x, W, B), F.layer_norm(x, (6,), W, B)),
        (dsx_ops.bias_gelu(x, B), F.gelu(x + B, approximate="tanh")),
        (dsx_ops.bias_gelu(x, None, "none"), F.gelu(x)),
        (dsx_ops.masked_softmax(x, None, 0.5), (x * 0.5).softmax(-1)),
    )
    for got, wanted in pairs:
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-14)


def test_narrow_vectors_are_widened_and_wide_ones_never_narrowed():
    x, w, b = leaf(4, 6), torch.ones(6), torch.zeros(6)
    torch.testing.assert_close(dsx_ops.layer_norm(x, w, b), F.layer_norm(x, (6,)), rtol=1e-13, atol=1e-14)
    for call in (
        lambda: dsx_ops.layer_norm(x.float(), W, B),
        lambda: dsx_ops.bias_gelu(x.float(), B),
        lambda: dsx_ops.masked_softmax(x.float(), torch.zeros(6, dtype=torch.float64)),
    ):
        with pytest.raises(dsx_ops.errors.TensorError, match="float64"):
            call()


@pytest.mark.parametrize("pre", [True, False])
@pytest.mark.parametrize("options", [{}, {"gelu_checkpoint": True, "attn_dropout_checkpoint": True}], ids=str)
@pytest.mark.parametrize("ratio", [0.0, 0.2])
def test_a_layer_in_double(pre, options, ratio):
    config = dsx_ops.TransformerConfig(
        hidden_size=8,
        heads=2,
        num_hidden_layers=1,
        pre_layer_norm=pre,
        attn_dropout_ratio=ratio,
        hidden_dropout_ratio=ratio,
        **options,
    )
    torch.manual_seed(0)
    layer = dsx_ops.TransformerLayer(config).double()
    mask = torch.randn(1, 1, 1, 3, dtype=torch.float64)

    def function(x, *parameters):
        torch.manual_seed(1)
        return layer(x, mask)

    assert gradcheck(function, (leaf(1, 3, 8), *layer.parameters()))


def test_token_functions_move_any_dtype():
    x, index = leaf(1, 4, 2), torch.tensor([[2, 0]])
    torch.testing.assert_close(dsx_ops.token_gather(x, index), x[:, [2, 0]])
