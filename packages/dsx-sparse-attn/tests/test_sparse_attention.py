"""`block_sparse_attention` against dense float64 attention: shapes, dtypes, options, instruction sets, threads."""

import pytest
import torch
from dsx_sparse_attn import block_sparse_attention, native
from dsx_sparse_attn.attention import Options, checked
from dsx_sparse_attn.reference import dropout_keep

needs_native = pytest.mark.skipif(native.module() is None, reason=native.missing() or "native code is there")
BACKENDS = [pytest.param("native", marks=[pytest.mark.native, needs_native]), "torch"]
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float64: 1e-12}

CASES = {
    "plain": {},
    "block 32": {"block": 32},
    "block 64": {"block": 64, "seq": 256},
    "block 128": {"block": 128, "seq": 256},
    "head dimension 16": {"dim": 16},
    "head dimension 64": {"dim": 64},
    "head dimension 256": {"dim": 256},
    "odd head dimension": {"dim": 20},
    "head dimension 1": {"dim": 1},
    "short last block": {"seq": 137, "block": 32},
    "one short block": {"seq": 5, "block": 16},
    "grouped queries": {"heads": 6, "kv_heads": 2},
    "one key head": {"heads": 3, "kv_heads": 1, "batch": 2},
    "one head for two threads": {"heads": 1},
    "three heads for two threads": {"heads": 3, "seq": 200, "block": 64},
    "causal": {"causal": True},
    "causal, short": {"causal": True, "seq": 77, "block": 32},
    "scale": {"scale": 0.3},
    "large scores": {"scale": 20.0},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 7, "batch": 2},
    "dropout, causal, short": {"dropout_p": 0.5, "dropout_seed": 2**31 + 5, "causal": True, "seq": 75, "block": 32},
    "bf16": {"dtype": torch.bfloat16, "dim": 16, "seq": 64},
    "bf16 short": {"dtype": torch.bfloat16, "dim": 24, "seq": 55, "causal": True},
    "fp16": {"dtype": torch.float16, "dim": 16, "seq": 64},
    "everything at once": {"heads": 4, "kv_heads": 2, "batch": 2, "seq": 90, "block": 32, "dim": 24, "causal": True,
                           "dropout_p": 0.2, "dropout_seed": 1},
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_equals_dense_attention(problem, case, backend):
    p = problem(**CASES[case])
    errors = p.errors(backend)
    limit = LIMIT[p.q.dtype] * (10 if case == "large scores" else 1)
    assert max(errors) < limit, errors


def masks(batch, heads, seq, kind):
    g = torch.Generator().manual_seed(3)
    return {
        "rpe of all": {"rpe": torch.randn(seq, seq, generator=g)},
        "rpe per head": {"rpe": torch.randn(heads, seq, seq, generator=g)},
        "rpe per batch": {"rpe": torch.randn(batch, 1, seq, seq, generator=g)},
        "rpe per key": {"rpe": torch.randn(1, heads, 1, seq, generator=g)},
        "rpe of its own for each": {"rpe": torch.randn(batch, heads, seq, seq, generator=g)},
        "bool keys": {"key_padding_mask": torch.rand(batch, seq, generator=g) < 0.7},
        "added keys": {"key_padding_mask": torch.randn(batch, seq, generator=g)},
        "added -10000": {"key_padding_mask": torch.where(torch.rand(batch, seq, generator=g) < 0.7, 0.0, -10000.0)},
        "multiplied keys": {
            "key_padding_mask": (torch.rand(batch, seq, generator=g) < 0.7).float(), "key_padding_mask_mode": "mul",
        },
        "multiplied mask": {"attn_mask": (torch.rand(seq, seq, generator=g) < 0.7).float()},
        "added mask": {"attn_mask": torch.randn(batch, heads, seq, seq, generator=g), "attn_mask_mode": "add"},
        "bool mask of keys": {"attn_mask": torch.rand(batch, 1, 1, seq, generator=g) < 0.7},
        "all of them": {
            "rpe": torch.randn(heads, seq, seq, generator=g),
            "attn_mask": torch.rand(seq, seq, generator=g) < 0.8,
            "key_padding_mask": torch.rand(batch, seq, generator=g) < 0.8,
            "causal": True, "dropout_p": 0.25, "dropout_seed": 3,
        },
    }[kind]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seq", [64, 83])
