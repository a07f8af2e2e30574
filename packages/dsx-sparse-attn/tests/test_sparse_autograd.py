"""Derivatives and torch's machinery: gradcheck, opcheck, torch.compile, checkpointing, no second derivative."""

import pytest
import torch
from dsx_sparse_attn import Layout, SparseAttentionError, block_sparse_attention, native
from dsx_sparse_attn.attention import Options, checked
from dsx_sparse_attn.errors import ArgumentError
from dsx_sparse_attn.reference import dense_attention
from torch.utils.checkpoint import checkpoint


def tensors(seq=24, dim=3, dtype=torch.float64, heads=2, kv_heads=1, grad=True):
    torch.manual_seed(0)
    q = torch.randn(1, heads, seq, dim, dtype=dtype, requires_grad=grad)
    k, v = (torch.randn(1, kv_heads, seq, dim, dtype=dtype, requires_grad=grad) for _ in range(2))
    layout = torch.tensor([[[1, 0, 1], [1, 1, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 0], [1, 0, 1]]])
    return q, k, v, layout


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout_p": 0.4, "dropout_seed": 3}], ids=str)
def test_gradcheck_of_the_kernels_formulas(options):
    q, k, v, layout = tensors(seq=6)
    rpe = torch.randn(2, 6, 6, dtype=torch.float64, requires_grad=True)

    def run(q, k, v, rpe):
        return block_sparse_attention(q, k, v, layout, rpe=rpe, backend="torch", **options)

    assert torch.autograd.gradcheck(run, (q, k, v, rpe))


def test_autocast_brings_tensors_to_one_precision():
    q, k, v, layout = tensors(seq=24, dim=8, dtype=torch.float32, heads=2, kv_heads=2)
    with torch.autocast("cpu", torch.bfloat16):
        got = block_sparse_attention(q, k, v.bfloat16(), layout)
        alike = block_sparse_attention(q, k, v, layout)
    expected = block_sparse_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), layout)
    assert got.dtype == torch.bfloat16 and torch.equal(got, expected)
    assert torch.equal(alike, block_sparse_attention(q, k, v, layout))  # of one precision: as they are, in float32
    for a, b in zip(*(torch.autograd.grad(out.sum(), (q, k, v)) for out in (got, expected)), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)
    with pytest.raises(ArgumentError, match=r"torch\.float32, torch\.float32, torch\.bfloat16"):
        block_sparse_attention(q, k, v.bfloat16(), layout)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ArgumentError, match=r"torch\.float64"):
        block_sparse_attention(q.double(), k, v, layout)


def test_gradcheck_of_the_oracle():
    q, k, v, layout = tensors(seq=6)

    def run(q, k, v):
        return dense_attention(checked(q, k, v, layout, Options(causal=True)))

    assert torch.autograd.gradcheck(run, (q, k, v))


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_opcheck(dropout_p):
    q, k, v, layout = tensors(dtype=torch.float32, dim=8)
    bias = torch.randn(1, 2, 24, 24, requires_grad=True)
    seed = torch.tensor([4]) if dropout_p else None
    arguments = (q, k, v, layout, bias, torch.zeros(1, 24), seed, 0.3, 8, True, dropout_p, "auto")
    torch.library.opcheck(torch.ops.dsx_sparse_attn.attention, arguments)
    arguments = (
        q.transpose(1, 2).contiguous().detach().transpose(1, 2),
        k,
        v,
        layout,
        None,
        None,
        None,
        0.3,
        8,
        False,
        0.0,
        "torch",
    )
    torch.library.opcheck(torch.ops.dsx_sparse_attn.attention, arguments)


def block(layout):
    def run(x, weight):
        q, k, v = (x @ weight).view(2, 64, 3, 2, 16).permute(2, 0, 3, 1, 4)
        out = block_sparse_attention(q, k, v, layout, causal=True, dropout_p=0.25)
        return torch.tanh(out.transpose(1, 2).reshape(2, 64, 32))

    return run


