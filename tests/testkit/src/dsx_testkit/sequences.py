"""Attention by its definition in float64, for tests of attention over sequence shards, and random cases."""

import random
from dataclasses import dataclass

import torch
import torch.distributed.nn.functional as differentiable
from dsx_activations import sequence_attention, shard_sequence


def loss_of_shards(engine, batch, group, vocab_size):
    """The mean over the tokens of all ranks of a sequence, as pages of Accelerate and Arctic write it."""
    shifted = batch.pop("shift_labels")
    logits = engine(**batch).logits
    loss = engine.module.loss_function(logits=logits, labels=None, shift_labels=shifted, vocab_size=vocab_size)
    losses = differentiable.all_gather(loss, group=group)
    counts = differentiable.all_gather((shifted != -100).sum(), group=group)
    return sum(one * count for one, count in zip(losses, counts)) / sum(counts)


@dataclass(frozen=True)
class Case:
    """One call: shapes, what is visible, and the way it is cut."""

    seed: int
    batch: int
    heads: int
    key_heads: int
    length: int
    causal: bool
    window: int | None
    packed: bool
    padded: bool
    order: str
    team: int | None
    overlap: int
    kernel: str = "auto"
    dropout: float = 0.0
    softcap: float | None = None


def random_cases(number, size, seed):
    """Lengths to 65, heads 1 to 6 with every number of key heads that divides them, and every mask."""
    draw = random.Random(seed)
    found = []
    for index in range(number):
        heads = draw.choice([1, 2, 3, 4, 6])
        found.append(Case(
            seed=seed + index, batch=draw.choice([1, 2]), heads=heads,
            key_heads=draw.choice([n for n in range(1, heads + 1) if heads % n == 0]),
            length=draw.choice([size, size + 1, 2 * size, *range(size, 66)]), causal=draw.random() < 0.6,
            window=draw.choice([None, None, 1, 3, 17]), packed=draw.random() < 0.4, padded=draw.random() < 0.3,
            order=draw.choice(["plain", "zigzag"]),
            team=draw.choice([None, *(n for n in range(1, size + 1) if size % n == 0)]),
            overlap=draw.choice([1, 1, 2, 3]), kernel=draw.choice(["auto", "auto", "auto", "sdpa", "pieces"]),
        ))  # fmt: skip
    return found


def tensors_of(case, features=4, value_features=3):
    """q, k, v, the weight of each output, and the document numbers (None without any)."""
    generator = torch.Generator().manual_seed(case.seed)
    shapes = [(case.heads, features), *[(case.key_heads, n) for n in (features, value_features)]]
    made = [
        torch.randn(case.batch, h, case.length, f, generator=generator, dtype=torch.float64)
        for h, f in [*shapes, (case.heads, value_features)]
    ]
    documents = None
    if case.packed or case.padded:
        documents = torch.zeros(case.batch, case.length, dtype=torch.int64)
        if case.packed:
            ends = torch.rand(case.batch, case.length, generator=generator) < 0.2
            documents = ends.cumsum(1)
        if case.padded:
            lengths = torch.randint(1, case.length + 1, (case.batch, 1), generator=generator)
            documents = documents.masked_fill(torch.arange(case.length) >= lengths, -1)
    return made[:3], made[3], documents


def seen(case, documents):
    """(batch or 1, 1, length, length): who sees whom."""
    at = torch.arange(case.length)
    distance = at[:, None] - at
    found = torch.ones(1, case.length, case.length, dtype=torch.bool)
    if case.causal:
        found = found & (distance >= 0)
    if case.window is not None:
        found = found & (distance.abs() < case.window)
    if documents is not None:
        found = found & (documents[:, :, None] == documents[:, None]) & (documents >= 0)[:, :, None]
    return found[:, None]


def expected(case):
    """Output and gradients of q, k and v."""
    tensors, weight, documents = tensors_of(case)
    q, k, v = (t.requires_grad_() for t in tensors)
    times = case.heads // case.key_heads
    keys, values = (t.repeat_interleave(times, 1) for t in (k, v))
    scores = (q @ keys.mT) * q.shape[-1] ** -0.5
    if case.softcap is not None:
        scores = (scores / case.softcap).tanh() * case.softcap
    visible = seen(case, documents)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).masked_fill(~visible, 0.0)
    out = weights @ values
    (out * weight).sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]


def got(case, dtype=torch.float64, group=None, **given):
    """This rank's part of the same, and how the group cuts."""
    tensors, weight, documents = tensors_of(case)

    def cut(t, dim=2):
        return shard_sequence(t, group, dim=dim, order=case.order)

    q, k, v = (cut(t).to(dtype).requires_grad_() for t in tensors)
    out = sequence_attention(
        q, k, v, group, causal=case.causal, window=case.window, order=case.order, length=case.length, team=case.team,
        documents=None if documents is None else cut(documents, 1), overlap=case.overlap, kernel=case.kernel,
        dropout_p=case.dropout, softcap=case.softcap, **given,
    )  # fmt: skip
    (out * cut(weight).to(dtype)).sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]


def check(case, dtype=torch.float64, rtol=1e-9, atol=1e-9):
    """Compare this rank's part with one process."""
    for name, mine, theirs in zip(("out", "q", "k", "v"), got(case, dtype), expected(case)):
        wanted = shard_sequence(theirs, dim=2, order=case.order)
        torch.testing.assert_close(
            mine.double(), wanted, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name} of {case}: {text}"
        )


def small_llama():
    """A Llama of two layers, four heads and two heads of keys, with the same random weights everywhere."""
    import transformers as t

    torch.manual_seed(0)
    return t.LlamaForCausalLM(
        t.LlamaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                      intermediate_size=32, max_position_embeddings=64)
    )  # fmt: skip
