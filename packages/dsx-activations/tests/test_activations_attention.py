"""Attention over sequence shards against `scaled_dot_product_attention` in one process in float64: outputs and all
gradients, for heads and lengths that do not divide, grouped heads, causal and not, both orders of tokens.
"""

import itertools
import random

import dsx_activations
import pytest
import torch
from dsx_activations import ActivationArgumentError, UlyssesAttention, ring_attention, sequence_segments, shard_sequence
from dsx_testkit import RankError, run_ranks
from torch.nn import functional as F


def whole(seed, batch, heads, key_heads, length, features, value_features, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, features), (key_heads, features), (key_heads, value_features), (heads, value_features)]
    made = [torch.randn(batch, h, length, f, generator=generator, dtype=torch.float64).to(dtype) for h, f in shapes]
    return made[:3], made[3]


def expected(tensors, weight, causal, scale):
    """Output and gradients in float64."""
    q, k, v = (t.double().requires_grad_() for t in tensors)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    (out * weight.double()).sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]


def attention(kind, order, causal, scale, length):
    if kind == "ring":
        return lambda q, k, v: ring_attention(q, k, v, causal=causal, scale=scale, order=order, length=length)
    ulysses = UlyssesAttention(order=order)
    return lambda q, k, v: ulysses(q, k, v, length=length, is_causal=causal, scale=scale)


def cut(tensor, order):
    return shard_sequence(tensor.detach(), dim=2, order=order)


def got(call, tensors, weight, order):
    """This rank's output and gradients."""
    q, k, v = (cut(t, order).requires_grad_() for t in tensors)
    out = call(q, k, v)
    (out * cut(weight, order)).sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]


def check(case, kind, order, dtype=torch.float64, **tolerance):
    seed, batch, heads, key_heads, length, causal, scale = case
    tensors, weight = whole(seed, batch, heads, key_heads, length, 4, 3 + seed % 3, dtype)
    ours = got(attention(kind, order, causal, scale, length), tensors, weight, order)
    for name, mine, theirs in zip(("out", "q", "k", "v"), ours, expected(tensors, weight, causal, scale)):
        torch.testing.assert_close(
            mine.double(), cut(theirs, order), **tolerance, msg=lambda text, name=name: f"{name} of {case}: {text}"
        )


def cases(number, size, seed):
    """Heads 1 to 6 with every number of key heads that divides them, lengths 1 to 65."""
    draw = random.Random(seed)
    found = []
    for index in range(number):
        heads = draw.choice([1, 2, 3, 4, 6])
        key_heads = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
        length = draw.choice([size, size + 1, 2 * size, *range(size, 66)])
        scale = draw.choice([None, None, 0.3])
        found.append((seed + index, draw.choice([1, 2]), heads, key_heads, length, index % 2 == 0, scale))
    return found


