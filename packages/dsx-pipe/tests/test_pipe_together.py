"""One error on all ranks: blocks of `Pipeline.together`, and gradients of shared weights that cannot be summed."""

from __future__ import annotations

import pytest
import torch
from dsx_pipe import Pipeline, PipelineModule, StageError, TiedLayerSpec
from dsx_testkit import run_ranks
from torch import nn

WIDTH = 4


def outcome(call):
    try:
        call()
    except StageError as error:
        return str(error), error.stage, type(error.__cause__).__name__
    return None


def own_loop(rank, world, bad):
    torch.manual_seed(0)
    pipe = Pipeline(nn.Linear(WIDTH, WIDTH), "1f1b", micro_batches=2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(pipe.module.parameters(), lr=0.1)
    x = torch.randn(4, WIDTH)

    def update(fails):
        pipe.step(x, x)
        with pipe.together("the optimizer step"):
            if fails:
                raise KeyError("planted")
            optimizer.step()
        optimizer.zero_grad()

    found = outcome(lambda: update(rank == bad))
    optimizer.zero_grad()
    update(False)
    return found


@pytest.mark.parametrize("backend", ("gloo", "dsx"))
def test_a_block_that_fails_on_one_rank_fails_on_all(backend):
    found = run_ranks(own_loop, 3, 1, backend=backend, timeout=60)
    assert {text for text, *_ in found} == {"stage 1 (rank 1): the optimizer step failed: KeyError: 'planted'"}
    assert [stage for _, stage, _ in found] == [1, 1, 1]
    assert [cause for *_, cause in found] == ["NoneType", "KeyError", "NoneType"]


class Words(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.words = nn.Embedding(8, WIDTH, sparse=sparse)

    def forward(self, tokens):
        return self.words(tokens)


def logits(module, x):
    return x @ module.words.weight.T


def sparse_gradient(rank, world):
    torch.manual_seed(0)
    first = TiedLayerSpec("w", Words, sparse=True, tied_weight_attr="words.weight")
    last = TiedLayerSpec("w", Words, forward_fn=logits, tied_weight_attr="words.weight")
    layers = [first, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), last]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.cross_entropy, partition_method="uniform")
    pipe, tokens = Pipeline(model, "1f1b", micro_batches=2), torch.randint(0, 8, (4,))
    found = outcome(lambda: pipe.step(tokens, tokens))
    model.zero_grad()
    return found, outcome(lambda: pipe.step(tokens, tokens))


def test_a_sparse_gradient_of_a_shared_weight_is_refused_on_all_ranks():
    found = run_ranks(sparse_gradient, 2, timeout=60)
    assert found[0] == found[1]
    for text, stage, _ in found[0]:
        assert stage == 0 and "tied_modules.w.words.weight" in text and "sparse=False" in text
