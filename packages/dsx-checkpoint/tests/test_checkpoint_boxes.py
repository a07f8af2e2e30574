"""Coordinates: boxes and ranges of tensors, hashes of chunks from parts, and ranks that hold parts of a model in any
way.

Oracles: numpy-like indexing of whole tensors, and zlib's CRC-32 over whole chunks.
"""

import itertools
import json
import os
import random
import re
import threading
import zlib
from dataclasses import dataclass, field, replace

import pytest
import torch
from dsx_checkpoint import Box, CheckpointCorruptError, CheckpointError, Place, Region, load, open_checkpoint, save
from dsx_checkpoint.boxes import why_not_a_tiling
from dsx_checkpoint.crc import Chunks, Sums, crc_of, extend, extend_by_zeros, register_of
from dsx_checkpoint.ranks import Solo
from dsx_checkpoint.verifying import verify_all
from dsx_testkit.thread_ranks import on_threads
from torch import nn

# - Arithmetic


def some_boxes(chosen, count):
    """Random shapes of up to four dimensions, and boxes in them, empty ones included."""
    for _ in range(count):
        shape = tuple(chosen.randrange(1, 6) for _ in range(chosen.randrange(5)))
        offset = tuple(chosen.randrange(extent) for extent in shape)
        size = tuple(chosen.choice([e - o, chosen.randrange(e - o + 1)]) for e, o in zip(shape, offset))
        yield shape, Box(offset, size)


def test_runs_are_the_elements_that_indexing_gives():
    chosen = random.Random(1)
    for shape, box in some_boxes(chosen, 400):
        numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
        index = tuple(slice(o, o + s) for o, s in zip(box.offset, box.size))
        inside = numbers[index].reshape(-1)
        start = chosen.randrange(box.numel + 1)
        region = Region(box, start, chosen.randrange(start, box.numel + 1))
        runs = list(region.runs(shape))
        got = [(run.at + i, run.first + i) for run in runs for i in range(run.numel)]
        assert [at for at, _ in got] == inside[region.start : region.stop].tolist(), (shape, region)
        assert [first for _, first in got] == list(range(region.numel))
        for one, other in itertools.pairwise(runs):
            assert one.at + one.numel < other.at, "runs that touch are one run"


def test_a_whole_tensor_is_one_run():
    for shape in ((), (1,), (4, 5, 6)):
        assert list(Region.whole(shape).runs(shape)) == [(0, 0, torch.Size(shape).numel())]
    assert list(Region.whole((0, 3)).runs((0, 3))) == []


def cut_up(chosen, shape):
    """Boxes and ranges that tile a tensor, cut at random."""
    cuts = [sorted({0, extent, *(chosen.randrange(extent + 1) for _ in range(2))}) for extent in shape]
    for corner in itertools.product(*(list(itertools.pairwise(c)) for c in cuts)):
        box = Box(tuple(a for a, _ in corner), tuple(b - a for a, b in corner))
        edges = sorted({0, box.numel, chosen.randrange(box.numel + 1)})
        yield from (Region(box, a, b) for a, b in itertools.pairwise(edges))


def test_tilings_are_told_from_what_is_none():
    chosen = random.Random(2)
    for _ in range(150):
        shape = tuple(chosen.randrange(1, 7) for _ in range(chosen.randrange(1, 4)))
        regions = list(cut_up(chosen, shape))
        assert why_not_a_tiling(shape, regions) == "", (shape, regions)
        lost = chosen.randrange(len(regions))
        assert why_not_a_tiling(shape, regions[:lost] + regions[lost + 1 :]), "a region is missing"
        if len(regions) > 1:
            assert "overlap" in why_not_a_tiling(shape, [*regions, Region.whole(shape)]), "one covers all others"
    assert why_not_a_tiling((), [Region.whole(())]) == "" and "nobody holds" in why_not_a_tiling((), [])
    assert why_not_a_tiling((0, 2), []) == ""
    assert "does not lie" in why_not_a_tiling((2,), [Region(Box((1,), (2,)), 0, 2)])
    assert "does not lie" in why_not_a_tiling((2,), [Region(Box((0,), (2,)), 0, 3)])