def random_cases(rank, world, kind, order):
    for case in cases(16, world, 100 * world):
        check(case, kind, order, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("order", ["plain", "zigzag"])
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_outputs_and_gradients_are_those_of_one_process(world, kind, order):
    run_ranks(random_cases, world, kind, order)


def in_lower_precision(rank, world):
    for kind, order in itertools.product(("ring", "ulysses"), ("plain", "zigzag")):
        case = (7, 2, 6, 2, 33, True, None)
        check(case, kind, order, torch.float32, rtol=1e-5, atol=1e-6)
        check(case, kind, order, torch.bfloat16, rtol=3e-2, atol=6e-2)
        with torch.autocast("cpu", torch.bfloat16):
            check(case, "ring", order, torch.float32, rtol=1e-5, atol=1e-6)


def test_lower_precision():
    run_ranks(in_lower_precision, 2)


def over_many_rows(rank, world):
    """More queries than are held at a time."""
    check((3, 1, 2, 1, 1100, True, None), "ring", "zigzag", rtol=1e-9, atol=1e-9)
    check((4, 1, 1, 1, 1300, False, None), "ring", "plain", rtol=1e-9, atol=1e-9)


def test_more_rows_than_are_held_at_a_time():
    run_ranks(over_many_rows, 2)


def recomputed(rank, world, kind):
    """Two layers, each recomputed in backward: messages of the recomputation meet."""
    tensors, weight = whole(5, 1, 3, 1, 9, 4, 4)

    def layers(q, k, v, call, around):
        return around(call, around(call, q, k, v), k, v)

    found = []
    for around in (lambda f, *a: f(*a), dsx_activations.checkpoint):
        call = attention(kind, "zigzag", True, None, 9)
        found.append(got(lambda *t, c=call, a=around: layers(*t, c, a), tensors, weight, "zigzag"))
    for plain, again in zip(*found):
        assert torch.equal(plain, again)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_recomputation_gives_the_same(kind):
    run_ranks(recomputed, 2, kind)


class Sent:
    """Bytes that this rank sends to others, without the comparison of the first calls."""

    bytes = 0

    def begin(self, call):
        self.bytes += 0 if call.op == "all_gather_into_tensor" else call.sent

    def end(self, token, call, result, is_async):
        pass


def bytes_sent(rank, world):
    """Keys and values pass every rank but the last; their gradients make one hop more. Two all-to-alls of Ulysses."""
    import dsx_comm

    tensors, weight = whole(1, 1, 4, 4, 4 * world, 4, 4)
    block = 2 * tensors[1].numel() // world * 8
    found = {}
    for kind in ("ring", "ulysses"):
        call = attention(kind, "plain", False, None, None)
        got(call, tensors, weight, "plain")
        sent = Sent()
        stop = dsx_comm.observe(sent)
        got(call, tensors, weight, "plain")
        stop()
        found[kind] = sent.bytes
    own = tensors[0].numel() // world * 8  # bytes of this rank's queries, and of its output
    return found == {
        "ring": (world - 1) * block + (world - 1) * block + world * block,
        "ulysses": 2 * 4 * own * (world - 1) // world,
    }, found


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_are_those_of_the_closed_form(world):
    for right, found in run_ranks(bytes_sent, world):
        assert right, found


def own_kernel(rank, world):
    """A local attention of one's own sees whole sequences in their order, and is not called without heads."""
    seen = []

    def local(q, k, v, shift):
        seen.append((tuple(q.shape), tuple(k.shape), k[0, 0, :, 0].tolist()))
        return v + shift

    tokens = torch.arange(7.0).view(1, 1, 7, 1)
    part = cut(tokens, "zigzag").expand(1, 2, -1, 1)
    out = UlyssesAttention(local, order="zigzag")(part, part[:, :1], part[:, :1], 10.0, length=7)
    assert torch.equal(out, part + 10)
    return seen


def test_a_local_attention_of_ones_own():
    ordered = ((1, 1, 7, 1), (1, 1, 7, 1), [float(n) for n in range(7)])
    assert run_ranks(own_kernel, 3) == [[ordered], [ordered], []]


@pytest.mark.parametrize("order", ["plain", "zigzag"])
def test_every_token_belongs_to_one_rank(order):
    for size in range(1, 6):
        for length in range(size, 40):
            owned = [
                n for rank in range(size) for pair in sequence_segments(length, size, rank, order) for n in range(*pair)
            ]
            assert sorted(owned) == list(range(length))
    sizes = [sum(b - a for a, b in sequence_segments(41, 4, rank, "zigzag")) for rank in range(4)]
    assert max(sizes) - min(sizes) <= 1


def test_mistakes_are_named():
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 3, 5, 8)
    for call in (ring_attention, UlyssesAttention()):
        with pytest.raises(ActivationArgumentError, match="expected a multiple"):
            call(q, k, k)
        with pytest.raises(ActivationArgumentError, match="batch, heads, tokens, features"):
            call(q[0], k[0], k[0])
        with pytest.raises(ActivationArgumentError, match="one number of tokens"):
            call(q, q[:, :, :4], q[:, :, :4])
        with pytest.raises(ActivationArgumentError, match="one floating-point dtype"):
            call(q, q.double(), q)
        with pytest.raises(ActivationArgumentError, match="got 5 tokens on rank 0 of 1, expected 6"):
            call(q, q, q, length=6)
    with pytest.raises(ActivationArgumentError, match="zigzag"):
        ring_attention(q, q, q, order="striped")
    with pytest.raises(ActivationArgumentError, match="shorter than the group"):
        sequence_segments(2, 3, 0)
    with pytest.raises(ActivationArgumentError, match="local attention gave shape"):
        UlyssesAttention(lambda q, k, v: v[..., :1])(q, q, q)


def differing(rank, world, kind):
    call = attention(kind, "plain", False, None, None)
    for step in range(20):  # more than the first calls, which are compared in any case
        q = torch.randn(1, 2, 5 + (rank if step == 19 else 0), 4)
        call(q, q, q)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_ranks_with_different_lengths_are_named(kind):
    with pytest.raises(RankError, match="the ranks differ"):
        run_ranks(differing, 2, kind)
