"""DeepSpeed's checkpoints are imported, optimizer included, without running what is in them.

The files are written here in DeepSpeed's layout, from an engine of dsx that trained: what comes out of the import must be
what that engine has, and training must go on as it does. Real checkpoints of DeepSpeed 0.19.8 (stages 1 to 3, fp32 and
bf16, two ranks) went on with DeepSpeed's own losses to 2e-7 when this was written.
"""

import dataclasses
import os
from collections import OrderedDict

import pytest
import torch
from dsx.checkpoint.command import main
from dsx.checkpoint.foreign.deepspeed import read_deepspeed

RANKS = 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)
        self.frozen = torch.nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.tied = torch.nn.Linear(7, 5, bias=False)
        self.tied.weight = self.a.weight
        self.register_buffer("table", torch.arange(4))

    def forward(self, x):
        return self.frozen(self.b(torch.tanh(self.a(x) + self.tied(x))))


def build(seed=0, **changes):
    import dsx

    torch.manual_seed(seed)
    model = Model()
    config = {
        "train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.02}}, "steps_per_print": None, **changes
    }  # fmt: skip
    trained = [p for p in model.parameters() if p.requires_grad]
    return dsx.initialize(model=model, model_parameters=trained, config=config)[0]


def train(engine, first, steps):
    losses = []
    dtype = next(engine.module.parameters()).dtype
    for step in range(first, first + steps):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# - DeepSpeed's layout


@dataclasses.dataclass
class fragment_address:  # as it is called there
    numel: int
    start: int


class LossScaler:
    def __init__(self, **state):
        vars(self).update(state)


