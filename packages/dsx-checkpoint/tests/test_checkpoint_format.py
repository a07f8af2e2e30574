"""The checkpoint format alone: no process groups, ranks are threads, slices are cut by hand."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
import torch
from dsx_checkpoint import CheckpointCorruptError, CheckpointError, load, open_checkpoint, save
from dsx_checkpoint.format import TensorSpec, seal
from dsx_checkpoint.parsing import parse_index
from dsx_checkpoint.plan import plan_files
from dsx_checkpoint.ranks import Solo
from dsx_checkpoint.writing import plan_save
from dsx_testkit.thread_ranks import on_threads
from safetensors import safe_open
from torch import nn


@dataclass
class Part:
    name: str
    shape: tuple
    start: int
    stop: int
    param: torch.Tensor
    master: torch.Tensor | None
    states: dict
    aliases: tuple = ()
    trainable: bool = True
    ranges: tuple = ()


@dataclass
class Holder:
    """One rank's share of a model: the flat range [rank, rank + 1) / world of every tensor."""

    shapes: dict
    rank: int = 0
    world: int = 1
    dtype: torch.dtype = torch.float32
    seed: int | None = None
    frozen: tuple = ()
    values: dict = field(default_factory=dict)

    def __post_init__(self):
        for name, shape in self.shapes.items():
            numel = torch.Size(shape).numel()
            self.start, self.stop = {}, {}
            whole = {k: torch.zeros(numel) for k in ("master", "exp_avg", "exp_avg_sq")}
            if self.seed is not None:
                generator = torch.Generator().manual_seed(self.seed + sum(map(ord, name)))
                whole = {k: torch.randn(numel, generator=generator) for k in whole}
            self.values[name] = {k: v[slice(*self.range(numel))].clone() for k, v in whole.items()}

    def range(self, numel):
        return numel * self.rank // self.world, numel * (self.rank + 1) // self.world

    def slices(self):
        for name, shape in self.shapes.items():
            v, (start, stop) = self.values[name], self.range(torch.Size(shape).numel())
            full = self.dtype == torch.float32
            states = (
                {}
                if name in self.frozen
                else {"exp_avg": v["exp_avg"], "exp_avg_sq": v["exp_avg_sq"], "step": torch.tensor(7.0)}
            )
            param = v["master"] if full else v["master"].to(self.dtype)
            master = None if name in self.frozen else v["master"]
            yield Part(name, shape, start, stop, param, master, states, trainable=name not in self.frozen)

    def read_slices(self, reader):
        writes = []
        for part in self.slices():
            v = self.values[part.name]
            found = {"master": reader.master(part.name, part.start, part.stop)}
            for key in reader.state_keys(part.name):
                value = reader.state(key, part.name, part.start, part.stop)
                if isinstance(value, torch.Tensor):
                    found[key] = value
                else:
                    assert (key, value) == ("step", 7.0)
            writes += [(v[key], value) for key, value in found.items() if value is not None]
        return Writes(writes)


@dataclass
class Writes:
    """What was read, and where it goes."""

    pairs: list

    def install(self):
        for target, value in self.pairs:
            target.copy_(value)


SHAPES = {"a": (5, 3), "b": (), "c": (1,), "d": (0, 4), "e": (64, 33), "f": (7,)}


def save_at(world, folder, tag="t", **options):
    module = nn.BatchNorm1d(3)

    def action(rank, ranks):
        holder = Holder(SHAPES, rank, world, seed=1, **options)
        bare = nn.Module()
        bare.register_buffer("running", module.running_mean + 2)
        return save(folder, tag, module=bare, slices=holder.slices(), state={"steps": 3}, ranks=ranks)

    results = on_threads(world, action)
    assert all(isinstance(r, Path) for r in results), results
    return results[0]


def whole(holders, key, name):
    return torch.cat([h.values[name][key] for h in holders])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [1, 2, 3, 5])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_any_world_size_reads_what_any_other_wrote(tmp_path, before, after, dtype):
    save_at(before, tmp_path, dtype=dtype)

    def action(rank, ranks):
        holder, module = Holder(SHAPES, rank, after), nn.Module()
        module.register_buffer("running", torch.zeros(3))
        loaded = load(tmp_path, module=module, optimizer=holder, ranks=ranks)
        assert loaded.state == {"steps": 3} and torch.equal(module.running, torch.full((3,), 2.0))
        return holder

    holders = on_threads(after, action)
    assert all(isinstance(h, Holder) for h in holders), holders
    truth = Holder(SHAPES, seed=1)
    for name in SHAPES:
        for key in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(whole(holders, key, name), truth.values[name][key]), (name, key)