def test_registers_are_those_of_zlib():
    chosen = random.Random(3)
    for _ in range(100):
        data, zeros = chosen.randbytes(chosen.randrange(300)), chosen.randrange(100)
        assert register_of(zlib.crc32(data), len(data)) == extend(0, data)
        assert crc_of(extend(0, data), len(data)) == zlib.crc32(data)
        assert extend_by_zeros(extend(0, data), zeros) == extend(0, data + bytes(zeros))
    assert crc_of(0, 5 << 20) == zlib.crc32(bytes(5 << 20))


def test_parts_of_a_chunk_give_the_hash_of_the_whole():
    chosen = random.Random(4)
    for _ in range(60):
        shape = tuple(chosen.randrange(1, 9) for _ in range(chosen.randrange(1, 4)))
        nbytes = torch.Size(shape).numel()
        data, chunk = chosen.randbytes(nbytes), chosen.randrange(1, nbytes + 5)
        chunks, total, covered = Chunks.grid(nbytes, chunk, ()), {}, []
        for region in cut_up(chosen, shape):
            sums = Sums(chunks)
            for run in region.runs(shape):
                sums.add(run.at, memoryview(data)[run.at : run.at + run.numel])
            covered.extend(sums.complete())
            for number, register in sums.registers().items():
                total[number] = total.get(number, 0) ^ register
        expected = {i: zlib.crc32(data[slice(*chunks.span(i))]) for i in range(len(chunks))}
        assert {i: crc_of(r, chunks.span(i)[1] - chunks.span(i)[0]) for i, r in total.items()} == expected
        assert len(covered) == len(set(covered))


# - Ranks


def whole_model(seed=1):
    """Name -> whole tensor, and its optimizer state."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gain": (), "emb": (12, 5), "row": (6, 8), "col": (8, 6), "norm": (6,)}
    return {name: torch.randn(2, *shape, generator=generator) for name, shape in shapes.items()}


@dataclass
class Part:
    name: str
    shape: tuple
    start: int
    stop: int
    param: torch.Tensor
    states: dict
    master: None = None
    aliases: tuple = ()
    trainable: bool = True
    ranges: tuple = ()


@dataclass
class Share:
    """One rank's part of a model: boxes of tensors under names of its own, of which it holds flat ranges."""

    places: dict  # name here -> Place
    values: dict = field(default_factory=dict)  # name here -> (first element, stop, param, state)
    shapes: dict = field(default_factory=dict)  # name here -> shape here
    step: float = 3.0

    @staticmethod
    def of(model, boxes, *, index=0, count=1, prefix=""):
        """`boxes`: name -> Box (None: the whole tensor); range `index` of `count` of each."""
        share = Share({})
        for name, box in boxes.items():
            param, state = model[name]
            box = Box.whole(param.shape) if box is None else box
            share.places[prefix + name] = Place(name, tuple(param.shape), box)
            share.shapes[prefix + name] = box.size
            cut = tuple(slice(o, o + s) for o, s in zip(box.offset, box.size))
            start, stop = box.numel * index // count, box.numel * (index + 1) // count
            flat = [values[cut].reshape(-1)[start:stop].clone() for values in (param, state)]
            share.values[prefix + name] = (start, stop, *flat)
        return share

    def empty(self):
        """The same part, with nothing in it yet."""
        zeros = {n: (a, b, torch.zeros_like(p), torch.zeros_like(s)) for n, (a, b, p, s) in self.values.items()}
        return Share(self.places, zeros, self.shapes)

    def slices(self):
        for name, (start, stop, param, state) in self.values.items():
            states = {"exp_avg": state, "step": self.step} if stop > start else {}
            yield Part(name, self.shapes[name], start, stop, param, states)

    def read_slices(self, reader):
        self.found = []
        for name, (start, stop, param, state) in self.values.items():
            if stop > start:
                assert set(reader.state_keys(name)) == {"exp_avg", "step"} and reader.state("step", name, 0, 0) == 3.0
                self.found.append((param, reader.master(name, start, stop)))
                self.found.append((state, reader.state("exp_avg", name, start, stop)))
        return self

    def install(self):
        for target, value in self.found:
            target.copy_(value)

    def equals(self, other):
        return all(torch.equal(a, b) for n in self.values for a, b in zip(self.values[n][2:], other.values[n][2:]))


def columns(first, count):
    return Box((0, first), (8, count))


def rows(first, count, width=8):
    return Box((first, 0), (count, width))


