"""Log-probabilities of a sharded model have the bits of the plain model: at any stage, number of ranks and batch split.

What dsx does to a forward (gather, free, agree on an order) must not show in it. Whether a batch gives the same bits in
parts as at once is the kernels' matter, sharded or not: the sharded model has to split like the plain one.
"""

from __future__ import annotations

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

WORDS, WIDTH = 29, 32


class Policy(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(8)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.to(dtype)

    def forward(self, tokens):
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def log_probs(model, tokens):
    scores = torch.log_softmax(model(tokens)[:, :-1].float(), -1)
    return scores.gather(-1, tokens[:, 1:, None]).squeeze(-1)


SPLITS = ([7], [3, 4], [1] * 7, [2, 5])


def compared(rank, world, stage, dtype, gathered):
    plain = Policy(dtype)
    model, optimizer = dsx_zero.shard(
        Policy(dtype), torch.optim.AdamW, config={"stage": stage, "stage3_param_persistence_threshold": 40}
    )
    model(torch.zeros(1, 3, dtype=torch.long)).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    plain.load_state_dict(dsx_zero.full_state_dict(optimizer, rank0_only=False)["model"])
    tokens = torch.randint(0, WORDS, (7, 9), generator=torch.Generator().manual_seed(rank))
    model.train(), plain.train()  # torch's fast path of evaluation is another kernel, for both

    def in_parts(of, sizes):
        return torch.cat([log_probs(of, part) for part in tokens.split(sizes)])

    same_as_whole = []
    with torch.no_grad():
        for sizes in SPLITS:
            want = in_parts(plain, sizes)
            if gathered:
                with dsx_zero.unwrap_model_for_generation(model) as ordinary:
                    got = in_parts(ordinary, sizes)
            else:
                got = in_parts(model, sizes)
            assert torch.equal(got, want), sizes
            same_as_whole.append(torch.equal(want, in_parts(plain, [7])))
    assert torch.equal(log_probs(model, tokens).detach(), log_probs(plain, tokens).detach())  # with gradients, too
    return same_as_whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("stage", "world", "gathered"), [(0, 2, False), (1, 2, False), (2, 1, False), (3, 2, False), (3, 3, True)]
)
def test_log_probs_have_the_plain_models_bits(stage, world, gathered, dtype):
    found = run_ranks(compared, world, stage, dtype, gathered)
    print(f"{dtype}: a batch in parts {SPLITS[1:]} has the bits of the batch at once: {found[0][1:]}")