def test_weights_open_as_plain_safetensors_with_whole_tensors(tmp_path):
    folder = save_at(3, tmp_path)
    truth = Holder(SHAPES, seed=1)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {*SHAPES, "running"}
        for name, shape in SHAPES.items():
            assert torch.equal(file.get_tensor(name), truth.values[name]["master"].reshape(shape))
    with safe_open(folder / "optimizer.safetensors", "pt") as file:
        assert file.get_tensor("exp_avg/e").shape == (64, 33)


def test_large_models_are_split_into_files_with_an_index_others_read(tmp_path):
    holder = Holder(SHAPES, seed=1)
    folder = save(
        tmp_path, "t", module=nn.Module(), slices=holder.slices(), state={}, ranks=Solo(), max_file_bytes=4096
    )
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(weight_map) == set(SHAPES) and len(set(weight_map.values())) > 1
    for name, file in weight_map.items():
        with safe_open(folder / file, "pt") as opened:
            assert tuple(opened.get_tensor(name).shape) == SHAPES[name]
    other = Holder(SHAPES)
    load(tmp_path, module=nn.Module(), optimizer=other, ranks=Solo())
    assert torch.equal(other.values["e"]["master"], holder.values["e"]["master"])


def test_header_bytes_are_what_the_format_says():
    (plan,) = plan_files("m", [TensorSpec("h", "BF16", (2,)), TensorSpec("w", "F32", (2, 3))])
    text = b'{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
    text += b'"h":{"dtype":"BF16","shape":[2],"data_offsets":[24,28]}}'
    text += b" " * (-len(text) % 64)
    assert plan.header == len(text).to_bytes(8, "little") + text
    assert plan.size == len(plan.header) + 28
    assert {p.spec.name: p.offset - len(plan.header) for p in plan.tensors} == {"w": 0, "h": 24}


def test_every_flipped_byte_is_noticed_and_nothing_is_loaded(tmp_path):
    folder = save_at(2, tmp_path)
    untouched = Holder(SHAPES, seed=5)
    expected = untouched.values["e"]["master"].clone()
    module = nn.Module()
    module.register_buffer("running", torch.zeros(3))
    for file in ("model.safetensors", "optimizer.safetensors"):
        original = (folder / file).read_bytes()
        header = 8 + int.from_bytes(original[:8], "little")
        for position in range(header, len(original), 997):
            damaged = bytearray(original)
            damaged[position] ^= 0x10
            (folder / file).write_bytes(damaged)
            with pytest.raises(CheckpointError, match=r"are not\s+those that were saved"):
                load(tmp_path, module=module, optimizer=untouched, ranks=Solo())
                open_checkpoint(tmp_path).whole("running")
        (folder / file).write_bytes(original[:-5])
        with pytest.raises(CheckpointError, match="cut short"):
            load(tmp_path, module=module, optimizer=untouched, ranks=Solo())
            open_checkpoint(tmp_path).whole("running")
        (folder / file).write_bytes(original)
    assert torch.equal(untouched.values["e"]["master"], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=99), "upgrade dsx"),
        (lambda d: d.update(version=True), "upgrade dsx"),
        (lambda d: d.update(hash="sha256"), "hash 'sha256'"),
        (lambda d: d.update(format="zip"), "no 'dsx-checkpoint' index"),
        (lambda d: d.update(more=1), "unknown: .*more"),
        (lambda d: d["model"]["a"].update(more=1), "unknown: .*more"),
        (lambda d: d["model"]["a"].update(file="../../etc/passwd"), "leaves the checkpoint"),
        (lambda d: d["model"]["a"].update(file="optimizes.safetensors"), "outside of the file"),
        (lambda d: d["files"].update({"../x": d["files"]["model.safetensors"]}), "leaves the checkpoint"),
        (lambda d: d["files"].update({"dsx.json": d["files"]["model.safetensors"]}), "leaves the checkpoint"),
        (lambda d: d["files"]["model.safetensors"].pop("bytes"), "missing: .*bytes"),
        (lambda d: d["files"]["model.safetensors"].update(header_bytes=10**6), "outside of the file"),
        (lambda d: d["files"]["model.safetensors"].update(header_hash="1"), "hashes of 1 characters"),
        (lambda d: d["model"]["a"].update(dtype="F7"), "F7"),
        (lambda d: d["model"]["a"].update(offset=-1), "-1"),
        (lambda d: d["model"]["a"].update(offset=0), "outside of the file"),
        (lambda d: d["model"]["a"].update(offset=10**9), "outside of the file"),
        (lambda d: d["model"]["a"].update(shape=[10**9, 3]), "hashes of 8 characters"),
        (lambda d: d["model"]["a"].update(shape=[True, 3]), "True"),
        (lambda d: d["model"]["a"].update(shape=[2.0, 3]), "2.0"),
        (lambda d: d["model"]["e"].update(hashes=""), "hashes of 0 characters"),
        (lambda d: d["model"]["e"].update(hashes="00      "), "hashes of 8 characters"),
        (lambda d: d["model"]["e"].update(hashes="zzzzzzzz"), "damaged"),
        (lambda d: d.update(chunk_bytes=0), "chunk_bytes 0"),
        (lambda d: d.pop("model"), "damaged"),
        (lambda d: d["model"].pop("a"), "not there: .*a"),
        (lambda d: d["scalars"]["step"].update(a="seven"), "no number"),
        (lambda d: d["scalars"]["step"].update(stranger=7), "not there: .*stranger"),
        (lambda d: d["aliases"].update(a=[1]), "expected str"),
    ],
)
def test_a_hostile_index_is_refused_though_its_checksum_is_right(tmp_path, change, message):
    path = save_at(2, tmp_path) / "dsx.json"
    data = json.loads(path.read_text())
    data.pop("checksum")
    change(data)
    path.write_text(seal(data))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "", "null", "[" * 100_000, '{"format":"dsx-checkpoint","version":1' + "0" * 5000 + "}"]
)
def test_an_index_that_is_no_json_is_refused(tmp_path, text):
    path = save_at(1, tmp_path) / "dsx.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"dsx\.json: "):
        open_checkpoint(tmp_path)
    path.write_bytes(b"\xff" + path.read_bytes())
    with pytest.raises(CheckpointCorruptError, match="is no text"):
        open_checkpoint(tmp_path)