def step(run, x, weight, **options):
    torch.manual_seed(3)
    out = run(x, weight) if not options else checkpoint(run, x, weight, **options)
    out.square().sum().backward()
    grads = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    return out.detach(), *grads


def block_inputs():
    torch.manual_seed(1)
    layout = Layout.from_mask(torch.rand(4, 4) < 0.6, 16, heads=2)
    return layout, torch.randn(2, 64, 32, requires_grad=True), torch.randn(32, 96, requires_grad=True)


def test_torch_compile_gives_the_same_in_one_graph():
    layout, x, weight = block_inputs()
    torch._dynamo.reset()

    def run(x, weight):
        q, k, v = (x @ weight).view(2, 64, 3, 2, 16).permute(2, 0, 3, 1, 4)
        return block_sparse_attention(q, k, v, layout, causal=True).transpose(1, 2).reshape(2, 64, 32).tanh()

    expected = step(run, x, weight)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for a, b in zip(step(compiled, x, weight), expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5, rtol=1e-4)


def test_torch_compile_replays_dropout_in_backward():
    layout, x, weight = block_inputs()
    torch._dynamo.reset()
    out, dx, dw = step(torch.compile(block(layout), fullgraph=True, backend="aot_eager"), x, weight)
    again = step(torch.compile(block(layout), fullgraph=True, backend="aot_eager"), x, weight)
    assert (
        torch.equal(out, again[0])
        and torch.allclose(dx, again[1], atol=1e-5)
        and torch.allclose(dw, again[2], atol=1e-4)
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_the_same_dropout(reentrant):
    layout, x, weight = block_inputs()
    run = block(layout)
    for a, b in zip(step(run, x, weight, use_reentrant=reentrant), step(run, x, weight), strict=True):
        assert torch.equal(a, b)


def test_second_derivatives_are_refused_with_the_way_out():
    q, k, v, layout = tensors(dtype=torch.float32, dim=8)
    (dq,) = torch.autograd.grad(block_sparse_attention(q, k, v, layout).sum(), q, create_graph=True)
    with pytest.raises(SparseAttentionError, match="MatMul and Softmax"):
        dq.sum().backward()


def test_only_what_needs_a_gradient_gets_one():
    q, k, v, layout = tensors(dtype=torch.float32, dim=8, grad=False)
    v.requires_grad_()
    block_sparse_attention(q, k, v, layout).sum().backward()
    assert v.grad is not None and q.grad is None


def test_autocast_and_no_grad():
    q, k, v, layout = tensors(dtype=torch.float32, dim=8)
    with torch.no_grad():
        assert not block_sparse_attention(q, k, v, layout).requires_grad
    with native.reference_only():
        a = block_sparse_attention(q, k, v, layout)
    assert torch.allclose(a, block_sparse_attention(q, k, v, layout), atol=1e-6)


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the operators that pass by."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_who_watches_the_dispatcher_sees_one_operator_each_way_and_the_same_numbers():
    q, k, v, layout = tensors(dtype=torch.float32, dim=8)
    rpe, dout = torch.randn(2, 24, 24, requires_grad=True), torch.randn(1, 2, 24, 8)
    plain = block_sparse_attention(q, k, v, layout, rpe=rpe, causal=True)
    expected = torch.autograd.grad(plain, (q, k, v, rpe), dout)
    with Seen() as seen:
        out = block_sparse_attention(q, k, v, layout, rpe=rpe, causal=True)
        grads = torch.autograd.grad(out, (q, k, v, rpe), dout)
    assert torch.equal(out, plain) and all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    assert [n for n in seen.names if "dsx_sparse_attn" in n] == [
        "dsx_sparse_attn.attention.default", "dsx_sparse_attn.attention_backward.default",
    ]  # fmt: skip


def test_fake_tensors_flow_through():
    with torch._subclasses.FakeTensorMode():
        q, kv = torch.empty(2, 4, 64, 8), torch.empty(2, 2, 64, 8)
        assert block_sparse_attention(q, kv, kv, torch.ones(1, 4, 4)).shape == q.shape