@pytest.mark.parametrize(
    "kind",
    ["rpe of all", "rpe per head", "rpe per batch", "rpe per key", "rpe of its own for each", "bool keys", "added keys",
     "added -10000", "multiplied keys", "multiplied mask", "added mask", "bool mask of keys", "all of them"],
)  # fmt: skip
def test_masks_and_position_biases(problem, kind, seq, backend):
    options = masks(2, 4, seq, kind)
    errors = problem(batch=2, heads=4, kv_heads=2, seq=seq, block=32, dim=16, **options).errors(backend)
    assert max(errors) < 1e-5, errors


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_keys_are_zero_and_pass_no_gradient(problem, backend):
    p = problem(batch=2, seq=96, block=32, dtype=torch.float32)
    p.layout[:, 1] = 0  # no block at all
    hidden = torch.zeros(2, 96, dtype=torch.bool)
    hidden[1] = True  # nothing to see in the second sample
    p.options["key_padding_mask"] = hidden
    out, dq, dk, dv = p.run(backend)
    assert out[0, :, 32:64].eq(0).all() and out[1].eq(0).all() and dq[1].eq(0).all() and dv[1].eq(0).all()
    assert all(t.isfinite().all() for t in (out, dq, dk, dv))
    assert max(p.errors(backend)) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_and_inf_reach_exactly_who_sees_them(problem, backend):
    p = problem(seq=64, block=16, density=0.0)  # each block sees itself
    p.k[0, 0, 20] = float("nan")
    out = block_sparse_attention(p.q, p.k, p.v, p.layout, backend=backend)
    assert out[0, 0, 16:32].isnan().all()
    out[0, 0, 16:32] = 0
    assert out.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strided", ["sequence first", "expanded", "last dimension strided"])
def test_strides(problem, strided, backend):
    p = problem(batch=2, seq=64, dim=16)
    whole = block_sparse_attention(p.q, p.k, p.v, p.layout, backend=backend)
    forms = {
        "sequence first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "expanded": lambda t: t[:1].expand_as(t),
        "last dimension strided": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    }
    q, k, v = (forms[strided](t).requires_grad_() for t in (p.q.clone(), p.k.clone(), p.v.clone()))
    if strided == "expanded":
        q, k, v = (forms[strided](t) for t in (p.q, p.k, p.v))
        assert torch.equal(block_sparse_attention(q, k, v, p.layout, backend=backend)[0], whole[0])
        return
    out = block_sparse_attention(q, k, v, p.layout, backend=backend)
    assert torch.equal(out, whole)
    grads = torch.autograd.grad(out, (q, k, v), p.dout)
    for got, expected in zip(grads, p.run(backend)[1:], strict=True):
        assert torch.allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_batch(problem, backend):
    p = problem(batch=0)
    out, *grads = p.run(backend)
    assert out.shape == p.q.shape and [g.shape for g in grads] == [p.q.shape, p.k.shape, p.v.shape]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.float32, torch.int32])
def test_layouts_of_any_dtype_and_of_one_head(problem, dtype):
    p = problem()
    p.layout[:] = p.layout[:1].clone()
    whole = block_sparse_attention(p.q, p.k, p.v, p.layout)
    assert torch.equal(block_sparse_attention(p.q, p.k, p.v, p.layout[:1].to(dtype)), whole)
    assert torch.equal(block_sparse_attention(p.q, p.k, p.v, p.layout.to(dtype)), whole)


def test_float64_goes_through_torch(problem):
    assert max(problem(dtype=torch.float64, seq=60, causal=True).errors("auto")) < 1e-12