class ZeroStageEnum(int):
    """Pickled as its class and value, as an enumeration is."""

    def __reduce__(self):
        return ZeroStageEnum, (int(self),)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def pieces(rows, ranks):
    """A row cut into equal pieces, padded with zeros."""
    each = -(-rows.numel() // ranks)
    return list(torch.nn.functional.pad(rows, (0, each * ranks - rows.numel())).split(each))


def head_of(engine, stage, tag_extra):
    parts = {p.name: p for p in engine.optimizer.held_slices()}
    trained = OrderedDict((n, torch.Size(p.shape)) for n, p in parts.items() if p.trainable)
    frozen = OrderedDict((n, torch.Size(p.shape)) for n, p in parts.items() if not p.trainable)
    module = {n: v.clone() for n, v in engine.module.state_dict().items()}
    if stage == 3:
        module = {n: v if n == "table" else torch.empty(0, dtype=v.dtype) for n, v in module.items()}
    low = next(engine.module.parameters()).dtype
    return parts, {
        "module": OrderedDict(module), "buffer_names": ["table"], "optimizer": None,
        "param_shapes": [trained] if stage else None, "frozen_param_shapes": frozen,
        "frozen_param_fragments": None, "shared_params": {"tied.weight": "a.weight"}, "lr_scheduler": None,
        "skipped_steps": 0, "global_steps": engine.global_steps, "global_samples": engine.global_samples,
        "dp_world_size": RANKS, "mp_world_size": 1, "ds_version": "0.19.8",
        "ds_config": {"bf16": {"enabled": low == torch.bfloat16}, "gradient_accumulation_steps": 1},
        **tag_extra,
    }  # fmt: skip


def group_of(engine):
    return [{"lr": engine.get_lr()[0], "betas": (0.9, 0.999), "weight_decay": 0.0, "params": [0]}]


def write_stage12(engine, root, stage, mapping=True, extra=None):
    folder = root / "global_step3"
    folder.mkdir(parents=True)
    parts, head = head_of(engine, stage, extra or {})
    torch.save(head, folder / "mp_rank_00_model_states.pt")
    names = [n for n, p in parts.items() if p.trainable]
    rows = {key: torch.cat([value(parts[n]).reshape(-1) for n in names]) for key, value in VALUES.items()}
    cut = {key: pieces(row, RANKS) for key, row in rows.items()}
    where = [fragments(parts, names, cut["fp32"][0].numel(), rank) for rank in range(RANKS)]
    for rank in range(RANKS):
        state = {k: cut[k][rank].clone() for k in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(3.0)}
        saved = {
            "loss_scaler": LossScaler(cur_scale=1), "overflow": False, "clip_grad": 1.0,
            "base_optimizer_state": {"state": {0: state}, "param_groups": group_of(engine)},
            "single_partition_of_fp32_groups": [cut["fp32"][rank].clone()], "zero_stage": ZeroStageEnum(stage),
            "group_paddings": [0], "partition_count": [RANKS], "ds_version": "0.19.8",
        }  # fmt: skip
        if mapping:
            saved["param_slice_mappings"] = [where[rank]]
        torch.save({"optimizer_state_dict": saved}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (root / "latest").write_text("global_step3")
    return root


VALUES = {
    "fp32": lambda p: p.master, "exp_avg": lambda p: p.states["exp_avg"], "exp_avg_sq": lambda p: p.states["exp_avg_sq"]
}  # fmt: skip


def fragments(parts, names, each, rank):
    """Where the parameters lie in one rank's piece."""
    found, at = OrderedDict(), 0
    for name in names:
        numel = torch.Size(parts[name].shape).numel()
        first, last = max(at, rank * each), min(at + numel, (rank + 1) * each)
        if first < last:
            found[name] = fragment_address(last - first, first - rank * each)
        at += numel
    return found


def write_stage3(engine, root, groups=2):
    folder = root / "global_step3"
    folder.mkdir(parents=True)
    parts, head = head_of(engine, 3, {})
    names = [n for n, p in parts.items() if p.trainable]
    for rank in range(RANKS):
        mine = {n: pieces(parts[n].param.reshape(-1), RANKS)[rank].clone() for n, p in parts.items() if not p.trainable}
        torch.save({**head, "frozen_param_fragments": mine}, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        chunks = [names[: len(names) // groups], names[len(names) // groups :]]
        rows = [
            {k: torch.cat([pieces(v(parts[n]).reshape(-1), RANKS)[rank] for n in chunk]) for k, v in VALUES.items()}
            for chunk in chunks
        ]
        state = {
            i: {"exp_avg": row["exp_avg"], "exp_avg_sq": row["exp_avg_sq"], "step": torch.tensor(3.0)}
            for i, row in enumerate(rows)
        }
        saved = {
            "zero_stage": ZeroStageEnum(3), "loss_scaler": LossScaler(cur_scale=1), "partition_count": RANKS,
            "optimizer_state_dict": {"state": state, "param_groups": group_of(engine)},
            "fp32_flat_groups": [torch.nn.Parameter(row["fp32"]) for row in rows],
        }  # fmt: skip
        torch.save({"optimizer_state_dict": saved}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (root / "latest").write_text("global_step3")
    return root


def write_universal(engine, root):
    folder = root / "global_step3_universal"
    folder.mkdir(parents=True)
    parts, head = head_of(engine, 1, {})
    torch.save(head, folder / "mp_rank_00_model_states.pt")
    for name, part in parts.items():
        if part.trainable:
            (folder / "zero" / name).mkdir(parents=True)
            for key, value in VALUES.items():
                torch.save({"param": value(part).reshape(part.shape).clone()}, folder / "zero" / name / f"{key}.pt")
            torch.save(torch.tensor(3.0), folder / "zero" / name / "step.pt")
    torch.save({"param_groups": group_of(engine), "loss_scaler": LossScaler()}, folder / "zero" / "optimizer_state.pt")
    (root / "latest_universal").write_text("global_step3_universal")
    return root


def write_plain(engine, root):
    """Stage 0: the state dict of torch's optimizer."""
    folder = root / "global_step3"
    folder.mkdir(parents=True)
    parts, head = head_of(engine, 0, {})
    head |= {"module": engine.module.state_dict(), "shared_params": None}
    trained = [p for p in parts.values() if p.trainable]
    head["optimizer"] = {
        "state": {
            i: {
                **{k: p.states[k].reshape(p.shape).clone() for k in ("exp_avg", "exp_avg_sq")},
                "step": torch.tensor(3.0),
            }
            for i, p in enumerate(trained)
        },
        "param_groups": [{**group_of(engine)[0], "params": list(range(len(trained)))}],
    }
    torch.save(head, folder / "mp_rank_00_model_states.pt")
    (root / "latest").write_text("global_step3")
    return root


WRITERS = {
    "stage 0": write_plain,
    "stage 1": lambda e, root: write_stage12(e, root, 1),
    "stage 2 without mappings": lambda e, root: write_stage12(e, root, 2, mapping=False),
    "stage 3": write_stage3,
    "universal": write_universal,
}


# - Importing it


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("kind", WRITERS)
def test_training_goes_on_as_it_would_have(tmp_path, kind, low):
    if low and kind == "stage 0":
        pytest.skip("stage 0 in bf16 has flat masters of another form, which are not read")
    changes = {"bf16": {"enabled": True}} if low else {}
    engine = build(**changes)
    train(engine, 0, 3)
    folder = WRITERS[kind](engine, tmp_path / "deepspeed")
    weights, expected = engine.module_state_dict(), train(engine, 3, 3)
    assert main(["import", str(folder), str(tmp_path / "dsx"), "--new-tag", "a"]) == 0
    other = build(seed=4, optimizer={"type": "AdamW", "params": {"lr": 0.5}}, **changes)
    path, _ = other.load_checkpoint(tmp_path / "dsx")
    assert path is not None and other.global_steps == 3 and other.global_samples == 12
    got = other.module_state_dict()
    assert got.keys() == weights.keys() and all(torch.equal(got[name], value) for name, value in weights.items())
    assert other.get_lr() == [0.02]
    assert train(other, 3, 3) == expected


def test_loading_one_says_how_it_is_imported(tmp_path):
    from dsx.checkpoint import CheckpointError

    engine = build()
    train(engine, 0, 1)
    write_stage12(engine, tmp_path / "ds", 1)
    with pytest.raises(CheckpointError, match="dsx checkpoint import"):
        engine.load_checkpoint(tmp_path / "ds")


def test_the_state_of_the_caller_comes_along_and_nothing_is_run(tmp_path, caplog):
    engine = build()
    train(engine, 0, 1)
    extra = {"note": "here", "numbers": [1, 2.5], "evil": Evil(tmp_path / "run")}
    folder = write_stage12(engine, tmp_path / "ds", 2, extra=extra)
    assert main(["import", str(folder), str(tmp_path / "dsx")]) == 0
    _, client = build().load_checkpoint(tmp_path / "dsx")
    assert client == {"note": "here", "numbers": [1, 2.5]} and not (tmp_path / "run").exists()
    assert any("evil" in m for m in caplog.messages)


@pytest.mark.parametrize("damage", ["rank", "bytes", "short", "no module"])
def test_what_is_damaged_is_a_named_error_and_nothing_is_written(tmp_path, damage, capsys):
    engine = build()
    train(engine, 0, 1)
    folder = write_stage3(engine, tmp_path / "ds") / "global_step3"
    optim = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    if damage == "rank":
        (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    elif damage == "bytes":
        optim.write_bytes(optim.read_bytes()[:-40])
    elif damage == "short":
        data = torch.load(optim, weights_only=False)
        data["optimizer_state_dict"]["fp32_flat_groups"] = [torch.zeros(3)]
        torch.save(data, optim)
    else:
        torch.save({}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert main(["import", str(tmp_path / "ds"), str(tmp_path / "dsx")]) == 1
    assert "dsx checkpoint import: " in capsys.readouterr().err
    assert not (tmp_path / "dsx").exists() or not any(p.is_dir() for p in (tmp_path / "dsx").iterdir())


# - Model parallelism


def write_slices(root, info, slices):
    """Files of model-parallel ranks, weights alone."""
    for rank, module in enumerate(slices):
        head = {"module": module, "buffer_names": [], "optimizer": None, "universal_checkpoint_info": info}
        torch.save(head, root / f"mp_rank_{rank:02d}_model_states.pt")


INFO = {
    "tp_replicated_parameter_patterns": [r".*norm\.weight"],
    "parameter_to_average_patterns": [r"mean\..*"],
    "parameter_with_row_parallelism_patterns": [r".*dense\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*glu\.weight"],
    "vocabulary_parameter_patterns": [r"embed\.weight"],
    "original_vocab_size": 7,
}


def test_slices_go_together_by_the_patterns_of_universal_checkpoints(tmp_path):
    whole = {
        "norm.weight": torch.randn(4), "mean.w": torch.randn(3), "dense.weight": torch.randn(4, 6),
        "glu.weight": torch.randn(8, 2), "embed.weight": torch.randn(7, 3), "column.weight": torch.randn(6, 2),
    }  # fmt: skip
    padded = torch.cat([whole["embed.weight"], torch.zeros(1, 3)])
    gate, up = whole["glu.weight"].chunk(2)
    slices = [
        {
            "norm.weight": whole["norm.weight"], "mean.w": whole["mean.w"] + (1 if r else -1),
            "dense.weight": whole["dense.weight"].chunk(2, 1)[r], "embed.weight": padded.chunk(2)[r],
            "glu.weight": torch.cat([gate.chunk(2)[r], up.chunk(2)[r]]), "column.weight": whole["column.weight"].chunk(2)[r],
        }
        for r in range(2)
    ]  # fmt: skip
    write_slices(tmp_path, INFO, slices)
    found = read_deepspeed(tmp_path)
    for name, value in whole.items():
        torch.testing.assert_close(found.parameters[name].fetch(), value)
        assert found.parameters[name].shape == tuple(value.shape)


def test_slices_of_which_nothing_is_said_are_refused(tmp_path):
    from dsx.checkpoint import CheckpointError

    write_slices(tmp_path, None, [{"w": torch.ones(2)}, {"w": torch.ones(2)}])
    with pytest.raises(CheckpointError, match="'w' is on 2 model-parallel ranks"):
        read_deepspeed(tmp_path)


def test_layers_of_a_pipeline_and_experts_are_read(tmp_path):
    torch.save({"module": None, "buffer_names": []}, tmp_path / "mp_rank_00_model_states.pt")
    layers = [torch.nn.Linear(2, 2).state_dict() for _ in range(2)]
    for number, layer in enumerate(layers):
        torch.save(layer, tmp_path / f"layer_{number:02d}-model_00-model_states.pt")
    expert = {"moe.deepspeed_experts.1.weight": torch.ones(3)}
    torch.save(expert, tmp_path / "layer_0_expert_1_mp_rank_00_model_states.pt")
    found = read_deepspeed(tmp_path)
    assert set(found.parameters) == {"0.weight", "0.bias", "1.weight", "1.bias", *expert}
    assert torch.equal(found.parameters["1.bias"].fetch(), layers[1]["bias"])
    assert torch.equal(found.parameters["moe.deepspeed_experts.1.weight"].fetch(), torch.ones(3))


# - The names that scripts call


def test_the_functions_of_zero_to_fp32(tmp_path):
    from dsx.checkpoint import CheckpointError
    from dsx.checkpoint import zero_to_fp32 as scripts

    engine = build(bf16={"enabled": True})
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path / "dsx")
    write_stage3(engine, tmp_path / "ds")
    masters = {p.name: p.master.reshape(p.shape).float() for p in engine.optimizer.held_slices() if p.trainable}
    for folder in (tmp_path / "dsx", tmp_path / "ds"):
        found = scripts.get_fp32_state_dict_from_zero_checkpoint(folder)
        assert set(found) == set(engine.module.state_dict()) and found["a.weight"] is not None
        assert all(torch.equal(found[name], value) for name, value in masters.items())
        assert torch.equal(found["tied.weight"], masters["a.weight"])
        lazy = scripts.get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
        assert len(lazy) == len(found) and torch.equal(lazy["b.bias"], masters["b.bias"])
        model = scripts.load_state_dict_from_zero_checkpoint(Model(), folder)
        assert all(torch.equal(model.get_parameter(name), value) for name, value in masters.items())
        out = tmp_path / f"{folder.name}-out"
        assert scripts.main([str(folder), str(out)]) == 0
        assert torch.equal(torch.load(out / "pytorch_model.bin", weights_only=True)["b.weight"], masters["b.weight"])
        assert scripts.main([str(folder), str(out)]) == 1  # it is there already
    with pytest.raises(CheckpointError, match="does not fit the model"):
        scripts.load_state_dict_from_zero_checkpoint(torch.nn.Linear(2, 2), tmp_path / "ds")
    assert len(scripts.get_optim_files(tmp_path / "ds" / "global_step3")) == RANKS
    assert scripts.get_model_state_file(tmp_path / "ds" / "global_step3", 3).endswith(
        "zero_pp_rank_0_mp_rank_00_model_states.pt"
    )
    with pytest.raises(CheckpointError, match="such files are DeepSpeed's"):
        scripts.get_optim_files(tmp_path / "dsx" / "global_step2")


def test_the_command_for_universal_checkpoints(tmp_path):
    from dsx.checkpoint.ds_to_universal import main as convert

    engine = build()
    train(engine, 0, 3)
    write_stage12(engine, tmp_path / "ds", 1)
    words = ["--input_folder", str(tmp_path / "ds" / "global_step3"), "--output_folder", str(tmp_path / "out" / "uni")]
    assert convert(words) == 0
    other = build(seed=3, checkpoint={"load_universal": True}, zero_optimization={"stage": 3})
    other.load_checkpoint(tmp_path / "out", tag="uni")
    assert train(other, 3, 2) == pytest.approx(train(engine, 3, 2), rel=1e-6)
