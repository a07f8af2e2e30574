"""Folders that somebody has made to do harm: each is refused with a named error, asks for no more memory than its files
have bytes, and nothing outside of it is read, written or run.

These are checkpoints of dsx; test_checkpoint_hostile_imports.py has files of other programs. Together more than 100.
All checksums are right: an attacker can compute them.

    pytest packages/dsx/tests/test_checkpoint_hostile.py packages/dsx/tests/test_checkpoint_hostile_imports.py
"""

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from dsx_testkit import run_ranks
from dsx_testkit.limits import ended, little_memory
from torch import nn

ROOM = 256 << 20
"""Bytes that reading may take; each of these folders has a few thousand, and asks for a thousand times as much."""
HUGE = 1 << 40
GOLDEN = Path(__file__).parent / "golden"


@dataclass
class Part:
    name: str
    shape: tuple
    value: float = 1.0
    aliases: tuple = ()
    trainable: bool = True
    master: None = None
    start: int = 0
    ranges: tuple = ()

    @property
    def stop(self):
        return torch.Size(self.shape).numel()

    @property
    def param(self):
        return torch.full((self.stop,), self.value)

    @property
    def states(self):
        return {"exp_avg": torch.full((self.stop,), 2.0), "step": torch.tensor(7.0)}


@dataclass
class Holder:
    """What a load fills."""

    parts: tuple = field(default_factory=lambda: (Part("a", (40, 30)), Part("b", (7,))))

    def slices(self):
        return self.parts

    def read_slices(self, reader):
        for part in self.parts:
            reader.master(part.name, part.start, part.stop)
            for key in reader.state_keys(part.name):
                reader.state(key, part.name, part.start, part.stop)
        return self

    def install(self):
        """Nothing: no load comes so far."""


def module():
    made = nn.Module()
    made.register_buffer("table", torch.arange(5.0))
    return made


def write(root):
    from dsx.checkpoint import save
    from dsx_checkpoint.ranks import Solo

    state = {"note": "x", "t": torch.arange(4)}
    save(root, "t", module=module(), slices=Holder().slices(), state=state, ranks=Solo())


# - How a folder is changed


def indexed(change):
    """Change the index and seal it again."""

    def make(root):
        from dsx_checkpoint.format import seal

        path = root / "t" / "dsx.json"
        data = json.loads(path.read_text())
        data.pop("checksum")
        changed = change(data)
        path.write_text(seal(data if changed is None else changed), encoding="utf-8", errors="surrogatepass")

    return make


def entry(**values):
    return indexed(lambda data: data["model"]["a"].update(values))


def key(name, value):
    return indexed(lambda data: data.update({name: value}))


def state(value):
    return indexed(lambda data: data["state"].update(note=value))


def text(name, content):
    def make(root):
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return make


def instead(name, kind):
    """Something that is no file where one should be."""

    def make(root):
        path = root / name
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "endless":
            path.symlink_to("/dev/zero")
        elif kind == "loop":
            path.symlink_to(path.name)
        else:
            with path.open("wb") as file:
                file.truncate(HUGE)

    return make


def file_named(name):
    """A file of another name, which the index and the folder agree on as far as a folder can."""

    def change(data):
        data["files"][name] = data["files"].pop("model.safetensors")
        for one in data["model"].values():
            one["file"] = name

    return indexed(change)


def over_each_other(data):
    data["model"]["b"].update(offset=data["model"]["a"]["offset"])


def node_part(**values):
    """A part of a node that says what it likes."""

    def make(root):
        from dsx_checkpoint.format import seal
        from dsx_checkpoint.node_part import NodePart, digest_of_index
        from dsx_checkpoint.spans import Spans

        folder = root / "t"
        NodePart(digest_of_index(folder), True, 1.0, 0, 2, Spans()).write(folder)
        data = json.loads((folder / "node.json").read_text())
        data.pop("checksum")
        (folder / "node.json").write_text(seal({**data, **values}))

    return make


def version1(change):
    """A checkpoint of the first version, which had no checksum at the beginning."""

    def make(root):
        shutil.rmtree(root)
        shutil.copytree(GOLDEN / "v1" / "sgd-fp16-stage0-1rank", root)
        (path,) = root.glob("*/dsx.json")
        data = json.loads(path.read_text())
        data.pop("checksum", None)
        change(data)
        path.write_text(json.dumps(data))

    return make


