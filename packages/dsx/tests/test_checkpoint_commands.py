"""`dsx checkpoint`: look at checkpoints, compare, export, import, convert and prune them."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from dsx_checkpoint.command import main
from safetensors.torch import load_file

GOLDEN = Path(__file__).parent / "golden"


def build(seed=0, **changes):
    import dsx

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 5, bias=False))
    model.append(torch.nn.Linear(6, 5, bias=False))
    model[3].weight = model[2].weight
    config = {
        "train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "steps_per_print": None, **changes
    }  # fmt: skip
    return dsx.initialize(model=model, config=config)[0]


def train(engine, steps=1):
    dtype = next(engine.module.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
        y = engine.module[2](engine.module[1](engine.module[0](x)))
        engine.backward(y.float().square().sum())
        engine.step()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    engine = build(bf16={"enabled": True})
    for _ in range(3):
        train(engine)
        engine.save_checkpoint(folder, client_state={"note": 1})
    engine.save_checkpoint(folder, tag="best", client_state={"note": 1}, save_latest=False)
    masters = {p.name: p.master.reshape(p.shape).clone() for p in engine.optimizer.slices(held=True)}
    return folder, engine.module_state_dict(), masters


def test_inspect_says_what_is_there(saved, capsys):
    folder, _weights, _ = saved
    assert main(["inspect", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "global_step3: format version 3, written by dsx" in said and "exp_avg, exp_avg_sq, step" in said
    assert "params bf16" in said and "client state: note" in said and "tied names: 1" in said
    assert said.rstrip().splitlines()[-4:] == [
        "  global_step3  (latest)", "  global_step2", "  global_step1", "  best"
    ]  # fmt: skip
    assert main(["inspect", str(folder / "best"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counters"]["global_steps"] == 3 and found["masters"] and found["parameters"] == 5 * 6 + 6 + 12 + 30
    assert main(["inspect", str(folder), "--tensors", "exp_avg/2"]) == 0
    assert capsys.readouterr().out == "optimizer  exp_avg/2.weight  float32[5, 6]  120 bytes  optimizer.safetensors\n"
    assert main(["inspect", str(folder), "--tag", "none"]) == 1
    assert "tags in" in capsys.readouterr().err


def test_looking_needs_no_torch(saved):
    code = (
        "import sys; from dsx_checkpoint.command import main; f = sys.argv[1]\n"
        "calls = ['inspect', f], ['verify', f], ['diff', f, '--tag2', 'best'], ['prune', f, '--keep-last', '9']\n"
        "for words in calls:\n"
        "    main(words)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(saved[0])], capture_output=True).returncode == 0


def test_the_index_of_a_very_large_checkpoint_is_read_quickly(tmp_path):
    """1 TB, made up: 2000 tensors of 500 MB, a hash for each 4 MiB. The limit is loose; figures are in the bench."""
    from dsx_checkpoint.format import CHUNK_BYTES, VERSION, seal

    size, count = 250_000_000 * 2, 2000
    chunks = -(-size // CHUNK_BYTES)
    files = {
        f"model-{n}.safetensors": {"bytes": size + 8, "header_bytes": 8, "header_hash": "0" * 8} for n in range(count)
    }
    tensors = {
        f"w{n}": {
            "dtype": "BF16", "shape": [250_000_000], "file": f"model-{n}.safetensors", "offset": 8,
            "hashes": "0" * 8 * chunks,
        }
        for n in range(count)
    }  # fmt: skip
    data = {
        "format": "dsx-checkpoint", "version": VERSION, "writer": "", "latest": True, "hash": "crc32",
        "chunk_bytes": CHUNK_BYTES, "files": files, "model": tensors, "optimizer": {}, "client": {},
        "aliases": {name: [] for name in tensors}, "excluded": [], "scalars": {}, "state": {}, "ranks": [],
    }  # fmt: skip
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "dsx.json").write_text(seal(data))
    began = time.process_time()
    assert main(["inspect", str(tmp_path / "big")]) == 0
    assert time.process_time() - began < 10


# - Comparing


def test_diff_names_what_differs(saved, tmp_path, capsys):
    folder, _, _ = saved
    assert main(["diff", str(folder), "--tag1", "global_step3", "--tag2", "best"]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main(["diff", str(folder), "--tag1", "global_step2"]) == 1
    assert "got one checkpoint" in capsys.readouterr().err
    assert main(["diff", str(folder), "--tag1", "global_step2", "--tag2", "global_step3"]) == 1
    said = capsys.readouterr().out
    assert "values: model 0.weight (1 of 1 chunks)" in said and "values: optimizer exp_avg/0.weight" in said
    assert "state: state state.engine.counters.global_steps (2 and 3)" in said
    assert main(["diff", str(folder / "best"), str(GOLDEN / "v3" / "sgd-fp16-stage0-1rank")]) == 1
    assert "only in second: model gain" in capsys.readouterr().out


# - Exporting


def exported(folder, target, *options):
    assert main(["export", str(folder), str(target), *options]) == 0
    return target


def test_export_to_safetensors(saved, tmp_path):
    folder, weights, masters = saved
    full = load_file(exported(folder, tmp_path / "full") / "model.safetensors")
    for name, value in masters.items():
        assert full[name].dtype == torch.float32 and torch.equal(full[name], value)
    assert "3.weight" not in full and full["1.num_batches_tracked"].dtype == torch.int64
    low = load_file(exported(folder, tmp_path / "low", "--dtype", "bf16") / "model.safetensors")
    assert all(torch.equal(low[n], weights[n].to(low[n].dtype)) for n in low)
    split = exported(folder, tmp_path / "split", "--max-shard-size", "150B", "--tag", "best")
    index = json.loads((split / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    assert all(torch.equal(load_file(split / file)[name], full[name]) for name, file in index.items())
    some = load_file(exported(folder, tmp_path / "some", "--only", "^2") / "model.safetensors")
    assert list(some) == ["2.weight"]


def test_export_to_torch(saved, tmp_path):
    folder, _weights, masters = saved
    found = torch.load(exported(folder, tmp_path / "w.pt", "--to", "torch"), weights_only=True)
    assert list(found) and all(torch.equal(found[name], value) for name, value in masters.items())
    assert found["2.weight"].data_ptr() == found["3.weight"].data_ptr()
    build().module.load_state_dict(found)


def test_export_to_torch_distributed_checkpoint_and_import_from_there(saved, tmp_path):
    folder, _weights, masters = saved
    target = exported(folder, tmp_path / "dcp", "--to", "dcp")
    state = {"model": {name: torch.zeros(value.shape) for name, value in masters.items()}}
    torch.distributed.checkpoint.load(state, checkpoint_id=str(target), no_dist=True)
    assert all(torch.equal(state["model"][name], value) for name, value in masters.items())
    assert main(["import", str(target), str(tmp_path / "back")]) == 0
    engine = build(seed=4)
    engine.load_checkpoint(tmp_path / "back", load_module_only=True, load_module_strict=False)
    assert all(torch.equal(v, masters[n]) for n, v in engine.module_state_dict().items() if n in masters)


def test_what_cannot_be_exported_is_an_error_and_leaves_nothing(saved, tmp_path, capsys):
    folder, _, _ = saved
    (tmp_path / "there").write_text("mine")
    for words, said in (
        ([str(tmp_path / "there")], "exists already"),
        ([str(tmp_path / "none"), "--only", "zzz"], "no tensor matches"),
        ([str(tmp_path / "none"), "--only", "*.weight"], "is no regular expression"),
        ([str(tmp_path / "size"), "--max-shard-size", "five"], "got the size 'five'"),
    ):
        assert main(["export", str(folder), *words]) == 1
        assert said in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["there"]
    assert (tmp_path / "there").read_text() == "mine"


# - Converting, importing, pruning


@pytest.mark.parametrize("version", ["v1", "v2", "v3"])
def test_convert_keeps_everything_of_an_older_version(tmp_path, version, capsys):
    from dsx.checkpoint import open_checkpoint

    source = GOLDEN / version / "adamw-bf16-stage3-3ranks"
    assert main(["convert", str(source), str(tmp_path)]) == 0
    before, after = open_checkpoint(source), open_checkpoint(tmp_path)
    assert after.index.version == 3 and after.folder.name == "global_step4"
    assert before.index.scalars == after.index.scalars and before.index.aliases == after.index.aliases
    for family in ("model", "optimizer"):
        assert before.index.tensors[family].keys() == after.index.tensors[family].keys()
        for name in before.index.tensors[family]:
            assert torch.equal(before.stored(family, name), after.stored(family, name))
    assert before.state_of_caller()["engine"]["counters"] == after.state_of_caller()["engine"]["counters"]
    assert main(["verify", str(tmp_path)]) == 0
    assert main(["convert", str(source), str(tmp_path)]) == 1
    assert "choose another tag" in capsys.readouterr().err


class Evil:
    """A pickle that makes a file when it is read by a program that runs what it reads."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("kind", ["pt", "safetensors", "folder", "nested"])