@needs_native
@pytest.mark.native
@pytest.mark.parametrize("case", ["plain", "everything at once", "bf16 short", "block 64", "odd head dimension"])
def test_every_instruction_set(problem, case):
    module, before = native.module(), native.module().isa()
    try:
        for isa in module.isas():
            module.set_isa(isa)
            p = problem(**CASES[case])
            assert max(p.errors("native")) < LIMIT[p.q.dtype], isa
    finally:
        module.set_isa(before)


def _halves(dtype):
    """Pairs of values, [2, dim]; their means are exact in float32 and lie between numbers of `dtype` in many ways."""
    g = torch.Generator().manual_seed(0)
    exponents = (
        torch.randint(-30, 30, (2, 41), generator=g)
        if dtype == torch.bfloat16
        else torch.randint(-16, 12, (2, 41), generator=g)
    )
    values = ((torch.rand(2, 41, generator=g) * 2 - 1) * 2.0**exponents).to(dtype).float()
    step = torch.finfo(dtype).eps
    values[:, :8] = torch.tensor(
        [[1.0] * 8, [1 + step, 1 + 3 * step, 1 - step, 3.0, -1 - step, -1 - 3 * step, 0.0, -1.0]]
    )
    values[:, 8] = float("nan")
    values[:, 9] = float("inf")
    values[:, 10] = torch.finfo(dtype).max
    values[:, 11] = torch.finfo(dtype).tiny
    values[:, 12] = torch.finfo(dtype).tiny / 2
    return values.to(dtype)


@needs_native
@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_rounded_to_the_nearest_even_on_every_instruction_set(dtype):
    v = _halves(dtype)
    expected = v.float().mean(0).to(dtype)  # the weights of a query of zeros are 1/2 each
    zeros = torch.zeros(1, 1, 2, 41, dtype=dtype)
    module, before = native.module(), native.module().isa()
    try:
        for isa in module.isas():
            module.set_isa(isa)
            got = block_sparse_attention(zeros, zeros, v[None, None], torch.ones(1, 1, 1), block=16, backend="native")
            for row in got[0, 0]:
                same = (row.view(torch.int16) == expected.view(torch.int16)) | (row.isnan() & expected.isnan())
                assert same.all(), (isa, v[:, ~same], row[~same], expected[~same])
    finally:
        module.set_isa(before)


@needs_native
@pytest.mark.native
def test_same_bits_in_every_run_and_for_any_number_of_threads(problem):
    p = problem(heads=4, seq=256, block=32, dropout_p=0.1, dropout_seed=3)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 4, 2):
            torch.set_num_threads(threads)
            results.append(p.run("native"))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_native
@pytest.mark.native
def test_threads_of_our_own(problem):
    p, module = problem(heads=3, seq=256, block=32), native.module()
    expected = p.run("native")
    module.set_own_threads(True)
    try:
        assert module.threads_backend() == "std::thread"
        assert all(torch.equal(a, b) for a, b in zip(expected, p.run("native"), strict=True))
    finally:
        module.set_own_threads(False)


def test_dropout_keeps_the_share_it_says_and_is_drawn_from_torchs_generator(problem):
    p = problem(batch=2, heads=4, seq=256)
    call = checked(p.q, p.k, p.v, p.layout, Options(dropout_p=0.3, dropout_seed=1, block=16))
    kept = dropout_keep(call).double()
    assert abs(kept.mean().item() - 0.7) < 0.003
    other = dropout_keep(checked(p.q, p.k, p.v, p.layout, Options(dropout_p=0.3, dropout_seed=2, block=16))).double()
    assert abs((kept * other).mean().item() - 0.49) < 0.005, "masks of two seeds are not independent"
    flat = kept.reshape(8, -1)
    assert all(abs((flat[0] * flat[i]).mean().item() - 0.49) < 0.01 for i in range(1, 8)), "heads share a mask"
    torch.manual_seed(5)
    a = block_sparse_attention(p.q, p.k, p.v, p.layout, dropout_p=0.3)
    b = block_sparse_attention(p.q, p.k, p.v, p.layout, dropout_p=0.3)
    torch.manual_seed(5)
    assert torch.equal(block_sparse_attention(p.q, p.k, p.v, p.layout, dropout_p=0.3), a) and not torch.equal(a, b)
