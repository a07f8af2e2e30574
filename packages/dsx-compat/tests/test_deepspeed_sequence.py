"""Programs with DeepSpeed's Ulysses classes against one process: a Hugging Face model over the adapter's parts, and an
attention of its own in both layouts.
"""

import pytest
import torch
from dsx_testkit import RankError, run_ranks
from dsx_testkit.sequences import small_llama
from torch.nn import functional as F

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def samples():
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 40, (1, 15), generator=generator) for _ in range(4)]


def trained(rank, world):
    """As in Arctic's example: each rank has batches of its own, all work on one after the other."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
    from deepspeed.utils import groups
    from dsx_testkit.sequences import loss_of_shards

    model = small_llama()
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=world, micro_batch_size=1,
        seq_length_is_variable=True,
    )  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG, mpu=mpu)
    group = groups._get_sequence_parallel_group()
    mine = [{"input_ids": one, "labels": one} for one in samples()[rank::world]]
    loader = UlyssesSPDataLoaderAdapter(
        mine, sp_rank=groups._get_sequence_parallel_rank(), sp_group=group,
        sp_world_size=groups._get_sequence_parallel_world_size(), device=torch.device("cpu"),
    )  # fmt: skip
    assert len(loader) == 4
    found = []
    for batch in loader:
        assert "labels" not in batch
        loss = loss_of_shards(engine, batch, group, 40)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def test_a_hugging_face_model_with_the_ulysses_classes():
    pytest.importorskip("transformers")
    model, expected = small_llama(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for tokens in samples():
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for found in run_ranks(trained, 2):
        assert found == pytest.approx(expected, rel=1e-4)


def by_hand(rank, world, batch_dim, joined):
    from deepspeed.sequence.layer import DistributedAttention

    torch.manual_seed(0)
    whole = [torch.randn(2, 12, heads, 4) for heads in (4, 2, 2)]  # (batch, tokens, heads, features)

    def local(q, k, v, causal):
        """Sees the layout of the call."""
        order = (0, 2, 1, 3) if batch_dim == 0 else (1, 2, 0, 3)
        out = F.scaled_dot_product_attention(*(t.permute(order) for t in (q, k, v)), is_causal=causal)
        out = out.permute((0, 2, 1, 3) if batch_dim == 0 else (2, 0, 1, 3))
        return out.flatten(2) if joined else out

    parts = [t[:, 6 * rank : 6 * rank + 6] for t in whole]
    if batch_dim == 1:
        parts = [t.transpose(0, 1) for t in parts]
    attend = DistributedAttention(local, None, gather_idx=1 - batch_dim)
    out = attend(*parts, batch_dim, causal=True)
    if joined:
        out = out.unflatten(2, (4, 4))
    if batch_dim == 1:
        out = out.transpose(0, 1)
    q, k, v = (t.transpose(1, 2) for t in whole)
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, right[:, 6 * rank : 6 * rank + 6])


@pytest.mark.parametrize("batch_dim, joined", [(0, False), (1, False), (1, True)])
def test_an_attention_of_ones_own(batch_dim, joined):
    run_ranks(by_hand, 2, batch_dim, joined)


def not_a_divisor(rank, world):
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(3)


def test_a_size_that_does_not_divide():
    with pytest.raises(RankError, match="sequence_parallel_size: got 3 on 2 ranks"):
        run_ranks(not_a_divisor, 2)
