"""`sequence_attention` against attention by its definition in float64: masks, dropout, teams, kernels and bytes."""

import random
from dataclasses import replace

import dsx_activations
import dsx_comm
import pytest
import torch
from dsx_activations import ActivationArgumentError, gather_documents, sequence_attention, shard_sequence
from dsx_testkit import RankError, run_ranks
from dsx_testkit.sequences import Case, check, expected, got, random_cases
from torch.utils._python_dispatch import TorchDispatchMode

PLAIN = Case(7, 2, 6, 2, 33, True, None, False, False, "zigzag", None, 1)


def many(rank, world, number, seed):
    for case in random_cases(number, world, seed):
        check(case)
        check(case, torch.float32, rtol=1e-5, atol=5e-6) if number > 40 else None


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_masks_teams_and_orders_are_those_of_one_process(world):
    run_ranks(many, world, 25, 1000 * world)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_six_hundred_random_cases(world):
    """With another seed in every run, which the message of a failed case shows."""
    run_ranks(many, world, 150, random.randrange(10**6))


def in_lower_precision(rank, world):
    for team in (1, 2, 4):
        case = replace(PLAIN, team=team, window=9, packed=True, overlap=2)
        check(case, torch.float32, rtol=1e-5, atol=1e-5)
        check(case, torch.bfloat16, rtol=5e-2, atol=8e-2)


def test_lower_precision():
    run_ranks(in_lower_precision, 4)


def with_dropout(rank, world, order, team):
    """This rank's results with a seed of the call, and with one that is drawn; recomputed, they are the same."""
    case = replace(PLAIN, dropout=0.3, order=order, team=team, window=20, padded=True)
    given = got(case, seed=5)
    torch.manual_seed(11 + rank)  # only the first rank's generator counts
    drawn = got(case)
    return order, given, drawn


def whole(parts, order):
    """The tensor of which every rank has a part."""
    length, size = sum(p.shape[2] for p in parts), len(parts)
    out = parts[0].new_empty(*parts[0].shape[:2], length, parts[0].shape[3])
    for rank, part in enumerate(parts):
        begin = 0
        for first, behind in dsx_activations.sequence_segments(length, size, rank, order):
            out[:, :, first:behind] = part[:, :, begin : begin + behind - first]
            begin += behind - first
    return out


def test_dropout_does_not_depend_on_the_number_of_ranks():
    ((_, alone, drawn),) = run_ranks(with_dropout, 1, "plain", 1)
    assert not torch.equal(alone[0], drawn[0])
    for world, order, team in ((2, "plain", 2), (3, "zigzag", 1), (4, "zigzag", 2)):
        found = run_ranks(with_dropout, world, order, team)
        for index in range(4):
            torch.testing.assert_close(whole([one[1][index] for one in found], order), alone[index])
            torch.testing.assert_close(whole([one[2][index] for one in found], order), drawn[index])


def test_dropout_is_fair_and_its_gradients_are_those_of_its_own_weights():
    torch.manual_seed(0)
    q, k = (torch.randn(2, 3, 40, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    v = torch.eye(40, dtype=torch.float64).expand(2, 3, 40, 40).clone().requires_grad_()
    weights = (q @ k.mT * 0.5).softmax(-1)
    out = sequence_attention(q, k, v, dropout_p=0.25, seed=3, scale=0.5)  # v is one: the weights themselves
    factors = (out / weights).detach()
    assert set(factors.round(decimals=6).flatten().tolist()) == {0.0, round(1 / 0.75, 6)}
    assert 0.22 < (factors == 0).double().mean() < 0.28
    given = torch.randn_like(out)
    ours = torch.autograd.grad((out * given).sum(), (q, k, v))
    theirs = torch.autograd.grad(((weights * factors) @ v * given).sum(), (q, k, v))
    for mine, right in zip(ours, theirs):
        torch.testing.assert_close(mine, right)


def recomputed(rank, world):
    """Torch's own checkpoint, with dropout whose seed is drawn."""
    torch.manual_seed(3)
    x = torch.randn(1, 4, 5, 8, dtype=torch.float64, requires_grad=True)

    def layer(x):
        return sequence_attention(x, x, x, causal=True, dropout_p=0.4, length=5 * world, overlap=2) * 2

    found = []
    for again in (False, True):
        torch.manual_seed(9)
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        torch.manual_seed(1234)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), x)])
    for plain, other in zip(*found):
        assert torch.equal(plain, other)


def test_recomputation_drops_the_same_weights():
    run_ranks(recomputed, 2)


class Sent:
    """Bytes this rank sends to others, by the kind of collective."""

    def __init__(self):
        self.bytes = {}

    def begin(self, call):
        self.bytes[call.op] = self.bytes.get(call.op, 0) + call.sent

    def end(self, token, call, result, is_async):
        pass


