"""MatMul and Softmax on block-sparse tensors, against dense products masked by the layout; gradients twice."""

import pytest
import torch
from dsx_sparse_attn import FixedSparsityConfig, MatMul, Softmax
from dsx_sparse_attn.errors import ArgumentError

BLOCK, HEADS, BATCH = 4, 2, 3


def layout(rows=3, cols=5):
    torch.manual_seed(0)
    made = (torch.rand(HEADS, rows, cols) < 0.5).long()
    made[:, 0] = 0
    return made


def dense_of(sparse, made):
    heads, rows, cols = made.nonzero(as_tuple=True)
    full = sparse.new_zeros(sparse.shape[0], made.shape[0], made.shape[1], made.shape[2], BLOCK, BLOCK)
    full = full.index_put((torch.arange(sparse.shape[0])[:, None], heads, rows, cols), sparse)
    return full.transpose(3, 4).reshape(sparse.shape[0], made.shape[0], made.shape[1] * BLOCK, made.shape[2] * BLOCK)


def flipped(x, swap):
    return x.transpose(-1, -2) if swap else x


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("mode", ["sdd", "dsd", "dds"])
def test_products_and_gradients_equal_dense_ones(mode, trans_a, trans_b):
    made = layout()
    rows, cols, nnz = made.shape[1] * BLOCK, made.shape[2] * BLOCK, int(made.sum())
    sparse = torch.randn(BATCH, nnz, BLOCK, BLOCK, dtype=torch.float64, requires_grad=True)

    def dense(m, n):
        return torch.randn(BATCH, HEADS, m, n, dtype=torch.float64, requires_grad=True)

    if mode == "sdd":
        a, b = dense(*((7, rows) if trans_a else (rows, 7))), dense(*((cols, 7) if trans_b else (7, cols)))
        full_a, full_b = a, b
    elif mode == "dsd":
        inner = rows if trans_a else cols
        a, b = sparse, dense(*((7, inner) if trans_b else (inner, 7)))
        full_a, full_b = dense_of(a, made), b
    else:
        inner = cols if trans_b else rows
        a, b = dense(*((inner, 7) if trans_a else (7, inner))), sparse
        full_a, full_b = a, dense_of(b, made)
    got = MatMul(made, BLOCK, mode, trans_a, trans_b)(a, b)
    expected = flipped(full_a, trans_a) @ flipped(full_b, trans_b)
    if mode == "sdd":
        expected = expected * made.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
        got = dense_of(got, made)
    assert torch.allclose(got, expected)
    weight = torch.randn_like(expected)
    for x, y in zip(
        torch.autograd.grad(got, (a, b), weight, retain_graph=True),
        torch.autograd.grad(expected, (a, b), weight),
        strict=True,
    ):
        assert torch.allclose(x, y)


def test_softmax_with_everything():
    made = FixedSparsityConfig(HEADS, block=BLOCK, num_local_blocks=2).make_layout(24)
    made[:, 1] = 0
    mask = made.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    x = torch.randn(BATCH, int(made.sum()), BLOCK, BLOCK, dtype=torch.float64, requires_grad=True)
    rpe = torch.randn(HEADS, 24, 24, dtype=torch.float64, requires_grad=True)
    keys, pairs = torch.randn(BATCH, 24, dtype=torch.float64), (torch.rand(24, 24) < 0.7).double()
    got = dense_of(
        Softmax(made, BLOCK)(x, 0.5, rpe=rpe, key_padding_mask=keys, attn_mask=pairs, attn_mask_mode="mul"), made
    )
    scores = dense_of(x, made) * 0.5 + rpe + keys[:, None, None]
    hidden = (mask * pairs) == 0
    expected = scores.masked_fill(hidden, -1e30).softmax(-1).masked_fill(hidden, 0.0)
    assert torch.allclose(got, expected)
    weight = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(got, (x, rpe), weight), torch.autograd.grad(expected, (x, rpe), weight), strict=True
    ):
        assert torch.allclose(a, b)


