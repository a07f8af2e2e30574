"""FlexAttention as a backend: the same numbers where it can, reasons where it cannot."""

import pytest
import torch
from dsx_sparse_attn import BackendError, block_sparse_attention, explain_backends

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
