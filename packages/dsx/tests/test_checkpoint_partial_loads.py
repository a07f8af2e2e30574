"""Loading a part of a checkpoint, under other names, with more rows, or by the caller's own function."""

import pytest
import torch
from dsx_testkit import run_ranks


def build(stage=0, world=1, seed=0, rows=6, prefix="", **changes):
    import dsx

    torch.manual_seed(seed)
    inner = torch.nn.ModuleDict({"embed": torch.nn.Embedding(rows, 4), "lora_a": torch.nn.Linear(4, 4)})
    inner["lora_a"].register_buffer("seen", torch.full((), float(seed)))
    model = torch.nn.ModuleDict({prefix: inner}) if prefix else inner
    model.forward = lambda ids: inner["lora_a"](inner["embed"](ids))
    config = {
        "train_batch_size": world, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "steps_per_print": None,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **changes,
    }  # fmt: skip
    return dsx.initialize(model=model, config=config)[0]


def train(engine):
    engine.backward(engine(torch.tensor([0, 1, 5])).square().sum())
    engine.step()


def moments(engine):
    return {
        p.name: p.states["exp_avg"].reshape(p.shape).clone() for p in engine.optimizer.slices(held=True) if p.states
    }


@pytest.fixture
def saved(tmp_path):
    engine = build()
    train(engine)
    engine.save_checkpoint(tmp_path / "ckpt")
    return tmp_path / "ckpt", engine.module_state_dict(), moments(engine)


def test_only_what_a_pattern_matches_is_loaded(saved):
    folder, weights, _ = saved
    engine = build(seed=3)
    before = engine.module_state_dict()
    engine.load_checkpoint(folder, only=["lora_"])
    after = engine.module_state_dict()
    assert torch.equal(after["embed.weight"], before["embed.weight"])
    assert all(torch.equal(after[name], weights[name]) for name in weights if "lora_" in name)
    assert set(moments(engine)) == {"lora_a.weight", "lora_a.bias"}


def test_an_adapter_alone_is_saved_and_loaded_into_a_model_with_another_base(tmp_path):
    import dsx

    def model(seed):
        torch.manual_seed(seed)
        found = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        found[0].requires_grad_(False)
        return found

    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "steps_per_print": None}
    first, second = (dsx.initialize(model=model(seed), config=config)[0] for seed in (0, 1))
    first.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    base = second.module_state_dict()["0.weight"]
    second.load_checkpoint(tmp_path)
    after = second.module_state_dict()
    assert torch.equal(after["0.weight"], base) and torch.equal(after["1.weight"], first.module[1].weight)


def test_names_are_mapped_by_patterns(saved):
    folder, weights, states = saved
    engine = build(seed=3, prefix="backbone")
    engine.load_checkpoint(folder, key_mapping={r"^": "backbone."})
    assert all(torch.equal(v, weights[n.removeprefix("backbone.")]) for n, v in engine.module_state_dict().items())
    assert all(torch.equal(v, states[n.removeprefix("backbone.")]) for n, v in moments(engine).items())


def test_two_names_that_become_one_are_refused(saved):
    from dsx.checkpoint import CheckpointError

    with pytest.raises(CheckpointError, match="both become 'x'"):
        build().load_checkpoint(saved[0], key_mapping={r"^.*$": "x"})


@pytest.mark.parametrize("arguments, said", [
    ({"only": "lora"}, "expected a list of patterns"), ({"only": ["("]}, "no regular expression"),
    ({"key_mapping": {"(": ""}}, "no regular expression"),
])  # fmt: skip
def test_patterns_are_checked(saved, arguments, said):
    with pytest.raises(ValueError, match=said):
        build().load_checkpoint(saved[0], **arguments)


def load_padded(rank, world, folder, stage, rows):
    engine = build(stage, world, seed=3, rows=rows)
    engine.load_checkpoint(folder, padded_vocabulary=["embed"])
    return engine.module_state_dict(), stage == 0 and moments(engine)


@pytest.mark.parametrize("stage, world, rows", [(0, 1, 8), (3, 2, 9), (3, 2, 5), (1, 2, 4)])
def test_rows_that_are_not_stored_are_zeros_and_rows_too_many_are_left_out(saved, stage, world, rows):
    folder, weights, states = saved
    for found, moved in run_ranks(load_padded, world, str(folder), stage, rows):
        expected = torch.cat([weights["embed.weight"], torch.zeros(3, 4)])[:rows]
        assert torch.equal(found["embed.weight"], expected)
        assert torch.equal(found["lora_a.weight"], weights["lora_a.weight"])
        if moved:
            assert torch.equal(moved["embed.weight"], torch.cat([states["embed.weight"], torch.zeros(3, 4)])[:rows])


def test_another_number_of_rows_is_an_error_unless_it_is_allowed(saved):
    from dsx.checkpoint import CheckpointError

    with pytest.raises(CheckpointError, match="tensors do not fit"):
        build(rows=8).load_checkpoint(saved[0])
    with pytest.raises(CheckpointError, match="tensors do not fit"):
        build(rows=8).load_checkpoint(saved[0], padded_vocabulary=["lora"])


def load_by_hand(rank, world, folder, stage):
    engine = build(stage, world, seed=3, rows=8, **({"bf16": {"enabled": True}} if stage == 2 else {}))

    def fill(src, dst):
        assert "embed.weight" in src and len(src) == 4
        with torch.no_grad():
            dst["embed"].weight[:6] = src["embed.weight"]
            dst["embed"].weight[6:] = 1
            for name, value in dst["lora_a"].state_dict(keep_vars=True).items():
                value.copy_(src[f"lora_a.{name}"])

    engine.load_checkpoint(folder, custom_load_fn=fill)
    found = engine.module_state_dict()
    train(engine)
    return found, engine.global_steps, engine.module_state_dict()


@pytest.mark.parametrize("stage, world", [(0, 1), (2, 2), (3, 2)])
def test_a_function_of_the_caller_fills_the_module(saved, stage, world):
    folder, weights, _ = saved
    outcomes = run_ranks(load_by_hand, world, str(folder), stage)
    for found, steps, after in outcomes:
        expected = torch.cat([weights["embed.weight"], torch.ones(2, 4)])
        assert torch.equal(found["embed.weight"], expected.to(found["embed.weight"].dtype)) and steps == 2
        assert torch.equal(found["lora_a.weight"], weights["lora_a.weight"].to(found["lora_a.weight"].dtype))
        moved = (after["lora_a.weight"] - found["lora_a.weight"]).abs().max()
        assert 0 < moved < 1  # the masters followed
        assert all(torch.equal(after[name], value) for name, value in outcomes[0][2].items())


def test_a_function_that_fails_is_an_error(saved):
    from dsx.checkpoint import CheckpointError

    with pytest.raises(CheckpointError, match=r"custom_load_fn.*no such name"):
        build().load_checkpoint(
            saved[0], custom_load_fn=lambda src, dst: (_ for _ in ()).throw(KeyError("no such name"))
        )
