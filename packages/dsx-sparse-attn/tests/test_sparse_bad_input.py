"""What does not fit is refused with what was got, what is expected and, for backends, the reasons of each."""

import pytest
import torch
from dsx_sparse_attn import Layout, block_sparse_attention, explain_backends, native
from dsx_sparse_attn.errors import ArgumentError, BackendError, LayoutError

Q = torch.zeros(2, 4, 64, 8)
KV = torch.zeros(2, 2, 64, 8)
FOUR = torch.ones(4, 4, 4, dtype=torch.int64)


def call(q=Q, k=KV, v=KV, layout=FOUR, **options):
    return block_sparse_attention(q, k, v, layout, **options)


BAD = [
    (LayoutError, dict(layout=FOUR[:3]), "layout for 3 heads and q with 4"),
    (LayoutError, dict(layout=FOUR[0]), r"layout of shape \(4, 4\)"),
    (LayoutError, dict(layout=FOUR[:, :3]), r"layout of shape \(4, 3, 4\)"),
    (LayoutError, dict(layout=torch.ones(4, 5, 5)), "5 does not divide 64"),
    (LayoutError, dict(layout=FOUR, block=32), "block 32, which covers 128; expected 2 blocks"),
    (LayoutError, dict(layout=Layout.from_mask(FOUR, 32)), r"config.covering\(64\)"),
    (ArgumentError, dict(q=Q[0]), r"got q \(4, 64, 8\)"),
    (ArgumentError, dict(v=KV[:, :1]), "of one shape"),
    (ArgumentError, dict(k=KV[:, :, :32], v=KV[:, :, :32]), "self-attention"),
    (ArgumentError, dict(q=Q[:, :3], layout=FOUR[:1]), "3 query heads and 2 key heads"),
    (ArgumentError, dict(q=Q.double()), "torch.float64, torch.float32"),
    (ArgumentError, dict(q=Q.int(), k=KV.int(), v=KV.int()), "one of float32, bfloat16, float16, float64"),
    (ArgumentError, dict(q=Q.to("meta")), "one device"),
    (ArgumentError, dict(dropout_p=1.0), r"probability in \[0, 1\)"),
    (ArgumentError, dict(dropout_p=-0.1), "dropout_p=-0.1"),
    (ArgumentError, dict(attn_mask=torch.ones(64, 63)), r"got attn_mask of shape \(64, 63\)"),
    (ArgumentError, dict(rpe=torch.ones(3, 64, 64)), r"expected \[64, 64\], \[4, 64, 64\]"),
    (ArgumentError, dict(rpe=torch.ones(64)), "got rpe"),
    (ArgumentError, dict(key_padding_mask=torch.zeros(2, 63)), r"expected \(2, 64\)"),
    (ArgumentError, dict(key_padding_mask=torch.ones(2, 64), key_padding_mask_mode="times"), '"add" or "mul"'),
    (ArgumentError, dict(key_padding_mask=torch.ones(2, 64).long()), r"pass key_padding_mask == 0 \(True hides\)"),
    (ArgumentError, dict(key_padding_mask=torch.ones(2, 64)), "floats that are all 0 or 1"),
    (ArgumentError, dict(key_padding_mask=torch.ones(2, 64).half()), "floats that are all 0 or 1"),
    (ArgumentError, dict(key_padding_mask=torch.ones(2, 64) > 0, key_padding_mask_mode="mul"), "True in a bool"),
    (ArgumentError, dict(attn_mask=torch.ones(64, 64).tril(), attn_mask_mode="add"), r"attn_mask.bool\(\) \(True"),
    (ArgumentError, dict(attn_mask=-1e9 * torch.ones(64, 64).triu(1)), 'negative numbers and attn_mask_mode="mul"'),
    (ArgumentError, dict(attn_mask=torch.ones(64, 64).int(), attn_mask_mode="add"), 'attn_mask_mode="mul"'),
    (ArgumentError, dict(attn_mask=torch.ones(64, 64, requires_grad=True)), "pass it as rpe"),
    (ArgumentError, dict(backend="cuda"), "expected one of auto, native, triton, flex, torch"),
]  # fmt: skip


@pytest.mark.parametrize("kind, arguments, text", BAD)
def test_bad_input_is_named(kind, arguments, text):
    with pytest.raises(kind, match=text):
        call(**arguments)
    assert issubclass(kind, ValueError)


@pytest.mark.parametrize("backend", ["native", "triton", "flex"])
def test_a_refused_backend_lists_every_backend_with_its_reason(backend):
    q, kv = Q.double().requires_grad_(), KV.double()
    with pytest.raises(BackendError) as caught:
        call(q, kv, kv, dropout_p=0.5, backend=backend)
    error = caught.value
    assert set(error.reasons) == {"native", "triton", "flex", "torch"} and error.reasons["torch"] == []
    assert "float64" in " ".join(error.reasons["native"]) and "it has no dropout" in error.reasons["flex"]
    text = str(error)
    assert all(name in text for name in error.reasons) and "Use backend='torch'" in text and "dropout 0.5" in text


def test_explain_tells_what_auto_will_take():
    why = explain_backends(Q, KV, KV, FOUR, causal=True)
    assert (why["native"] == []) == (native.module() is not None)
    big = torch.zeros(1, 1, 16, 300)
    why = explain_backends(big, big, big, torch.ones(1, 1, 1))
    assert any("300" in reason for reason in why["native"])
    why = explain_backends(Q, KV, KV, torch.ones(1, 8, 8))
    assert any("block 8" in reason for reason in why["native"]) and why["torch"] == []
    with pytest.raises(ArgumentError, match="'window'"):
        explain_backends(Q, KV, KV, FOUR, window=3)
    with native.reference_only():
        assert explain_backends(Q, KV, KV, FOUR)["native"] == [native.missing()] != [""]