def first(data, kind):
    return next(iter(data[kind].values()))


NAMES = {
    "above": "../model.safetensors", "absolute": "/etc/passwd", "below": "x/model.safetensors", "hidden": ".m",
    "empty": "", "dots": "..", "the index": "dsx.json", "nul": "m\0.safetensors", "backslash": "..\\m",
    "long": "m" * 300, "half a pair": "m\udc80",
}  # fmt: skip
CASES = {
    **{f"a file called {name}": file_named(value) for name, value in NAMES.items()},
    "a shape of a terabyte": entry(shape=[HUGE, 1]),
    "a shape beyond 64 bits": entry(shape=[1 << 80]),
    "a shape with an empty and a huge side": entry(shape=[0, 1 << 62], hashes=""),
    "a negative shape": entry(shape=[-40, -30]),
    "a shape of floats": entry(shape=[40.0, 30]),
    "a shape of booleans": entry(shape=[True, 1200]),
    "a shape of text": entry(shape="40"),
    "a shape that is null": entry(shape=None),
    "a nested shape": entry(shape=[[40], 30]),
    "an offset beyond the file": entry(offset=HUGE),
    "a negative offset": entry(offset=-8),
    "an offset in the header": entry(offset=0),
    "an offset of a float": entry(offset=8.5),
    "another dtype": entry(dtype="F8_E4M3"),
    "a dtype that is none": entry(dtype="__class__"),
    "a dtype that is a list": entry(dtype=["F32"]),
    "hashes of a terabyte": entry(hashes="00000000" * 1000),
    "hashes that are no digits": entry(hashes="zzzzzzzz"),
    "two tensors in one place": indexed(over_each_other),
    "a file of a terabyte": indexed(lambda data: first(data, "files").update(bytes=HUGE)),
    "a header of a terabyte": indexed(lambda data: first(data, "files").update(header_bytes=HUGE, bytes=2 * HUGE)),
    "a negative file": indexed(lambda data: first(data, "files").update(bytes=-1)),
    "a file that is a number": key("files", {"model.safetensors": 3}),
    "chunks of no bytes": key("chunk_bytes", 0),
    "chunks of one byte": key("chunk_bytes", 1),
    "negative chunks": key("chunk_bytes", -1),
    "chunks of a float": key("chunk_bytes", 1e300),
    "a version to come": key("version", 1 << 70),
    "a version that is true": key("version", True),
    "another hash": key("hash", "none"),
    "another format": key("format", "pickle"),
    "files that are a list": key("files", []),
    "tensors that are a list": key("model", [1]),
    "tensors that are null": key("optimizer", None),
    "aliases of text": key("aliases", {"a": "bc", "b": []}),
    "aliases of numbers": key("aliases", {"a": [1], "b": []}),
    "aliases of nobody": key("aliases", {"a": [], "b": [], "stranger": []}),
    "excluded text": key("excluded", "ab"),
    "scalars that are text": key("scalars", {"step": {"a": "__import__('os')"}}),
    "scalars of nobody": key("scalars", {"step": {"stranger": 1}}),
    "a state that is a list": key("state", [1]),
    "ranks that are a table": key("ranks", {"0": 1}),
    "latest that is a number": key("latest", 1),
    "a writer that is a number": key("writer", 7),
    "a key too many": key("__reduce__", "os.system"),
    "a key too few": indexed(lambda data: {name: value for name, value in data.items() if name != "excluded"}),
    "a state of unknown kind": state({"__reduce__": ["os.mkdir", ["/tmp/x"]]}),
    "a state of two kinds": state({"__tuple__": [], "__items__": []}),
    "a state of a tensor that is not there": state({"__tensor__": "../../t"}),
    "a state of bytes without end": state({"__numpy__": ["V8", HUGE]}),
    "a state of text without end": state({"__numpy__": ["S1", HUGE]}),
    "a state of a number too large": state({"__numpy__": ["int8", 10**30]}),
    "a state of a dtype that is a function": state({"__dtype__": "load"}),
    "a state of a device that is none": state({"__device__": "no such device"}),
    "a state of a namespace that is none": state({"__namespace__": [1]}),
    "a state of keys that cannot be": state({"__items__": [[[1], 2]]}),
    "a state of a float that is none": state({"__float__": "one"}),
    "no JSON": text("t/dsx.json", "{"),
    "no text": text("t/dsx.json", b"\xff\xfe{}"),
    "nothing": text("t/dsx.json", ""),
    "lists in lists": text("t/dsx.json", "[" * 100_000),
    "a number of digits without end": text("t/dsx.json", '{"format":"dsx-checkpoint","version":' + "1" * 10_000 + "}"),
    "an index of a terabyte": instead("t/dsx.json", "sparse"),
    "a latest of a terabyte": instead("latest", "sparse"),
    "a latest that leads out": text("latest", "../../outside"),
    "a latest that is a path": text("latest", "/etc"),
    "a latest with nul": text("latest", "t\0"),
    "a latest that is no text": text("latest", b"\xff"),
    **{
        f"{name} that is {kind}": instead(name, kind)
        for name in ("t/dsx.json", "t/model.safetensors")
        for kind in ("fifo", "folder", "endless", "loop")
    },
    "a part that is a list": text("t/node.json", "[]"),
    "a part of negative bytes": node_part(spans={"model.safetensors": [[-5, 5]]}),
    "a part of half ranges": node_part(spans={"model.safetensors": [[1]]}),
    "a part of a file above": node_part(spans={"../x": [[0, 5]]}),
    "a part of nothing": node_part(spans={}),
    "an early checkpoint of a terabyte": version1(lambda data: first(data, "tensors").update(shape=[HUGE])),
    "an early checkpoint in another place": version1(lambda data: first(data, "tensors").update(offset=9)),
    "an early checkpoint of another file": version1(lambda data: first(data, "tensors").update(file="../x")),
    "an early checkpoint with a hole": version1(lambda data: first(data, "slices").pop(0)),
}


