"""Plans of models with experts over ranks: tokens are spread evenly, also where their router's values are not there."""

import json

import pytest
from dsx.planning import plan

HIDDEN, LAYERS, EXPERTS, CHOICES, MICRO, LENGTH = 64, 2, 8, 2, 2, 1024
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN, "intermediate_size": 64,
    "moe_intermediate_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts": EXPERTS, "num_experts_per_tok": CHOICES, "vocab_size": 512, "mlp_only_layers": [],
    "max_position_embeddings": LENGTH, "norm_topk_prob": True, "decoder_sparse_step": 1, "tie_word_embeddings": False,
}  # fmt: skip


def planned(folder, ranks, *, spread, precision="bf16"):
    (folder / "config.json").write_text(json.dumps(MODEL))
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1},
        "expert_parallel": {"enabled": True, "autoep_size": spread},
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    return plan(str(folder), config, world_size=ranks, machine="H100-SXM", sequence=LENGTH, changes=False)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_sends_its_share_of_the_routes_to_others(tmp_path, ranks):
    """Tokens x choices, less those whose expert is here; out and back, in forward and in backward."""
    found = planned(tmp_path, ranks, spread=ranks)
    rows = MICRO * LENGTH * CHOICES * (ranks - 1) // ranks
    assert found.messages["all_to_all_single"] == (4 * LAYERS, 4 * LAYERS * rows * HIDDEN * 2)
    assert found.layout["expert"] == ranks


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_spreading_experts_leaves_the_arithmetic_of_a_rank(tmp_path, precision):
    """As many rows come as go; no product is computed only to learn its shape."""
    alone, spread = (planned(tmp_path, 4, spread=size, precision=precision) for size in (1, 4))
    assert spread.flops == pytest.approx(alone.flops, rel=1e-4)  # owners of dense parameters step other shares
    assert spread.peak_bytes < alone.peak_bytes
    assert not [note for note in spread.notes if "were computed" in note]