def layouts(model):
    """Ways in which ranks hold one model: data parallel, tensor parallel, pipeline, and mixtures."""
    everything = dict.fromkeys(model)
    tensor = [
        {"gain": None, "emb": rows(0, 7, 5), "row": rows(0, 3), "col": columns(0, 2), "norm": None},
        {"gain": None, "emb": rows(7, 5, 5), "row": rows(3, 3), "col": columns(2, 4), "norm": None},
    ]
    stages = [{"emb": None, "row": None}, {"col": None, "norm": None, "gain": None}]
    return {
        "one rank": [Share.of(model, everything)],
        "three ranks, data": [Share.of(model, everything, index=i, count=3) for i in range(3)],
        "two ranks, tensor": [Share.of(model, boxes) for boxes in tensor],
        "four ranks, tensor and data": [Share.of(model, boxes, index=i, count=2) for boxes in tensor for i in range(2)],
        "two ranks, pipeline": [Share.of(model, s, prefix=f"stage{i}.") for i, s in enumerate(stages)],
        "five ranks, pipeline and data": [
            Share.of(model, s, index=i, count=n, prefix="mine.") for s, n in zip(stages, (2, 3)) for i in range(n)
        ],
        "two ranks, both with everything": [Share.of(model, everything) for _ in range(2)],
    }


LAYOUTS = list(layouts(whole_model()))


def save_layout(folder, shares, module=None, **options):
    def action(rank, ranks):
        share = shares[rank]
        return save(
            folder, "t", module=(module or (lambda _: nn.Module()))(rank), slices=share.slices(), state={"n": 1},
            ranks=ranks, places=share.places, **options,
        )  # fmt: skip

    results = on_threads(len(shares), action)
    return next((r for r in results if isinstance(r, Exception)), results[0])


def load_layout(folder, shares, **options):
    def action(rank, ranks):
        share = shares[rank]
        return load(folder, module=nn.Module(), optimizer=share, ranks=ranks, places=share.places, **options)

    results = on_threads(len(shares), action)
    return next((r for r in results if isinstance(r, Exception)), results)


