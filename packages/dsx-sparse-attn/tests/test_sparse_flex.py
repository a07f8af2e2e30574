"""FlexAttention as a backend: the same numbers where it can, reasons where it cannot."""

import pytest
import torch
from dsx_sparse_attn import block_sparse_attention, explain_backends
from dsx_sparse_attn.attention import Options, checked
from dsx_sparse_attn.backends import flex
from dsx_sparse_attn.errors import BackendError

pytest.importorskip("torch.nn.attention.flex_attention")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"rpe": True},
        {"key_padding_mask": True},
        {"seq": 100, "block": 32},
        {"heads": 4, "kv_heads": 2},
    ],
    ids=str,
)
def test_forward_equals_the_others(problem, options):
    options = dict(options)
    g = torch.Generator().manual_seed(0)
    if "rpe" in options:
        options["rpe"] = torch.randn(2, 128, 128, generator=g)
    if "key_padding_mask" in options:
        options["key_padding_mask"] = torch.rand(1, 128, generator=g) < 0.8
    p = problem(**options)
    with torch.no_grad():
        got = block_sparse_attention(p.q, p.k, p.v, p.layout, block=p.block, backend="flex", **p.options)
        expected = block_sparse_attention(p.q, p.k, p.v, p.layout, block=p.block, backend="torch", **p.options)
    assert torch.allclose(got, expected, atol=1e-5)


def test_reasons(problem):
    p = problem()
    q = p.q.clone().requires_grad_()
    assert explain_backends(q, p.k, p.v, p.layout)["flex"] == ["it has no backward on CPU"]
    with pytest.raises(BackendError, match="it has no dropout"):
        block_sparse_attention(p.q, p.k, p.v, p.layout, dropout_p=0.1, backend="flex")
    assert explain_backends(p.q, p.k, p.v, p.layout)["flex"] == []


def compiled(p, **options):
    """`flex.run` through torch.compile, with a backend that needs no C++ compiler."""
    call = checked(p.q, p.k, p.v, p.layout, Options(block=p.block, **options))
    with torch.no_grad():
        return flex.run(call, compiled=True)


@pytest.fixture
def graphs(monkeypatch):
    """Numbers of graphs compiled so far."""
    torch._dynamo.reset()
    made = flex.compiled_attention("aot_eager")
    monkeypatch.setattr(flex, "compiled_attention", lambda: made)
    counters = torch._dynamo.utils.counters
    counters.clear()
    return lambda: counters["stats"]["unique_graphs"]


def test_torch_compile_is_asked_once_per_process(problem, monkeypatch):
    p, wrapped = problem(heads=1, seq=64, dim=16), []
    monkeypatch.setattr(torch, "compile", lambda f, **_: (wrapped.append(f), lambda q, *_, **__: q)[1])
    flex.compiled_attention.cache_clear()
    try:
        assert compiled(p) is p.q and compiled(p) is p.q and len(wrapped) == 1
    finally:
        flex.compiled_attention.cache_clear()


def test_the_same_shapes_compile_once_whatever_the_layout_and_the_bias(problem, graphs):
    p = problem(heads=1, seq=64, dim=16)
    for seed in range(3):
        p.layout = problem(heads=1, seq=64, dim=16, seed=seed).layout
        expected = block_sparse_attention(p.q, p.k, p.v, p.layout, block=16, backend="torch")
        assert torch.allclose(compiled(p), expected, atol=1e-5)
    assert graphs() == 1
    for seed in range(3):
        rpe = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
        expected = block_sparse_attention(p.q, p.k, p.v, p.layout, block=16, backend="torch", rpe=rpe)
        assert torch.allclose(compiled(p, rpe=rpe), expected, atol=1e-5)
    assert graphs() == 2


def test_more_shapes_than_torchs_limit_are_compiled_and_not_materialised(problem, graphs):
    with torch._dynamo.config.patch(recompile_limit=2):  # torch's own is 8
        for n in range(1, 5):
            compiled(problem(heads=1, seq=16 * n, dim=16))
        assert graphs() == 4 and torch._dynamo.config.recompile_limit == 2


def test_the_block_mask_is_made_once_per_layout(problem):
    p = problem(heads=2, seq=64)
    first, second = (flex.block_mask(checked(p.q, p.k, p.v, p.layout, Options(block=16))) for _ in range(2))
    assert first is second
    assert flex.block_mask(checked(p.q, p.k, p.v, p.layout, Options(block=16, causal=True))) is not first
    p.layout[0, 0, 1] ^= 1
    assert flex.block_mask(checked(p.q, p.k, p.v, p.layout, Options(block=16))) is not first


def test_inside_the_users_own_compile_it_is_part_of_their_graph(problem):
    p = problem(heads=2, seq=64)
    torch._dynamo.reset()

    def run(q, k, v, layout):
        return block_sparse_attention(q, k, v, layout, block=16, backend="flex").tanh()

    with torch.no_grad():
        got = torch.compile(run, backend="aot_eager", fullgraph=True)(p.q, p.k, p.v, p.layout)
        assert torch.allclose(got, run(p.q, p.k, p.v, p.layout), atol=1e-5)