def test_a_key_that_stands_twice_is_refused(tmp_path):
    path = save_at(1, tmp_path) / "dsx.json"
    data = json.loads(path.read_text())
    data.pop("checksum")
    path.write_text(seal(data).replace('"excluded":', '"state":{},"excluded":', 1))
    with pytest.raises(CheckpointCorruptError, match="two values for 'state'"):
        open_checkpoint(tmp_path)


def test_names_and_shapes_that_do_not_fit_are_an_error_before_anything_changes(tmp_path):
    save_at(1, tmp_path)
    module = nn.Module()
    module.register_buffer("running", torch.zeros(3))
    for shapes, message in (
        ({**SHAPES, "new": (2,)}, r"missing in the checkpoint: \['new'\]"),
        ({k: v for k, v in SHAPES.items() if k != "f"}, r"not in the model: \['f'\]"),
        ({**SHAPES, "a": (3, 5)}, r"a: \(5, 3\) in the checkpoint, \(3, 5\) in the model"),
    ):
        holder = Holder(shapes, seed=5)
        expected = {n: v["master"].clone() for n, v in holder.values.items()}
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path, module=module, optimizer=holder, ranks=Solo())
        assert all(torch.equal(holder.values[n]["master"], v) for n, v in expected.items())
    lenient = Holder({**SHAPES, "new": (2,)}, seed=5)
    kept = lenient.values["new"]["master"].clone()
    loaded = load(tmp_path, module=module, optimizer=lenient, ranks=Solo(), strict=False)
    assert loaded.missing == ("new",) and torch.equal(lenient.values["new"]["master"], kept)
    assert torch.equal(lenient.values["e"]["master"], Holder(SHAPES, seed=1).values["e"]["master"])


def test_frozen_parameters_can_be_left_out_and_are_then_not_missed(tmp_path):
    holder = Holder(SHAPES, seed=1, frozen=("e",))
    save(tmp_path, "t", module=nn.Module(), slices=holder.slices(), state={}, ranks=Solo(), exclude_frozen=True)
    other = Holder(SHAPES, seed=9, frozen=("e",))
    kept = other.values["e"]["master"].clone()
    load(tmp_path, module=nn.Module(), optimizer=other, ranks=Solo())
    assert torch.equal(other.values["e"]["master"], kept)
    assert torch.equal(other.values["a"]["master"], holder.values["a"]["master"])