@pytest.mark.parametrize("chunk_bytes", [16, 100, 1 << 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_files_are_the_same_whoever_wrote_them(tmp_path, layout, chunk_bytes):
    save_layout(tmp_path / "one", layouts(whole_model())["one rank"], chunk_bytes=chunk_bytes)
    folder = save_layout(tmp_path / "other", layouts(whole_model())[layout], chunk_bytes=chunk_bytes)
    names = sorted(os.listdir(tmp_path / "one" / "t"))
    if "pipeline" not in layout:  # stages come in the order of ranks, not in that of the model
        assert sorted(os.listdir(folder)) == names
        for name in names:
            assert (folder / name).read_bytes() == (tmp_path / "one" / "t" / name).read_bytes(), name
    reader = open_checkpoint(tmp_path / "other")
    verify_all(reader.folder, reader.index)
    for name, (param, _) in whole_model().items():
        assert torch.equal(reader.whole(name), param)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_any_layout_reads_what_any_other_wrote(tmp_path, before, after):
    save_layout(tmp_path, layouts(whole_model())[before], chunk_bytes=50)
    expected = layouts(whole_model())[after]
    got = [share.empty() for share in expected]
    loaded = load_layout(tmp_path, got)
    assert not isinstance(loaded, Exception), loaded
    assert all(one.equals(other) for one, other in zip(got, expected))


class Counted:
    """Counts the bytes that `os.preadv` reads."""

    def __enter__(self):
        self.original, self.count = os.preadv, 0

        def preadv(*args):
            got = self.original(*args)
            self.count += got
            return got

        os.preadv = preadv
        return self

    def __exit__(self, *_):
        os.preadv = self.original


@pytest.mark.parametrize("chunk_bytes", [64, 4 << 20])
@pytest.mark.parametrize("after", LAYOUTS)
def test_every_byte_is_read_once(tmp_path, after, chunk_bytes):
    save_layout(tmp_path, layouts(whole_model())["three ranks, data"], chunk_bytes=chunk_bytes)
    shares = [share.empty() for share in layouts(whole_model())[after]]
    held = sum(4 * (len(p) + len(s)) for share in shares for _, _, p, s in share.values.values())
    with Counted() as counted:
        loaded = load_layout(tmp_path, shares)
    assert not isinstance(loaded, Exception), loaded
    assert counted.count == held


def test_parts_that_do_not_make_up_a_tensor_are_verified_all_the_same(tmp_path):
    """Two ranks ask for ranges that overlap, and nobody asks for the rest."""
    model = whole_model()
    save_layout(tmp_path, layouts(model)["one rank"], chunk_bytes=40)
    index = json.loads((tmp_path / "t" / "dsx.json").read_text())

    def shares():
        found = [Share.of(model, dict.fromkeys(model), index=i, count=3) for i in (0, 1)]
        for share in found:
            start, stop, *_ = share.values["emb"]
            stop += 6 if start == 0 else 0
            share.values["emb"] = (start, stop, *(v.reshape(-1)[start:stop].clone() for v in model["emb"]))
        return found

    got = [share.empty() for share in shares()]
    assert not isinstance(load_layout(tmp_path, got), Exception)
    assert all(one.equals(other) for one, other in zip(got, shares()))
    path = tmp_path / "t" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[index["model"]["emb"]["offset"] + 30 * 4] ^= 1  # in a chunk that both ranks need a part of
    path.write_bytes(data)
    got = [share.empty() for share in shares()]
    error = load_layout(tmp_path, got)
    assert isinstance(error, CheckpointCorruptError) and "'emb'" in str(error)
    assert all(share.equals(share.empty()) for share in got)


@pytest.mark.parametrize("after", LAYOUTS)
def test_a_flipped_byte_is_found_wherever_it_lies_and_however_it_is_read(tmp_path, after):
    chosen = random.Random(after)
    save_layout(tmp_path, layouts(whole_model())["two ranks, tensor"], chunk_bytes=32)
    for name in ("model.safetensors", "optimizer.safetensors"):
        path = tmp_path / "t" / name
        original = path.read_bytes()
        header = 8 + int.from_bytes(original[:8], "little")
        for _ in range(12):
            data = bytearray(original)
            data[chosen.randrange(header, len(data))] ^= 1 << chosen.randrange(8)
            path.write_bytes(data)
            shares = [share.empty() for share in layouts(whole_model())[after]]
            error = load_layout(tmp_path, shares)
            assert isinstance(error, CheckpointCorruptError) and "not those that were saved" in str(error)
            assert all(share.equals(share.empty()) for share in shares)
        path.write_bytes(original)


def test_a_read_error_that_gives_other_bytes_is_found(tmp_path):
    """The disk is right and a read is wrong, on one rank only."""
    save_layout(tmp_path, layouts(whole_model())["one rank"], chunk_bytes=1 << 20)
    shares = [share.empty() for share in layouts(whole_model())["three ranks, data"]]
    original, calls = os.preadv, itertools.count()

    def preadv(fd, buffers, offset):
        got = original(fd, buffers, offset)
        if next(calls) == 7:
            buffers[0][0] ^= 1
        return got

    os.preadv = preadv
    try:
        error = load_layout(tmp_path, shares)
    finally:
        os.preadv = original
    assert isinstance(error, CheckpointCorruptError)
    assert all(share.equals(share.empty()) for share in shares)


def test_a_wrong_read_of_one_of_two_ranks_that_hold_the_same_is_found(tmp_path):
    """Copies of a shard: ranks 0 and 1 hold the first half of every tensor, and rank 1 alone reads it wrongly."""
    model = whole_model()
    save_layout(tmp_path, layouts(model)["one rank"], chunk_bytes=1 << 20)
    names = {name: None for name, values in model.items() if values[0].numel() > 1}
    for wrong in (None, 0, 1, 2):
        shares = [Share.of(model, names, index=place, count=2).empty() for place in (0, 0, 1)]
        original, reading = os.preadv, threading.local()

        def preadv(fd, buffers, offset, wrong=wrong, original=original, reading=reading):
            got = original(fd, buffers, offset)
            if reading.rank == wrong:
                buffers[0][0] ^= 1
            return got

        def action(rank, ranks, shares=shares, reading=reading):
            reading.rank = rank
            share = shares[rank]
            module, places = nn.Module(), share.places
            return load(tmp_path, module=module, optimizer=share, ranks=ranks, places=places, strict=False)

        os.preadv = preadv
        try:
            results = on_threads(3, action)
        finally:
            os.preadv = original
        if wrong is None:
            assert not any(isinstance(result, Exception) for result in results), results
        else:
            assert all(isinstance(result, CheckpointCorruptError) for result in results), (wrong, results)
            assert all(share.equals(share.empty()) for share in shares)


# - What ranks say about one model


def test_replicas_that_differ_are_an_error_that_names_the_ranks(tmp_path):
    shares = layouts(whole_model())["two ranks, tensor"]
    shares[1].values["norm"][2].add_(1)
    error = save_layout(tmp_path, shares)
    assert isinstance(error, CheckpointError) and "'norm' has other values on rank 1 than on rank 0" in str(error)
    assert not list(tmp_path.iterdir())


def test_tensor_parallel_ranks_without_places_are_refused(tmp_path):
    """Each rank's part looks like a whole tensor of the same name and shape: only the values tell."""
    model = {"row": whole_model()["row"]}
    halves = [Share.of(model, {"row": rows(first, 3)}) for first in (0, 3)]
    for share in halves:
        share.places = {}
    error = save_layout(tmp_path, halves)
    assert isinstance(error, CheckpointError) and "with `places`" in str(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[1].values.pop("emb"), "'emb'.*a hole|'emb'.*nobody holds"),
        (lambda s: s[1].places.update(row=Place("row", (6, 8), rows(2, 3))), "'row'.*an overlap"),
        (
            lambda s: s[1].places.update(row=Place("row", (7, 8), rows(3, 3))),
            r"'row' is F32 of shape \(7, 8\) on rank 1",
        ),
        (lambda s: s[1].places.update(row=Place("row", (6, 8), rows(3, 2))), r"places\['row'\]"),
        (lambda s: s[1].places.update(row=Place("row", (6, 8), rows(4, 3))), r"places\['row'\]"),
        (lambda s: s[1].places.update(row=Place("col", (8, 6), Box((0, 0), (3, 8)))), r"places\['row'\]"),
        (lambda s: setattr(s[1], "step", 4.0), "'step' of 'gain' is 4.0 on rank 1 and 3.0 on rank 0"),
        (lambda s: s[1].places.update(gain=s[1].places["norm"]), r"places\['gain'\]"),
    ],
)
def test_contradictions_between_ranks_are_named(tmp_path, change, message):
    shares = layouts(whole_model())["two ranks, tensor"]
    change(shares)
    error = save_layout(tmp_path, shares)
    assert isinstance(error, CheckpointError), error
    assert re.search(message, str(error)), str(error)
    assert not list(tmp_path.iterdir())