def test_masks_are_added_by_default_and_integers_are_not_taken_for_that():
    made = torch.ones(HEADS, 3, 3, dtype=torch.int64)
    x = torch.randn(BATCH, HEADS * 9, BLOCK, BLOCK, dtype=torch.float64)
    seen = torch.rand(12, 12) < 0.7
    seen[:, 0] = True
    expected = dense_of(x, made).masked_fill(~seen, float("-inf")).softmax(-1)
    added = torch.zeros(12, 12, dtype=torch.float64).masked_fill(~seen, float("-inf"))
    for mask in (added, seen):
        assert torch.allclose(dense_of(Softmax(made, BLOCK)(x, attn_mask=mask), made), expected)
    for masks in ({"attn_mask": seen.long()}, {"key_padding_mask": torch.ones(BATCH, 12, dtype=torch.int64)}):
        with pytest.raises(ArgumentError, match=r"of torch\.int64 with \w+_mode=\"add\""):
            Softmax(made, BLOCK)(x, **masks)


def test_the_signatures_of_scripts_are_taken_and_what_they_would_measure_is_refused():
    made = layout()
    MatMul(made, BLOCK, "sdd", False, True, False)
    Softmax(made, BLOCK, False)
    for make in (lambda: MatMul(made, BLOCK, "sdd", bench=True), lambda: Softmax(made, BLOCK, True)):
        with pytest.raises(ArgumentError, match=r"torch\.utils\.benchmark"):
            make()


def test_softmax_leaves_its_argument_as_it_is():
    made = layout()
    x = torch.randn(1, int(made.sum()), BLOCK, BLOCK, requires_grad=True)  # a leaf, which nothing may write to
    before = x.detach().clone()
    got = Softmax(made, BLOCK)(x)
    assert torch.equal(x.detach(), before) and not torch.equal(got, before) and got.requires_grad


def test_second_derivatives():
    made = torch.tensor([[[1, 0], [1, 1]]])
    q, k = (torch.randn(1, 1, 4, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def attend(q, k):
        p = Softmax(made, 2)(MatMul(made, 2, "sdd", trans_b=True)(q, k), 0.7)
        return MatMul(made, 2, "dsd")(p, k)

    assert torch.autograd.gradgradcheck(attend, (q, k))


def zeros(*shape):
    return torch.zeros(shape)


SPARSE = (1, 12, BLOCK, BLOCK)  # blocks of `layout()`


@pytest.mark.parametrize(
    "run, text",
    [
        (lambda m: MatMul(m, BLOCK, "sss"), '"sdd", "dsd" or "dds"'),
        (lambda m: MatMul(m, BLOCK, "dsd")(zeros(1, 2, BLOCK, BLOCK), zeros(1, HEADS, 20, 3)), "blocks of this layout"),
        (lambda m: MatMul(m, BLOCK, "sdd")(zeros(1, HEADS, 8, 3), zeros(1, HEADS, 3, 20)), "sdd: got a of shape"),
        (lambda m: MatMul(m, BLOCK, "sdd")(zeros(1, HEADS, 12, 3), zeros(1, HEADS, 4, 20)), "inner sizes 3 and 4"),
        (lambda m: Softmax(m, BLOCK)(zeros(*SPARSE), attn_mask=zeros(12, 20), attn_mask_mode="x"), "'x'"),
        (lambda m: Softmax(m, BLOCK)(zeros(*SPARSE), rpe=zeros(HEADS, 9, 20)), "2 heads of 12 x 20"),
        (lambda m: Softmax(m, BLOCK)(zeros(*SPARSE), key_padding_mask=zeros(1, 12)), r"expected \(1, 20\)"),
    ],
)  # fmt: skip
def test_shapes_are_checked(run, text):
    made = layout()
    assert int(made.sum()) == SPARSE[1]
    with pytest.raises(ArgumentError, match=text):
        run(made)
