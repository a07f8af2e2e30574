"""What is chosen by values that a plan does not have is spread evenly: tokens over experts."""

import pytest
import torch
from dsx_plan.fake import FakeCompute
from dsx_plan.recorder import Recorder

TOKENS, EXPERTS, K = 4096, 16, 3


def chosen(choose, *shape):
    """The positions that `choose` takes of bf16 values without contents, as lists, and how often each."""
    recorder = Recorder(ranks_per_host=1, streams=True)
    with recorder.ledger.following_resizes(), FakeCompute(recorder):
        indices = choose(torch.empty(*shape, dtype=torch.bfloat16)).contiguous()
        counts = torch.zeros(EXPERTS, dtype=torch.int64)
        counts.scatter_add_(0, indices.reshape(-1), torch.ones_like(indices).reshape(-1))
    return indices, counts.tolist()


@pytest.mark.parametrize(
    ("choose", "shape"),
    [
        (lambda v: v.topk(K, dim=1).indices, (TOKENS, EXPERTS)),
        (lambda v: v.topk(K, dim=0).indices.t(), (EXPERTS, TOKENS)),
        (lambda v: v.sort(dim=1, descending=True, stable=True).indices[:, :K], (TOKENS, EXPERTS)),
        (lambda v: v.argsort(dim=-1)[:, :K], (TOKENS, EXPERTS)),
        (lambda v: v.topk(K).indices.view(-1, K), (2, TOKENS // 2, EXPERTS)),
    ],
    ids=["topk", "topk-first-dim", "sort", "argsort", "samples"],
)
def test_each_expert_gets_the_same_number_of_tokens(choose, shape):
    indices, counts = chosen(choose, *shape)
    assert counts == [TOKENS * K // EXPERTS] * EXPERTS
    assert indices.shape == (TOKENS, K)
    assert all(len(set(row)) == K for row in indices.tolist()), "a token goes to different experts"


@pytest.mark.parametrize(
    "choose",
    [
        lambda v: v.argmax(dim=1),
        lambda v: v.argmax(dim=1, keepdim=True),
        lambda v: v.max(dim=1).indices,
        lambda v: torch.multinomial(v, 1),
    ],
    ids=["argmax", "argmax-keepdim", "max", "multinomial"],
)
def test_one_choice(choose):
    indices, counts = chosen(choose, TOKENS, EXPERTS)
    assert counts == [TOKENS // EXPERTS] * EXPERTS and indices.numel() == TOKENS


def test_values_that_are_there_choose():
    recorder = Recorder(ranks_per_host=1, streams=True)
    with recorder.ledger.following_resizes(), FakeCompute(recorder):
        values = torch.tensor([[1.0, 3.0, 2.0], [5.0, 4.0, 0.0]])
        assert values.topk(2).indices.tolist() == [[1, 2], [0, 1]]


def test_positions_of_long_rows_are_known_too():
    """A sort by 512 experts for 32,768 tokens has positions of 134 MB; those that are taken are known."""
    recorder = Recorder(ranks_per_host=1, streams=True)
    with recorder.ledger.following_resizes(), FakeCompute(recorder):
        taken = torch.empty(32768, 512).sort(dim=1).indices[:, :8].contiguous()
    assert taken[700].tolist() == [188 + j for j in range(8)]