def test_a_tensor_listed_twice_is_refused(tmp_path):
    share = Share.of(whole_model(), {"norm": None})
    for facts in (share.values, share.places, share.shapes):
        facts["again"] = facts["norm"]
    error = save_layout(tmp_path, [share])
    assert isinstance(error, CheckpointError) and "'norm' is listed twice" in str(error)


def test_buffers_aliases_and_exclusions_come_from_all_ranks(tmp_path):
    """Two pipeline stages: each has buffers, ties and frozen parameters that the other does not know."""
    shares = layouts(whole_model())["two ranks, pipeline"]

    def module(rank):
        module = nn.Module()
        module.register_buffer(f"only_{rank}", torch.full((2,), float(rank)))
        module.register_buffer("statistics", torch.full((3,), 10.0 + rank))
        return module

    def slices(share, rank):
        for part in share.slices():
            part.aliases = (f"tied_{rank}",) if part.name.endswith(("emb", "col")) else ()
            part.trainable = not part.name.endswith(("row", "norm"))
            yield part

    def action(rank, ranks):
        share = shares[rank]
        return save(
            tmp_path, "t", module=module(rank), slices=slices(share, rank), state={}, ranks=ranks, places=share.places,
            exclude_frozen=True,
        )  # fmt: skip

    assert all(not isinstance(r, Exception) for r in on_threads(2, action))
    reader = open_checkpoint(tmp_path)
    for rank in range(2):
        assert torch.equal(reader.whole(f"only_{rank}"), torch.full((2,), float(rank)))
    assert reader.whole("statistics").tolist() == [10.0] * 3, "each rank has its own: the lowest rank's is kept"
    assert torch.equal(reader.whole("tied_0"), whole_model()["emb"][0])
    assert torch.equal(reader.whole("tied_1"), whole_model()["col"][0])
    assert sorted(reader.index.excluded) == ["norm", "row"] and not reader.has("row") and not reader.has("norm")


