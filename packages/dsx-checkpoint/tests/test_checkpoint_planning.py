"""How ranks get their parts of a save: one plan on rank 0, kept between saves; files of a job on many hosts."""

import threading
from dataclasses import dataclass, field

import pytest
import torch
from dsx_checkpoint import (
    CheckpointCorruptError,
    CheckpointError,
    Keeping,
    agreeing,
    keeping,
    load,
    open_checkpoint,
    planning,
    ranks,
    save,
)
from dsx_checkpoint import writing as writing_module
from dsx_checkpoint.ranks import Solo
from dsx_checkpoint.verifying import verify_all
from dsx_testkit import run_ranks
from dsx_testkit.thread_ranks import on_threads
from torch import nn

SHAPES = {f"layers.{i}.{n}": s for i in range(6) for n, s in (("q", (8, 6)), ("gate", (16, 6)), ("norm", (6,)))}


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
class Shards:
    """What one rank of several holds: each layer is cut into equal ranges, as ZeRO cuts it."""

    rank: int
    world: int
    shift: float = 0.0
    read: dict = field(default_factory=dict)

    def slices(self):
        for layer in range(6):
            names = [name for name in SHAPES if name.startswith(f"layers.{layer}.")]
            total = sum(torch.Size(SHAPES[name]).numel() for name in names)
            share, at = -(-total // self.world), 0
            for name in names:
                size = torch.Size(SHAPES[name]).numel()
                start = min(max(self.rank * share - at, 0), size)
                stop = min(max((self.rank + 1) * share - at, 0), size)
                values = whole(name, self.shift)[start:stop]
                states = {"exp_avg": values * 2, "step": 3.0} if start < stop else {}
                yield Part(name, SHAPES[name], start, stop, values.bfloat16(), values, states)
                at += size

    def read_slices(self, reader):
        for part in self.slices():
            if part.start < part.stop:
                self.read[part.name, part.start] = (
                    reader.master(part.name, part.start, part.stop),
                    reader.state("exp_avg", part.name, part.start, part.stop),
                )
        return self

    def install(self):
        pass


def whole(name, shift=0.0):
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(torch.Size(SHAPES[name]).numel(), generator=generator) + shift


def save_on(world, folder, tag="t", shift=0.0, **options):
    def action(rank, among):
        state = {"random": torch.full((5,), rank)}
        parts = Shards(rank, world, shift).slices()
        return save(folder, tag, module=nn.Module(), slices=parts, state={}, rank_state=state, ranks=among, **options)

    results = on_threads(world, action)
    assert not [result for result in results if isinstance(result, Exception)], results
    return results[0]


def check_values(folder, tag="t", shift=0.0):
    reader = open_checkpoint(folder, tag)
    for name in SHAPES:
        expected = whole(name, shift)
        assert torch.equal(reader.stored("optimizer", f"master/{name}").flatten(), expected)
        assert torch.equal(reader.stored("optimizer", f"exp_avg/{name}").flatten(), expected * 2)
        assert torch.equal(reader.stored("model", name).flatten(), expected.bfloat16())
    assert reader.index.scalars == {"step": dict.fromkeys(SHAPES, 3.0)}
    return reader


@pytest.fixture
def made(monkeypatch):
    """The plans that are made."""
    found, make = [], planning.WritePlan.make

    def noted(*given, **options):
        found.append(make(*given, **options))
        return found[-1]

    monkeypatch.setattr(planning.WritePlan, "make", noted)
    monkeypatch.setattr(agreeing, "_PLANS", agreeing._Kept(2))
    monkeypatch.setattr(agreeing, "_PARTS", agreeing._Kept(100))
    return found


def test_the_second_save_of_a_layout_plans_nothing(tmp_path, made):
    save_on(3, tmp_path, "a")
    save_on(3, tmp_path, "b", shift=1.0)
    assert len(made) == 1
    check_values(tmp_path, "a")
    check_values(tmp_path, "b", shift=1.0)
    save_on(2, tmp_path, "c")  # another layout
    assert len(made) == 2
    check_values(tmp_path, "c")


def test_a_rank_that_has_lost_its_part_gets_it_again(tmp_path, made, monkeypatch):
    save_on(3, tmp_path, "a")
    monkeypatch.setattr(agreeing, "_PARTS", agreeing._Kept(100))
    save_on(3, tmp_path, "b", shift=1.0)
    assert len(made) == 1
    check_values(tmp_path, "b", shift=1.0)


def test_numbers_that_differ_are_found_in_a_save_with_a_kept_plan_too(tmp_path, made):
    def action(rank, among):
        parts = list(Shards(rank, 2).slices())
        for part in parts:
            if part.name == "layers.0.gate" and "step" in part.states:
                part.states["step"] = 3.0 + rank * with_rank
        return save(tmp_path, f"t{with_rank}", module=nn.Module(), slices=parts, state={}, ranks=among)

    with_rank = 0
    on_threads(2, action)
    with_rank = 1
    first, second = on_threads(2, action)
    assert len(made) == 1 and isinstance(first, CheckpointError) and str(first) == str(second)
    assert "is 4.0 on rank 1 and 3.0 on rank 0" in str(first)


def test_ranks_of_many_hosts_open_few_files(tmp_path, made, monkeypatch):
    real = on_threads
    save_on(8, tmp_path / "one", max_file_bytes=256)
    plain = {path.name for path in (tmp_path / "one" / "t").iterdir()}
    hosts = threading.local()
    monkeypatch.setattr(agreeing, "host_label", lambda: f"host{hosts.rank // 2}")
    opened, flushed = [0] * 8, [0] * 8
    writing, fsync = writing_module.writing, writing_module.os.fsync

    def counted(path, **options):
        opened[hosts.rank] += 1
        return writing(path, **options)

    def counted_fsync(fd):
        flushed[hosts.rank] += 1
        return fsync(fd)

    def on_hosts(world, action):
        def named(rank, among):
            hosts.rank = rank
            return action(rank, among)

        return real(world, named)

    monkeypatch.setattr(writing_module, "writing", counted)
    monkeypatch.setattr("dsx_checkpoint.direct.os.fsync", counted_fsync)
    monkeypatch.setitem(globals(), "on_threads", on_hosts)
    save_on(8, tmp_path / "many", max_file_bytes=256)
    few = {path.name for path in (tmp_path / "many" / "t").iterdir()}
    assert made[0].striped is False and made[1].striped is True and len(few) < len(plain)
    assert max(opened) <= 4 and sum(flushed[1:]) <= 4 * 4 * 2, (opened, flushed)
    reader = check_values(tmp_path / "many")
    verify_all(reader.folder, reader.index)
    assert [reader.client(f"rank{rank}.random")[0].item() for rank in range(8)] == list(range(8))
    hashes = [
        {n: e.chunks.crcs for family in ("model", "optimizer") for n, e in found.index.tensors[family].items()}
        for found in (reader, open_checkpoint(tmp_path / "one"))
    ]
    assert hashes[0] == hashes[1], "the index does not depend on the files"
    shards = Shards(0, 1)
    assert load(tmp_path / "many", module=nn.Module(), optimizer=shards, ranks=Solo()) is not None
    assert torch.equal(shards.read["layers.3.q", 0][0], whole("layers.3.q"))


def test_the_first_tensors_of_striped_files_begin_at_whole_mebibytes():
    from dsx_checkpoint.format import TensorSpec
    from dsx_checkpoint.plan import numbered_files

    specs = [TensorSpec("a", "F32", (3,)), TensorSpec("b", "F32", (1 << 18,)), TensorSpec("c", "F32", (1 << 19,))]
    (file,) = numbered_files("model", [specs], align=1 << 20)
    assert [(p.spec.name, p.offset) for p in file.tensors] == [("b", 1 << 20), ("c", 2 << 20), ("a", 4 << 20)]
    assert len(file.header) == 1 << 20 and int.from_bytes(file.header[:8], "little") == (1 << 20) - 8


def test_a_full_disk_shows_before_anything_is_written(tmp_path):
    from dsx_checkpoint.files import check_space

    check_space(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"has .* GB left, and the checkpoint needs 1,000,000,000\.0 GB"):
        check_space(tmp_path, 10**18)


def through_a_tree(rank, world):
    among = ranks.default_ranks()
    everyone = among.collect({"rank": rank, "long": "x" * 1000})
    assert everyone == ([{"rank": r, "long": "x" * 1000} for r in range(world)] if rank == 0 else [])
    assert among.deal([f"for {r}" for r in range(world)] if rank == 0 else None) == f"for {rank}"
    answer = among.through_first("adding", lambda: rank, lambda values: [sum(values) - value for value in values])
    assert answer == sum(range(world)) - rank
    with pytest.raises(CheckpointError, match=r"^adding: rank 2 failed: ZeroDivisionError"):
        among.through_first("adding", lambda: 1 // (rank - 2), lambda values: values)
    with pytest.raises(CheckpointError, match=r"^sharing: rank 0 failed: KeyError"):
        among.through_first("adding", lambda: rank, lambda values: {}["all"], answering="sharing")
    assert among.first_for_all("choosing", lambda: "this") == "this"
    twice = among.joined_first("joining", lambda: [rank], lambda a, b: a + b, lambda values: [2 * v for v in values])
    assert twice == 2 * rank
    with pytest.raises(CheckpointError, match=r"^joining: rank 1 failed: ZeroDivisionError"):
        among.joined_first("joining", lambda: 1 // (rank % 3 - 1), lambda a, b: a + b, lambda value: [value] * world)
    with pytest.raises(CheckpointError, match=r"^putting: rank 0 failed: KeyError"):
        among.joined_first("joining", lambda: rank, lambda a, b: a + b, lambda value: {}["all"], answering="putting")


def test_messages_to_and_from_rank_0_go_through_a_tree():
    run_ranks(through_a_tree, 4)


def kept_by_many(rank, world):
    from dsx_comm import on_demand

    on_demand.MANY_RANKS = 2
    among = ranks.default_ranks()
    among.gather = None  # no rank may hear from all
    assert among.keep("counting", lambda: rank) == rank
    with pytest.raises(CheckpointError, match=r"^dividing: rank 1 failed: ZeroDivisionError") as caught:
        among.keep("dividing", lambda: 1 // (rank % 2 - 1))
    assert isinstance(caught.value.__cause__, ZeroDivisionError) == (rank % 2 == 1)
    with pytest.raises(CheckpointCorruptError, match="rank 3 failed: torn"):
        among.keep("reading", lambda: torn() if rank == 3 else None)


def torn():
    raise CheckpointCorruptError("torn")


def test_of_many_ranks_none_hears_from_all_whether_it_failed():
    run_ranks(kept_by_many, 4)


def test_files_of_removed_checkpoints_go_behind_the_save(tmp_path, monkeypatch):
    go_on, remove = threading.Event(), keeping._remove

    def slowly(folders):
        assert go_on.wait(30)
        remove(folders)

    save_on(1, tmp_path, "a", keeping=Keeping(1))
    monkeypatch.setattr(keeping, "_remove", slowly)
    save_on(1, tmp_path, "b", keeping=Keeping(1))
    left = [path for path in tmp_path.iterdir() if path.name.startswith(".tmp-a-")]
    assert not (tmp_path / "a").exists() and len(left) == 1 and (left[0] / "dsx.json").exists()
    waiting = threading.Thread(target=save_on, args=(1, tmp_path, "c"), kwargs={"keeping": Keeping(1)})
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive() and not (tmp_path / "c").exists(), "the next save waits"
    go_on.set()
    waiting.join(30)
    Keeping.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "latest"]