def test_state_dicts_are_imported_and_nothing_is_run(tmp_path, kind, capsys):
    from safetensors.torch import save_file

    torch.manual_seed(5)
    model = torch.nn.Linear(4, 3)
    state, source = model.state_dict(), tmp_path / "w.pt"
    if kind == "safetensors":
        source = tmp_path / "w.safetensors"
        save_file(state, source)
    elif kind == "folder":
        source = tmp_path / "hf"
        source.mkdir()
        save_file({"weight": state["weight"]}, source / "model-00001-of-00002.safetensors")
        save_file({"bias": state["bias"]}, source / "model-00002-of-00002.safetensors")
    else:
        evil = Evil(tmp_path / "run")
        torch.save({"model": state, "evil": evil} if kind == "nested" else {**state, "evil": evil}, source)
    assert main(["import", str(source), str(tmp_path / "ckpt"), "--new-tag", "a"]) == 0
    assert "weights alone" in capsys.readouterr().out and not (tmp_path / "run").exists()
    import dsx

    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "steps_per_print": None}
    engine = dsx.initialize(model=torch.nn.Linear(4, 3), config=config)[0]
    engine.load_checkpoint(tmp_path / "ckpt", load_module_only=True)
    assert all(torch.equal(value, state[name]) for name, value in engine.module_state_dict().items())


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path, capsys):
    (tmp_path / "bad.pt").write_bytes(b"PK\x03\x04 no zip file")
    (tmp_path / "bad.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("bad.pt", "cannot be read as a file of torch.save"), ("bad.safetensors", "no safetensors file"),
        ("empty", "got no checkpoint that can be imported"), ("none", "got no checkpoint that can be imported"),
    ):  # fmt: skip
        assert main(["import", str(tmp_path / name), str(tmp_path / "out")]) == 1
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_prune_removes_and_only_says_so_when_asked(saved, tmp_path, capsys):
    shutil.copytree(saved[0], tmp_path / "copy")
    words = ["prune", str(tmp_path / "copy"), "--keep-last", "1", "--keep-every", "2"]
    assert main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out == "would be removed: global_step1\n"
    assert main(words) == 0
    assert sorted(p.name for p in (tmp_path / "copy").iterdir()) == ["best", "global_step2", "global_step3", "latest"]
