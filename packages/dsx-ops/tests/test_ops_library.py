"""Every operator of the library under torch.library.opcheck, and the public functions under torch.compile."""

import dsx_ops
import pytest
import torch
from dsx_ops import onebit

ops = torch.ops.dsx_ops


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def codes(bits=4, format="int4"):
    return torch.ops.dsx_ops.quantize(torch.randn(96), format, 16, False, 0, 0, [1, 1, 1])


INDICES = torch.tensor([[0, 2], [3, 1]])
CASES = {
    "layer_norm": lambda: (leaf(3, 8), leaf(8), leaf(8), 1e-5, False),
    "layer_norm from output": lambda: (leaf(3, 8), leaf(8), leaf(8), 1e-5, True),
    "add_layer_norm": lambda: (leaf(3, 8), leaf(3, 8), leaf(8), leaf(8), 1e-5),
    "layer_norm_backward": lambda: (
        *(torch.randn(3, 8), torch.randn(3, 8), torch.randn(3), torch.rand(3)),
        *(torch.randn(8), torch.randn(8), None, False),
    ),
    "bias_gelu": lambda: (leaf(3, 8), leaf(8), True),
    "bias_gelu without bias": lambda: (leaf(3, 8), None, False),
    "bias_gelu_backward": lambda: (torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), True),
    "dropout": lambda: (leaf(3, 8), 0.5, 1, 0),
    "bias_dropout_residual": lambda: (leaf(3, 8), leaf(8), leaf(3, 8), 0.5, 1, 0),
    "bias_grad": lambda: (torch.randn(3, 8), torch.float32, 0.5, 1, 0),
    "masked_softmax": lambda: (leaf(2, 1, 3, 8), torch.randn(2, 1, 1, 8), 0.5),
    "softmax_backward": lambda: (torch.randn(3, 8), torch.rand(3, 8), 0.5),
    "quantize": lambda: (torch.randn(100), "int4_asym", 32, True, 3, 0, [1, 1, 1]),
    "quantize fp8": lambda: (torch.randn(100), "int8", 32, False, 0, 0, [1, 1, 1]),
    "quantize_out": lambda: (torch.randn(96), "int4", 16, False, 0, 0, [1, 1, 1], *codes()),
    "dequantize": lambda: (*codes(), [96], "int4", 16, [1, 1, 1], torch.bfloat16),
    "dequantize_out": lambda: (*codes(), "int4", 16, [1, 1, 1], torch.empty(96)),
    "reduce_codes": lambda: (*codes(), 2, "int4", 16, 1.0, torch.empty(48)),
    "requantize": lambda: (*codes(), 2, 48, "int4", 16, 0.5, "int8", 24, False, 0, 0),
    "pack_signs": lambda: (torch.randn(20),),
    "unpack_signs": lambda: (torch.zeros(3, dtype=torch.uint8), torch.ones(1), 20, torch.float32),
    "unpack_signs_out": lambda: (torch.zeros(3, dtype=torch.uint8), torch.ones(1), 20, torch.empty(20)),
    "compress_signs": lambda: (torch.randn(20), torch.zeros(20)),
    "mean_of_signs": lambda: (torch.zeros(2, 3, dtype=torch.uint8), torch.ones(2), 20, torch.empty(20)),
    "keyed_dropout": lambda: (leaf(3, 8), 0.5, torch.tensor([5]), 0),
    "keyed_residual": lambda: (leaf(3, 8), leaf(8), leaf(3, 8), 0.5, torch.tensor([5]), 1),
    "keyed_bias_grad": lambda: (torch.randn(3, 8), torch.float32, 0.5, torch.tensor([5]), 1),
    "token_gather": lambda: (leaf(2, 4, 3), INDICES, True),
    "token_scatter": lambda: (leaf(2, 4, 3), leaf(2, 2, 3), INDICES, True),
    "token_scatter_": lambda: (torch.randn(2, 4, 3), torch.randn(2, 2, 3), INDICES, True),
}


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case):
    torch.manual_seed(0)
    torch.library.opcheck(getattr(ops, case.split()[0]).default, CASES[case]())


CHECKED_ELSEWHERE = {"compress_sign_runs", "unpack_sign_runs", "mean_of_sign_runs"}  # test_ops_sign_runs.py


def test_no_operator_is_left_unchecked():
    names = {n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith("dsx_ops::")}
    assert names - {case.split()[0] for case in CASES} - CHECKED_ELSEWHERE == set()


def test_a_layer_compiles_whole_and_gives_the_eager_bits():
    torch.manual_seed(0)
    w, b, bias = leaf(16), leaf(16), leaf(16)

    def layer(x, residual):
        y, total = dsx_ops.add_layer_norm(x, residual, w, b)
        y = dsx_ops.bias_gelu(y, bias)
        y = dsx_ops.bias_dropout_residual(y, bias, total, 0.2, seed=7)
        return dsx_ops.masked_softmax(y, None, 0.5).sum(-1).square().sum() + y.sum()

    x, r = leaf(4, 16), leaf(4, 16)
    wanted = layer(x, r)
    grads = torch.autograd.grad(wanted, (x, r, w, b, bias))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    got = compiled(x, r)
    assert torch.equal(got, wanted)
    assert all(torch.equal(a, c) for a, c in zip(torch.autograd.grad(got, (x, r, w, b, bias)), grads))


def test_codes_compile_whole_with_their_mutations():
    def exchange(x, error):
        packed, scale = onebit.compress_with_feedback(x, error)
        sent = onebit.unpack_signs(packed, scale, x.numel())
        q = dsx_ops.quantize(x + sent, bits=4, group_size=8)
        return dsx_ops.dequantize(q, x.shape, bits=4, group_size=8)

    x, eager, traced = torch.randn(40), torch.zeros(40), torch.zeros(40)
    wanted = exchange(x, eager)
    assert torch.equal(torch.compile(exchange, backend="aot_eager", fullgraph=True)(x, traced), wanted)
    assert torch.equal(eager, traced) and eager.any()
