"""A loss on slices of the vocabulary: what a plan changes is what a job with such a loss does."""

from __future__ import annotations

import json

import dsx
import pytest
import torch
from dsx.cli import main
from dsx.planning import PlanError, plan
from dsx_testkit import run_ranks

TINY = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 32768,
        "max_position_embeddings": 64, "tie_word_embeddings": False}  # fmt: skip
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
    "tensor_parallel": {"autotp_size": 2},
}


@pytest.fixture
def folder(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def planned(folder, sliced, *, config=CONFIG, world=2, **more):
    return plan(
        folder, config, world_size=world, machine="h100", sequence=64, changes=False, sliced_loss=sliced, **more
    )


def test_logits_take_a_slices_share(folder):
    whole, sliced = planned(folder, False), planned(folder, True)
    tokens, words = 2 * 64, TINY["vocab_size"]
    assert whole.peak_bytes - sliced.peak_bytes > tokens * words * 2, "half of the logits in fp32"
    assert sliced.parameters == whole.parameters and sliced.state_bytes() == whole.state_bytes()
    assert "all_gather_into_tensor" in whole.messages and "all_gather_into_tensor" not in sliced.messages
    assert sliced.parts["operators"] < whole.parts["operators"]


def test_stages_too(folder):
    config = {**CONFIG, "pipeline": {"stages": 2}, "gradient_accumulation_steps": 2}
    whole, sliced = (planned(folder, sliced, config=config, world=4) for sliced in (False, True))
    last = [one.pipeline.ranks[-1].peak_bytes for one in (whole, sliced)]
    assert last[0] - last[1] > 2 * 63 * TINY["vocab_size"] * 2 * 0.9, "half of the logits of 63 tokens in fp32"
    assert whole.pipeline.ranks[0].peak_bytes == sliced.pipeline.ranks[0].peak_bytes, "the first stage has no logits"


def test_without_slices_it_is_refused(folder):
    config = {key: value for key, value in CONFIG.items() if key != "tensor_parallel"}
    with pytest.raises(PlanError, match=r"sliced_loss: got it without tensor_parallel\.autotp_size"):
        planned(folder, True, config=config)


def test_on_the_command_line(folder, capsys):
    (folder / "dsx.json").write_text(json.dumps(CONFIG))
    words = ["plan", str(folder), "-c", f"{folder}/dsx.json", "-n", "2", "-m", "h100", "-s", "64", "--json", "-"]
    found = []
    for more in ([], ["--sliced-loss"]):
        assert main([*words, *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["peak_bytes"])
    assert found[1] < found[0]


def losses(rank, world, folder, sliced):
    """Losses of three updates of a job whose loss is on slices, as the guide says it, or on whole logits."""
    import transformers
    from dsx_comm import parallel_groups
    from dsx_pipe.tensor import vocab_parallel_cross_entropy
    from torch.nn import functional as F

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder))
    config = json.loads(json.dumps(CONFIG))
    if sliced:
        rule = {"patterns": [r"(^|\.)lm_head"], "partition_type": "column"}
        config["tensor_parallel"]["partition_config"] = {"use_default_specs": True, "layer_specs": [rule]}

        def loss(logits, labels, vocab_size, **_):
            following = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
            group = parallel_groups.get_tensor_model_parallel_group()
            return vocab_parallel_cross_entropy(logits.flatten(0, 1), following, group, vocab_size=vocab_size)

        model.loss_function = loss
    engine, *_ = dsx.initialize(model=model, config=config)
    found, widths = [], []
    for step in range(3):
        ids = torch.randint(0, TINY["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(step))
        out = engine(input_ids=ids, labels=ids)
        engine.backward(out.loss)
        engine.step()
        found.append(out.loss.item())
        widths.append(out.logits.shape[-1])
    engine.destroy()
    return found, widths


def test_a_job_with_such_a_loss_learns_the_same(folder):
    whole, sliced = (run_ranks(losses, 2, str(folder), sliced, backend=None, timeout=300) for sliced in (False, True))
    assert {width for _, widths in whole for width in widths} == {TINY["vocab_size"]}
    assert {width for _, widths in sliced for width in widths} == {TINY["vocab_size"] // 2}
    for (a, _), (b, _) in zip(whole, sliced):
        assert a == pytest.approx(b, rel=1e-5)
