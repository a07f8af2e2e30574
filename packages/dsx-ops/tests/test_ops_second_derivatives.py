"""The functions are differentiable once, and say so when more is asked of them: a silent zero would be a wrong
gradient.
"""

import dsx_ops
import pytest
import torch


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


FUNCTIONS = {
    "layer_norm": lambda x: dsx_ops.layer_norm(x, leaf(8), leaf(8)),
    "add_layer_norm": lambda x: dsx_ops.add_layer_norm(x, leaf(3, 8), leaf(8), leaf(8))[0],
    "bias_gelu": lambda x: dsx_ops.bias_gelu(x, leaf(8)),
    "masked_softmax": lambda x: dsx_ops.masked_softmax(x),
    "bias_dropout_residual": lambda x: dsx_ops.bias_dropout_residual(x, leaf(8), leaf(3, 8), 0.5, 1) ** 2,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_gradient_of_a_gradient_is_an_error_not_a_zero(name):
    torch.manual_seed(0)
    x = leaf(3, 8)
    (first,) = torch.autograd.grad((FUNCTIONS[name](x) ** 2).sum(), x, create_graph=True)
    with pytest.raises(dsx_ops.errors.TensorError, match="differentiable once"):
        first.square().sum().backward()


@pytest.mark.parametrize("again", [False, True])
def test_the_layer_too(again):
    torch.manual_seed(0)
    config = dsx_ops.TransformerConfig(
        hidden_size=16, heads=2, num_hidden_layers=1, attn_dropout_ratio=0.1, gelu_checkpoint=again
    )
    x = leaf(2, 4, 16)
    (first,) = torch.autograd.grad(dsx_ops.TransformerLayer(config)(x).square().sum(), x, create_graph=True)
    with pytest.raises(dsx_ops.errors.TensorError, match="differentiable once"):
        first.square().sum().backward()


def test_plain_dropout_is_linear_and_may_be_differentiated_again():
    x = leaf(3, 8)
    (first,) = torch.autograd.grad(dsx_ops.dropout(x, 0.5, 1).square().sum(), x, create_graph=True)
    first.square().sum().backward()
    kept = dsx_ops.functional.dropout.dropout_mask((3, 8), 0.5, 1)
    assert torch.allclose(x.grad, 2 * 64 * x.detach() * kept)


def test_dropout_of_a_single_number():
    for p in (0.0, 0.5):
        x = torch.tensor(3.0)
        native = dsx_ops.dropout(x, p, 1)
        with dsx_ops.reference_only():
            assert torch.equal(dsx_ops.dropout(x, p, 1), native) and native.shape == ()