def test_tied_names_find_their_tensor(tmp_path):
    holder = Holder({"emb.weight": (3, 2)}, seed=1)
    (part,) = holder.slices()
    part.aliases = ("head.weight",)
    save(tmp_path, "t", module=nn.Module(), slices=[part], state={}, ranks=Solo())
    other = Holder({"head.weight": (3, 2)})
    load(tmp_path, module=nn.Module(), optimizer=other, ranks=Solo())
    assert torch.equal(other.values["head.weight"]["exp_avg"], holder.values["emb.weight"]["exp_avg"])


def test_client_state_comes_back_as_it_was_without_pickle(tmp_path):
    state = {
        "a": 1,
        "b": [1.5, None, True, "x"],
        "t": (1, (2,)),
        3: {"n": float("inf")},
        "w": {"deep": torch.arange(4)},
        "": {},
    }
    save(tmp_path, "t", module=nn.Module(), slices=[], state=state, ranks=Solo())
    loaded = load(tmp_path, module=nn.Module(), optimizer=Holder({}), ranks=Solo())
    assert torch.equal(loaded.state["w"].pop("deep"), state["w"].pop("deep"))
    assert loaded.state == state
    with pytest.raises(CheckpointError, match=r"state\.f: got a builtins\.set"):
        save(tmp_path, "u", module=nn.Module(), slices=[], state={"f": {1}}, ranks=Solo())
    assert not (tmp_path / "u").exists() and (tmp_path / "latest").read_text() == "t"


def test_a_rank_that_cannot_write_is_the_same_error_on_all_and_the_old_checkpoint_stays(tmp_path):
    save_at(2, tmp_path)

    def action(rank, ranks):
        parts = list(Holder(SHAPES, rank, 2, seed=2).slices())
        if rank == 1:
            parts[0].states["exp_avg"] = torch.zeros(3, 3)  # neither a number nor one element per element
        return save(tmp_path, "t", module=nn.Module(), slices=parts, state={}, ranks=ranks)

    first, second = on_threads(2, action)
    assert isinstance(first, CheckpointError) and str(first) == str(second)
    assert "rank 1 failed" in str(first) and "exp_avg" in str(first)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    reader = open_checkpoint(tmp_path)
    assert torch.equal(reader.whole("e").flatten(), Holder(SHAPES, seed=1).values["e"]["master"])


class Unreadable:
    """Values on a disk that cannot be read when they are to be written."""

    dtype = torch.float32

    def __init__(self, like):
        self.numel = like.numel

    def fetch(self):
        raise OSError(5, "Input/output error")

    parts = None


@pytest.mark.parametrize("at_fault", [0, 1])
def test_a_save_that_fails_while_it_writes_leaves_no_files(tmp_path, at_fault):
    save_at(2, tmp_path)
    before = sorted(str(path) for path in tmp_path.rglob("*"))

    def action(rank, ranks):
        parts = list(Holder(SHAPES, rank, 2, seed=2).slices())
        if rank == at_fault:
            parts[-1].states["exp_avg"] = Unreadable(parts[-1].states["exp_avg"])
        return save(tmp_path, "new", module=nn.Module(), slices=parts, state={}, ranks=ranks)

    for error in on_threads(2, action):
        assert isinstance(error, CheckpointError) and f"rank {at_fault} failed" in str(error)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_save_of_which_a_piece_was_lost_is_not_committed(tmp_path):
    def action(rank, ranks):
        parts = list(Holder(SHAPES, rank, 2, seed=2).slices())
        planned = plan_save(tmp_path, "t", module=nn.Module(), slices=parts, state={}, ranks=ranks)
        return planned.copied(planned.pieces[:-1] if rank == 1 else planned.pieces).run(ranks)

    for error in on_threads(2, action):
        assert isinstance(error, CheckpointError) and "not everything that was planned has been written" in str(error)
    assert list(tmp_path.rglob("model*")) == []


def test_saving_a_tag_again_replaces_it_and_leftovers_are_cleared(tmp_path):
    save_at(2, tmp_path)
    (tmp_path / ".tmp-t-deadbeef0000").mkdir()
    holder = Holder(SHAPES, seed=3)
    save(tmp_path, "t", module=nn.Module(), slices=holder.slices(), state={}, ranks=Solo())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "t"]
    assert torch.equal(open_checkpoint(tmp_path).whole("f"), holder.values["f"]["master"])


def test_missing_checkpoints_say_what_is_there(tmp_path):
    assert load(tmp_path, module=nn.Module(), optimizer=Holder({}), ranks=Solo()) is None
    save_at(1, tmp_path, tag="global_step5")
    with pytest.raises(CheckpointError, match=r"no checkpoint there; tags in .*: global_step5"):
        load(tmp_path, "global_step6", module=nn.Module(), optimizer=Holder({}), ranks=Solo())
    with pytest.raises(CheckpointError, match="pass load_dir="):
        open_checkpoint(tmp_path / "global_step5")
    for tag in ("", "a/b", "..", ".hidden"):
        with pytest.raises(CheckpointError, match="plain folder name"):
            save(tmp_path, tag, module=nn.Module(), slices=[], state={}, ranks=Solo())