# - Reading them


def ways(root, out):
    """What users and tools do with a folder, by name; `load` first."""
    from dsx.checkpoint import load, open_checkpoint
    from dsx_checkpoint.exporting import export
    from dsx_checkpoint.foreign.source import of_reader, write_source
    from dsx_checkpoint.looking import open_index, summary, tensor_lines
    from dsx_checkpoint.ranks import Solo
    from dsx_checkpoint.verifying import verify_all

    def verify():
        folder, index = open_index(root)
        summary(folder, index)
        list(tensor_lines(index))
        verify_all(folder, index)

    def read():
        reader = open_checkpoint(root)
        reader.state_of_caller()
        return [reader.stored(family, name) for family, named in reader.index.tensors.items() for name in named]

    return {
        "load": lambda: load(root, module=module(), optimizer=Holder(), ranks=Solo()),
        "verify": verify,
        "read": read,
        "export": lambda: export(of_reader(open_checkpoint(root)), out / "export", to="torch"),
        "convert": lambda: write_source(of_reader(open_checkpoint(root)), out / "convert", "t"),
    }


def read_all(rank, world, folder):
    found = {}
    write(Path(folder) / "good")
    good = {name: ended(way) for name, way in ways(Path(folder) / "good", Path(folder) / "good-out").items()}
    for number, (name, make) in enumerate(CASES.items()):
        root = Path(folder) / f"case{number}"
        shutil.copytree(Path(folder) / "good", root)
        make(root)
        with little_memory(ROOM):
            ends = {way: ended(action) for way, action in ways(root, Path(folder) / f"out{number}").items()}
        found[name] = ends
    return good, found


def test_every_hostile_folder_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "outside").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    ((good, found),) = run_ranks(read_all, 1, str(tmp_path / "folders"), backend=None, timeout=120)
    assert len(found) == len(CASES) > 85 and not any(end.kinds for end in good.values()), good
    for name, ends in found.items():
        assert "CheckpointError" in ends["load"].kinds, (name, ends["load"])
        looked = ends["verify"].kinds or ends["read"].kinds
        assert looked or name == "a shape with an empty and a huge side", name
        for way, end in ends.items():  # a tool that does not look at what is wrong may go on
            assert not end.kinds or "CheckpointError" in end.kinds, (name, way, end)
            assert not end.wanted_memory, (name, way, end)
    assert not any((tmp_path / "outside").iterdir()) and not any((tmp_path / "here").iterdir())