@pytest.mark.parametrize("layout", ["two ranks, both with everything", "two ranks, tensor"])
def test_a_tensor_has_the_aliases_that_any_of_its_ranks_knows(tmp_path, layout):
    """As where two stages hold one weight, each under the name that its own modules give it."""
    shares = layouts(whole_model())[layout]

    def action(rank, ranks):
        parts = [replace(p, aliases=("both", f"on_{rank}") if p.name == "emb" else ()) for p in shares[rank].slices()]
        return save(tmp_path, "t", module=nn.Module(), slices=parts, state={}, ranks=ranks, places=shares[rank].places)

    assert all(not isinstance(r, Exception) for r in on_threads(2, action))
    reader = open_checkpoint(tmp_path)
    assert set(reader.index.aliases["emb"]) == {"both", "on_0", "on_1"}
    for name in ("both", "on_0", "on_1"):
        assert torch.equal(reader.whole(name), whole_model()["emb"][0])


def test_names_that_no_rank_has_are_unexpected_and_names_of_other_ranks_are_not(tmp_path):
    save_layout(tmp_path, layouts(whole_model())["one rank"])
    shares = layouts(whole_model())["two ranks, pipeline"]
    assert not isinstance(load_layout(tmp_path, [s.empty() for s in shares]), Exception)
    del shares[1].values["stage1.norm"]
    error = load_layout(tmp_path, [s.empty() for s in shares])
    assert isinstance(error, CheckpointError) and "not in the model: ['norm']" in str(error)
    loaded = load_layout(tmp_path, [s.empty() for s in shares], strict=False)
    assert [found.unexpected for found in loaded] == [("norm",)] * 2


# - A reader of its own


def test_a_lone_reader_verifies_whole_chunks_once(tmp_path):
    save_layout(tmp_path, layouts(whole_model())["one rank"], chunk_bytes=80)
    param = whole_model()["emb"][0].reshape(-1)
    with Counted() as counted:
        reader = open_checkpoint(tmp_path)
        for start in range(60):
            assert torch.equal(reader.param("emb", start, start + 1), param[start : start + 1])
    assert counted.count == 60 * 4 + 60 * 4, "each byte once for its value, and once for its hash"
    with Counted() as counted:
        assert torch.equal(open_checkpoint(tmp_path).whole("emb").reshape(-1), param)
    assert counted.count == 60 * 4, "whole chunks are hashed as they are read"
    with Counted() as counted:
        assert torch.equal(open_checkpoint(tmp_path).param("emb", 10, 50), param[10:50])
    assert counted.count == 40 * 4 + 40 * 4, "only the first and the last chunk, of 20 elements each, are read again"


def test_a_reader_of_a_part_has_that_part(tmp_path):
    save_layout(tmp_path, layouts(whole_model())["one rank"], chunk_bytes=48)
    place = Place("col", (8, 6), columns(1, 3))
    reader = open_checkpoint(tmp_path, places={"mine": place})
    expected = whole_model()["col"][:, :, 1:4].reshape(2, -1)
    assert torch.equal(reader.param("mine", 0, 24), expected[0]) and reader.has("mine")
    assert torch.equal(reader.state("exp_avg", "mine", 5, 11), expected[1][5:11])
    with pytest.raises(CheckpointError, match="elements 0 to 25"):
        reader.param("mine", 0, 25)


def test_large_pieces_go_through_in_steps(tmp_path, monkeypatch):
    from dsx_checkpoint import files

    monkeypatch.setattr(files, "PIECE_BYTES", 20)
    for layout in LAYOUTS:
        save_layout(tmp_path, layouts(whole_model())[layout], chunk_bytes=48)
        got = [share.empty() for share in layouts(whole_model())["four ranks, tensor and data"]]
        assert not isinstance(load_layout(tmp_path, got), Exception)
        expected = layouts(whole_model())["four ranks, tensor and data"]
        assert all(one.equals(other) for one, other in zip(got, expected)), layout


def test_numbers_that_json_cannot_say_come_back(tmp_path):
    share = Share.of(whole_model(), {"norm": None})
    for value in (float("inf"), float("nan"), -0.0):
        share.step = value
        save(tmp_path, "t", module=nn.Module(), slices=share.slices(), state={}, ranks=Solo(), places=share.places)
        text = (tmp_path / "t" / "dsx.json").read_text()
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        got = open_checkpoint(tmp_path).state("step", "norm", 0, 0)
        assert repr(got) == repr(value)