def test_the_index_text_parses_back_to_itself(tmp_path):
    text = (save_at(2, tmp_path) / "dsx.json").read_text()
    assert parse_index(text, "here").to_json() == text


def test_tags_that_begin_alike_do_not_touch_each_other(tmp_path):
    """`best-ema` was being replaced when its process was killed: the only copy lies under its `.old-` name."""
    for tag, seed in (("best-ema", 1), ("best", 2)):
        holder = Holder(SHAPES, seed=seed)
        save(tmp_path, tag, module=nn.Module(), slices=holder.slices(), state={}, ranks=Solo())
    (tmp_path / "best-ema").rename(tmp_path / ".old-best-ema-0123456789ab")
    (tmp_path / ".tmp-best-ema-0123456789ab").mkdir()
    save(tmp_path, "best", module=nn.Module(), slices=Holder(SHAPES, seed=3).slices(), state={}, ranks=Solo())
    assert not (tmp_path / ".tmp-best-ema-0123456789ab").exists(), "nobody saves there: a killed save left it"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "best-ema", "latest"], (
        "the only copy gets its name back"
    )
    found = open_checkpoint(tmp_path, "best-ema").whole("e").flatten()
    assert torch.equal(found, Holder(SHAPES, seed=1).values["e"]["master"])
    (tmp_path / "best").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        open_checkpoint(tmp_path, "best")


def test_a_tag_may_hold_what_shells_treat_as_patterns(tmp_path):
    tag = "run[1]*"
    save_at(1, tmp_path, tag=tag)
    (tmp_path / tag).rename(tmp_path / f".old-{tag}-0123456789ab")
    assert open_checkpoint(tmp_path, tag).has("e")
    save_at(1, tmp_path, tag=tag)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", tag]


def test_any_error_of_one_rank_reaches_the_others(tmp_path):
    def action(rank, ranks):
        parts = list(Holder(SHAPES, rank, 2, seed=2).slices())
        if rank == 1:
            del parts[0].states  # an AttributeError deep in the listing
        return save(tmp_path, "t", module=nn.Module(), slices=parts, state={}, ranks=ranks)

    first, second = on_threads(2, action)
    assert (
        isinstance(first, CheckpointError)
        and str(first) == str(second)
        and "rank 1 failed: AttributeError" in str(first)
    )


def test_states_are_found_by_parameter_whatever_its_name(tmp_path):
    shapes = {"a": (2,), "b/a": (2,), "x.a": (2,)}
    save(tmp_path, "t", module=nn.Module(), slices=Holder(shapes, seed=1).slices(), state={}, ranks=Solo())
    reader = open_checkpoint(tmp_path)
    for name in shapes:
        assert sorted(reader.state_keys(name)) == ["exp_avg", "exp_avg_sq", "step"], name
        found = reader.state("exp_avg", name, 0, 2)
        assert torch.equal(found, Holder(shapes, seed=1).values[name]["exp_avg"])
    assert reader.state_keys("nothing") == ()
    assert open_checkpoint(tmp_path, optimizer_states=False).state_keys("a") == ()


def test_an_index_is_read_without_torch(tmp_path):
    """Tools look at the index of a large checkpoint quickly."""
    path = save_at(2, tmp_path) / "dsx.json"
    code = f"""
import sys
from pathlib import Path
from dsx_checkpoint.parsing import parse_index
index = parse_index(Path({str(path)!r}).read_text(), "here")
assert index.tensors["model"]["e"].spec.shape == (64, 33) and len(index.tensors["optimizer"]["exp_avg/e"].chunks) == 1
assert not {{"torch", "numpy", "pydantic"}} & set(sys.modules), sorted(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_modules_are_modules():
    import dsx_checkpoint.reading
    import dsx_checkpoint.writing

    assert isinstance(dsx_checkpoint.reading, ModuleType) and isinstance(dsx_checkpoint.writing, ModuleType)
    assert set(dsx_checkpoint.__all__) >= {"save", "load", "open_checkpoint"}
    assert all(hasattr(dsx_checkpoint, name) for name in dsx_checkpoint.__all__)
    with pytest.raises(AttributeError, match="no attribute 'sav'"):
        _ = dsx_checkpoint.sav