def bytes_sent(rank, world, team, overlap):
    q = torch.randn(1, 4, 6, 8, requires_grad=True)
    k, v = (torch.randn(1, 4, 6, 8, requires_grad=True) for _ in range(2))
    for _ in range(17):  # the first calls are compared
        sequence_attention(q, k, v, length=6 * world, team=team)
    sent = Sent()
    stop = dsx_comm.observe(sent)
    sequence_attention(q, k, v, length=6 * world, team=team, overlap=overlap).sum().backward()
    stop()
    return sent.bytes


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("team", [1, 2, 4])
def test_bytes_are_those_of_the_closed_form(team, overlap):
    """Of N tokens over P ranks in teams of U: all-to-alls of q, k, v and the output, twice, with the part U - 1 of U;
    keys and values of N U / P tokens and 1 / U of the heads over R - 1 hops, their gradients over R hops.
    """
    world, own = 4, 4 * 6 * 8 * 4
    rings = world // team
    exchanged = 2 * 4 * own * (team - 1) // team
    around = 2 * own * (2 * (rings - 1) + rings if rings > 1 else 0)
    for found in run_ranks(bytes_sent, world, team, overlap):
        assert sum(found.values()) == exchanged + around, found


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_kernels_give_the_same():
    q, k, v = (torch.randn(2, 4, 24, 16) for _ in range(3))
    documents = torch.tensor([[0] * 10 + [1] * 14, [0] * 20 + [-1] * 4])
    for given in ({}, {"causal": True}, {"window": 5}, {"documents": documents, "causal": True}):
        found = [sequence_attention(q, k, v, kernel=kernel, **given) for kernel in ("pieces", "sdpa", "flex")]
        torch.testing.assert_close(found[0], found[1])
        torch.testing.assert_close(found[0], found[2])


def with_sparse_kernel(rank, world):
    """A layer of dsx-sparse-attn as the kernel: it sees whole sequences."""
    sparse = pytest.importorskip("dsx_sparse_attn")
    pattern = sparse.FixedSparsityConfig(num_heads=2, block=16, different_layout_per_head=False)
    attend = sparse.SparseSelfAttention(pattern, max_seq_length=64)
    torch.manual_seed(0)
    whole = torch.randn(1, 4, 64, 16)
    part = shard_sequence(whole, dim=2)
    out = sequence_attention(
        part, part, part, kernel=lambda q, k, v, is_causal, scale: attend(q, k, v), length=64, team=world
    )
    two = torch.cat([attend(whole[:, h : h + 2], whole[:, h : h + 2], whole[:, h : h + 2]) for h in (0, 2)], 1)
    torch.testing.assert_close(out, shard_sequence(two, dim=2))


def test_a_sparse_pattern_as_the_kernel():
    run_ranks(with_sparse_kernel, 2)


def documents_gathered(rank, world):
    whole = torch.arange(22).view(2, 11)
    assert torch.equal(gather_documents(shard_sequence(whole, order="zigzag"), order="zigzag", length=11), whole)


def test_documents_of_the_whole_sequence():
    run_ranks(documents_gathered, 3)


def test_a_longer_sequence_than_rows_are_held_at_a_time():
    case = Case(3, 1, 1, 1, 1300, True, 700, True, True, "plain", None, 1, "pieces")
    for mine, right in zip(got(case), expected(case)):
        torch.testing.assert_close(mine, right)


def capped(rank, world):
    check(replace(PLAIN, softcap=0.7, packed=True, team=1))
    check(replace(PLAIN, softcap=0.7, padded=True, window=5))


def test_scores_with_a_soft_cap():
    run_ranks(capped, 2)


def ring_by_kernels(rank, world):
    """FlexAttention in the ring with every mask, also for queries that see nothing of a block; flash without masks."""
    from torch.nn.attention import flex_attention

    q = torch.randn(1, 4, 6, 8, requires_grad=True)
    if hasattr(flex_attention, "_validate_device"):
        with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
            sequence_attention(q, q, q, team=1, length=6 * world, kernel="flex")
        flex_attention._validate_device = lambda *tensors: None  # on a CPU torch refuses what a device can do
    for given in ({}, {"window": 3}, {"packed": True, "padded": True}, {"causal": False, "packed": True}):
        check(replace(PLAIN, team=1, length=17, kernel="flex", **given), rtol=1e-6, atol=1e-6)
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seen():
        sequence_attention(q, q, q, causal=True, team=1, length=6 * world).sum().backward()
    flash = [name for name in seen if "flash_attention" in name]
    assert len(flash) == 2 * (rank + 1), flash  # of the blocks that this rank's queries see, forward and backward
    with pytest.raises(ActivationArgumentError, match="got a function as kernel with teams of 1 of the group's 2"):
        sequence_attention(q, q, q, team=1, length=6 * world, kernel=lambda q, k, v, **_: q)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_fused_kernels_in_the_ring():
    run_ranks(ring_by_kernels, 2)


def test_mistakes_are_named():
    q = torch.randn(1, 4, 5, 8)
    for message, given in {
        "window: got 0": {"window": 0},
        "softcap: got 0": {"softcap": 0},
        "dropout_p: got 1.0": {"dropout_p": 1.0},
        "kernel: got 'fast'": {"kernel": "fast"},
        "team: got 2, expected a divisor of the group's 1 ranks": {"team": 2},
        "overlap: got 0": {"overlap": 0},
        r"documents: got shape \(1, 4\)": {"documents": torch.zeros(1, 4, dtype=torch.int64)},
        "of whole numbers": {"documents": torch.zeros(1, 5)},
        "depends on how the sequence is cut": {"dropout_p": 0.1, "kernel": "sdpa"},
    }.items():
        with pytest.raises(ActivationArgumentError, match=message):
            sequence_attention(q, q, q, **given)


def differing(rank, world, what):
    q = torch.randn(1, 2, 4, 4)
    given = {"window": {"window": 4 + rank}, "seed": {"dropout_p": 0.5, "seed": 7 + rank}}[what]
    sequence_attention(q, q, q, length=8, **given)


@pytest.mark.parametrize("what", ["window", "seed"])
def test_ranks_with_different_windows_or_seeds_of_dropout_are_named(what):
    with pytest.raises(RankError, match=rf"the ranks differ in .*{what}"):
        run_ranks(differing, 2, what)
