"""Files of other programs that somebody has made to do harm: `dsx checkpoint import` refuses each with a named error,
asks for no more memory than the file has bytes, and runs and writes nothing.

The instructions of the pickles are written by hand: no program that is known makes such files.
"""

import io
import json
import pickle
import struct
import tarfile
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from dsx_testkit import run_ranks
from dsx_testkit.limits import ended, little_memory

ROOM = 256 << 20
HUGE = 1 << 40


# - Pickles, instruction by instruction


def text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value):
    return b"I%d\n" % value


def numbers(values):
    return b"(" + b"".join(map(number, values)) + b"t"


def name_of(module, name):
    return f"c{module}\n{name}\n".encode()


def call(module, name, arguments):
    return name_of(module, name) + b"(" + arguments + b"tR"


def storage(numel, kind="FloatStorage", key="0", more=b""):
    return b"(" + text("storage") + name_of("torch", kind) + text(key) + text("cpu") + number(numel) + more + b"tQ"


def tensor(saved=None, offset=0, size=(4,), stride=(1,), maker="_rebuild_tensor_v2"):
    hooks = call("collections", "OrderedDict", b"")
    arguments = (saved or storage(4)) + number(offset) + numbers(size) + numbers(stride) + b"\x89" + hooks
    return call("torch._utils", maker, arguments)


def table(value, name="w"):
    return b"\x80\x02}" + text(name) + value + b"s."


# - Files


def archive(records, method=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", method) as made:
        warnings.simplefilter("ignore")  # of names that stand twice
        for name, data in records:
            made.writestr(f"archive/{name}", data)
    return buffer.getvalue()


def saved(code, *more, method=zipfile.ZIP_STORED, data=bytes(16)):
    """A file as torch.save writes it."""
    records = [("data.pkl", code), ("byteorder", b"little"), ("data/0", data), ("version", b"3\n"), *more]
    return archive(records, method)


def old(code, keys=b"](" + text("0") + b"e"):
    """A file as torch.save wrote it before 2020."""
    parts = [pickle.dumps(value, protocol=2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    return b"".join(parts) + code + b"\x80\x02" + keys + b"." + struct.pack("<q", 4) + bytes(16)


def tar():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        for name, target in (("storages", "/etc/passwd"), ("pickle", "../../outside")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            made.addfile(member)
    return buffer.getvalue()


def claiming(size):
    """A record of 16 bytes of which the directory of the archive says more."""
    data, mark = bytearray(saved(table(tensor()))), b"PK\x01\x02"
    at = data.find(b"archive/data/0", data.find(mark)) - 46
    data[at + 20 : at + 28] = struct.pack("<II", size, size)
    return bytes(data)


RUNS = {
    "mkdir": call("posix", "mkdir", text("ran")),
    "system": call("posix", "system", text("touch ran")),
    "eval": call("builtins", "eval", text("open('ran', 'w')")),
    "exec": call("builtins", "exec", text("open('ran', 'w')")),
    "Popen": call("subprocess", "Popen", text("touch ran")),
    "load": call("torch", "load", text("ran")),
    "getattr": call("builtins", "getattr", name_of("posix", "system") + text("__call__")),
    "a module's code": call("torch.hub", "load", text("ran") + text("x")),
    "an instance": b"(" + text("ran") + b"iposix\nmkdir\n",
}
TENSORS = {
    "of more elements than its storage": tensor(size=(HUGE,)),
    "of more rows than its storage": tensor(size=(1 << 20, 1 << 20), stride=(1 << 20, 1)),
    "that is one element, repeated": tensor(size=(HUGE,), stride=(0,)),
    "that begins behind its storage": tensor(offset=HUGE),
    "that begins before its storage": tensor(offset=-4),
    "of a negative size": tensor(size=(-4,)),
    "of a negative stride": tensor(stride=(-1,)),
    "of a large stride": tensor(size=(2,), stride=(HUGE,)),
    "of more strides than sides": tensor(size=(2,), stride=(1, 1)),
    "of a storage without end": tensor(storage(HUGE)),
    "of a storage of negative size": tensor(storage(-4)),
    "of a storage larger than its record": tensor(storage(8), size=(8,)),
    "of a storage that is not there": tensor(storage(4, key="7")),
    "of a storage of another kind": tensor(storage(4, kind="DoubleStorage")),
    "of bytes without end": tensor(storage(HUGE, kind="UntypedStorage"), maker="_rebuild_tensor_v3"),
    "of no storage": tensor(b"N"),
    "of a storage that is a table": tensor(b"}"),
    "that is made larger": tensor() + b"(" + storage(4) + number(0) + numbers([HUGE]) + numbers([0]) + b"tb",
    "that gets another state": tensor() + b"}b",
    "in an old form": tensor(size=(HUGE,), maker="_rebuild_tensor"),
    "of a module": b"(" + text("module") + name_of("os", "system") + text("a") + text("b") + b"tQ",
}
VALUES = {
    "a bytearray without end": call("builtins", "bytearray", number(HUGE)),
    "a storage without end": call("torch", "FloatStorage", number(HUGE)),
    "bytes without end": call("torch", "UntypedStorage", number(HUGE)),
    "an array of torch": call("torch", "empty", number(HUGE)),
    "a changed reader": name_of("torch._utils", "_rebuild_tensor_v2") + b"N}" + text("__defaults__") + b")s\x86b",
    "a reader in another state": name_of("torch._utils", "_rebuild_tensor_v2") + b"]Nab",
    "a dtype in another state": name_of("torch.storage", "UntypedStorage") + b"]Nab",
    "a changed dtype": name_of("torch.storage", "UntypedStorage") + b"N}" + text("dtype") + b"Ns\x86b",
}


def doubled(times, keep=b"", open_with=b"N\x85"):
    """A tuple of two equal tuples, and so on: a few bytes, and 2^times parts."""
    return open_with + (keep + b"q\x00h\x00\x86") * times


def doubled_list(times):
    return b"]" + b"q\x000(h\x00h\x00l" * times


SHARING = {
    "in the memo": doubled(60),
    "in a memo without numbers": b"N\x85" + b"".join(b"\x94h" + bytes([n]) + b"\x86" for n in range(60)),
    "on the stack": b"N\x85" + b"2\x86" * 60,
    "behind an empty addition": doubled(60, keep=b"(e"),
    "behind an empty table": doubled(60, keep=b"(u"),
    "behind an empty set": doubled(60, keep=b"(\x90"),
    "behind an empty state": doubled(60, keep=b"Nb"),
    "in a set": b"(" + doubled(60) + b"\x91",
    "in a function's set": call("builtins", "frozenset", b"(" + doubled(60) + b"l"),
    "in a slice": call("builtins", "slice", doubled(60)),
    "in the name of a module": b"(" + text("module") + doubled(60) + b"tQ",
    "again and again": b"(" + doubled(20) + b"q\x01" + b"h\x01Nh\x01N" * 2000 + b"d",
}
LISTS = {
    "as weights": b"\x80\x02}" + text("w") + doubled_list(60) + b"s.",
    "as the size of a tensor": table(call(
        "torch._utils", "_rebuild_tensor_v2",
        storage(4) + number(0) + doubled_list(60) + doubled_list(60) + b"\x89N",
    )),
    "as the place of a tensor": table(call(
        "torch._utils", "_rebuild_tensor_v2", storage(4) + doubled_list(60) + b"))\x89N"
    )),
    "as the length of a storage": table(b"(" + text("storage") + name_of("torch", "FloatStorage") + text("0")
        + text("cpu") + doubled_list(60) + b"tQ"),
    "as the name of a storage": table(b"(" + text("storage") + name_of("torch", "FloatStorage") + doubled_list(60)
        + text("cpu") + number(4) + b"tQ"),
    "as the kind of a storage": table(b"(" + doubled_list(60) + name_of("torch", "FloatStorage") + text("0")
        + text("cpu") + number(4) + b"tQ"),
    "as a file": b"\x80\x02" + doubled_list(60) + b".",
}  # fmt: skip
PICKLES = {
    "a memo without end": b"\x80\x02Nr\x00\xff\xff\xff.",
    "a written memo without end": b"\x80\x02Np999999999999\n.",
    "a memo of many digits": b"\x80\x02Np" + b"9" * 5000 + b"\n.",
    "bytes of a terabyte": b"\x80\x04\x8e" + struct.pack("<Q", HUGE) + b".",
    "text of a terabyte": b"\x80\x04\x8d" + struct.pack("<Q", HUGE) + b".",
    "a bytearray of a terabyte": b"\x80\x05\x96" + struct.pack("<Q", HUGE) + b".",
    "a frame of a terabyte": b"\x80\x04\x95" + struct.pack("<Q", HUGE) + b"N.",
    "a number of a gigabyte": b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b".",
    "a number of negative length": b"\x80\x02\x8b" + struct.pack("<i", -5) + b".",
    "a tuple in tuples": b"\x80\x02})" + b"\x85" * 200_000 + b"Ns.",
    "a tuple in larger tuples": b"\x80\x02})" + b"N\x86" * 200_000 + b"Ns.",
    "a tuple in tuples by marks": b"\x80\x02}" + b"(" * 200_000 + b"t" * 200_000 + b"Ns.",
    "a tuple in tuples of the memo": b"\x80\x02})" + b"q\x000h\x00\x85" * 200_000 + b"Ns.",
    **{f"tuples that share their parts {how}": b"\x80\x04}" + code + b"Ns." for how, code in SHARING.items()},
    **{f"lists that share their parts {how}": code for how, code in LISTS.items()},
    "a list in itself": b"\x80\x02}" + text("w") + b"]q\x00h\x00as.",
    "no end": b"\x80\x02N",
    "an unknown instruction": b"\x80\x02\xff.",
    "a line without an end": b"\x80\x02I12345",
    "nothing": b"",
    "a list": b"\x80\x02].",
    "a number": b"\x80\x02K\x05.",
}
FILES = {
    **{f"run {name}.pt": saved(table(code)) for name, code in RUNS.items()},
    **{f"run old {name}.pt": old(table(code)) for name, code in RUNS.items()},
    **{f"tensor {name}.pt": saved(table(code)) for name, code in TENSORS.items()},
    **{f"value {name}.pt": saved(table(code)) for name, code in VALUES.items()},
    **{f"pickle {name}.pt": saved(code) for name, code in PICKLES.items()},
    **{f"old pickle {name}.pt": old(code) for name, code in PICKLES.items()},
    "old storage.pt": old(table(tensor(storage(HUGE, more=b"N")))),
    "old storages.pt": old(table(b"(" + b"".join(storage(9, key=str(k), more=b"N") for k in range(99)) + b"l")),
    "compressed.pt": saved(table(tensor()), method=zipfile.ZIP_DEFLATED, data=bytes(1 << 20)),
    "program.pt": saved(table(tensor()), ("constants.pkl", b"\x80\x02)."), ("code/__torch__.py", b"")),
    "twice.pt": saved(table(tensor()), ("data/0", bytes(16))),
    "no pickle.pt": archive([("version", b"3\n")]),
    "cut.pt": saved(table(tensor()))[:-30],
    "claims.pt": claiming(1 << 31),
    "tar.pt": tar(),
    "zeros.pt": bytes(4096),
}


def safetensors(header, data=bytes(16), length=None):
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(head) if length is None else length).to_bytes(8, "little") + head + data


def one(**values):
    return {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **values}}


FILES |= {
    f"{name}.safetensors": content
    for name, content in {
        "a header of an exabyte": safetensors(one(), length=1 << 60),
        "a header of all": safetensors(one(), length=10_000),
        "a negative shape": safetensors(one(shape=[-2, -2])),
        "a shape of a terabyte": safetensors(one(shape=[HUGE])),
        "a shape of floats": safetensors(one(shape=[4.0])),
        "a shape of booleans": safetensors(one(shape=[True, 4])),
        "a shape of text": safetensors(one(shape="4")),
        "a place behind the file": safetensors(one(data_offsets=[16, 32])),
        "a place before the data": safetensors(one(data_offsets=[-8, 8])),
        "a place of three": safetensors(one(data_offsets=[0, 8, 16])),
        "a place that is backwards": safetensors(one(data_offsets=[16, 0])),
        "a place of a terabyte": safetensors(one(shape=[HUGE], data_offsets=[0, 4 * HUGE])),
        "two in one place": safetensors({**one(), "v": one()["w"]}),
        "a dtype that is none": safetensors(one(dtype="__class__")),
        "a dtype that is a list": safetensors(one(dtype=[])),
        "a tensor that is a number": safetensors({"w": 5}),
        "a list": safetensors([1, 2]),
        "lists in lists": safetensors(b"[" * 100_000),
        "no text": safetensors(b"\xff\xfe"),
        "nothing": b"",
    }.items()
}


# - torch.distributed.checkpoint: `.metadata` of a real one, changed


def distributed(folder, change):
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": {"w": torch.arange(6.0).reshape(2, 3)}}, checkpoint_id=folder, no_dist=True)
    path = Path(folder) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    changed = change(metadata)
    path.write_bytes(changed if isinstance(changed, bytes) else pickle.dumps(metadata))


def place(**values):
    def change(metadata):
        for info in metadata.storage_data.values():
            vars(info).update(values)

    return change


def sized(size, *chunks):
    def change(metadata):
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        (entry,) = metadata.state_dict_metadata.values()
        entry.size = torch.Size(size)
        entry.chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks]

    return change


def paths_that_share(metadata):
    path = ["w"]
    for _ in range(60):
        path = [path, path]
    metadata.planner_data = {name: ("model", path) for name in metadata.state_dict_metadata}


DISTRIBUTED = {
    "paths that share their parts": paths_that_share,
    "a file above": place(relative_path="../x"),
    "a file of the system": place(relative_path="/etc/passwd"),
    "a hidden file": place(relative_path=".metadata"),
    "a file that is a number": place(relative_path=5),
    "a place behind the file": place(offset=HUGE),
    "a negative place": place(offset=-1),
    "a length of a terabyte": place(length=HUGE),
    "a length of text": place(length="5"),
    "a tensor of a terabyte": sized((HUGE, 3), ((0, 0), (HUGE, 3))),
    "a tensor larger than its file": sized((1000, 3), ((0, 0), (1000, 3))),
    "a tensor with a hole": sized((4, 3), ((0, 0), (2, 3))),
    "chunks over each other": sized((2, 3), ((0, 0), (2, 3)), ((0, 0), (2, 3))),
    "a chunk outside": sized((2, 3), ((5, 0), (2, 3))),
    "no chunks": sized((2, 3)),
    "no places": lambda metadata: metadata.storage_data.clear(),
    "no tensors": lambda metadata: metadata.state_dict_metadata.clear(),
    "something to run": lambda metadata: table(RUNS["mkdir"]),
    "a number": lambda metadata: pickle.dumps(5),
    "a memo without end": lambda metadata: PICKLES["a memo without end"],
    "nothing": lambda metadata: b"",
    "another object": lambda metadata: pickle.dumps({"state_dict_metadata": {"w": 1}}),
}


def deepspeed(folder, content, latest="t"):
    tag = Path(folder) / "t"
    tag.mkdir(parents=True)
    (tag / "mp_rank_00_model_states.pt").write_bytes(content)
    (Path(folder) / "latest").write_text(latest)


DEEPSPEED = {
    "runs": saved(table(RUNS["mkdir"], name="module")),
    "has a number for a module": saved(table(number(5), name="module")),
    "has a tensor without end": saved(table(b"}" + text("w") + tensor(size=(HUGE,)) + b"s", name="module")),
    "is empty": saved(table(b"}", name="module")),
}


# - Reading them


def tensors_in(content):
    from dsx_checkpoint import CheckpointError
    from dsx_checkpoint.foreign.unpickling import read_bytes

    found = read_bytes(content, "here")
    if not isinstance(found, dict) or not any(isinstance(value, torch.Tensor) for value in found.values()):
        raise CheckpointError("no tensors")


def read_all(rank, world, folder):
    from dsx_checkpoint import read_foreign
    from dsx_checkpoint.foreign.source import write_source

    root, found = Path(folder), {}
    root.mkdir()
    good = root / "good.pt"
    good.write_bytes(saved(table(tensor())))
    write_source(read_foreign(good), root / "good", "t")
    paths = {}
    for number_of, (name, content) in enumerate(FILES.items()):
        paths[name] = root / f"file{number_of}{Path(name).suffix}"
        paths[name].write_bytes(content)
    for number_of, (name, change) in enumerate(DISTRIBUTED.items()):
        paths[f"distributed: {name}"] = root / f"distributed{number_of}"
        distributed(root / f"distributed{number_of}", change)
    for number_of, (name, content) in enumerate(DEEPSPEED.items()):
        paths[f"deepspeed: {name}"] = root / f"deepspeed{number_of}"
        deepspeed(root / f"deepspeed{number_of}", content)
    with little_memory(ROOM):
        for name, path in paths.items():
            found[name] = ended(lambda path=path: write_source(read_foreign(path), root / "out", "t"))
        for name, content in FILES.items():  # in a chunk of another file, where nothing is mapped into memory
            if name.startswith(("tensor", "pickle")):
                found[f"bytes of {name}"] = ended(lambda content=content: tensors_in(content))
    return found, (root / "good" / "t" / "dsx.json").is_file(), (root / "out" / "t").exists()


def test_every_hostile_file_is_refused_by_name_and_nothing_is_run(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    ((found, good, written),) = run_ranks(read_all, 1, str(tmp_path / "files"), backend=None, timeout=120)
    assert len(found) > len(FILES) + len(DISTRIBUTED) + len(DEEPSPEED) > 100 and good and not written
    for name, end in found.items():
        assert "CheckpointError" in end.kinds, (name, end)
        assert not end.wanted_memory, (name, end)
    assert not any((tmp_path / "here").iterdir())  # what would run makes something here


def test_a_reader_of_pickles_stays_as_it_is(tmp_path):
    """A pickle sets attributes of what it is given; the next file is read as ever."""
    from dsx_checkpoint import CheckpointError, read_foreign

    good = tmp_path / "good.pt"
    torch.save({"w": torch.arange(4.0), "c": torch.ones(2, dtype=torch.complex64).conj()}, good)
    for name in VALUES:
        (tmp_path / "bad.pt").write_bytes(FILES[f"value {name}.pt"])
        with pytest.raises(CheckpointError):
            read_foreign(tmp_path / "bad.pt")
    read = read_foreign(good).parameters
    assert torch.equal(read["w"].fetch(), torch.arange(4.0))
    assert torch.equal(read["c"].fetch(), torch.ones(2, dtype=torch.complex64))


def test_files_of_torch_are_read_in_both_forms(tmp_path):
    from dsx_checkpoint import read_foreign

    shared = torch.arange(12.0).reshape(3, 4)
    state = {
        "t": shared.t(), "part": shared[1], "none": torch.empty(0, 3), "scalar": torch.tensor(2.5),
        "low": torch.randn(5).bfloat16(), "eight": torch.randn(6).to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(torch.ones(2)), "short": torch.arange(3).to(torch.uint16),
    }  # fmt: skip
    for new in (True, False):
        torch.save(state, tmp_path / "w.pt", _use_new_zipfile_serialization=new)
        read = read_foreign(tmp_path / "w.pt").parameters
        assert read.keys() == state.keys()
        for name, value in state.items():
            got = read[name].fetch()
            assert got.dtype == value.dtype and torch.equal(got.double(), value.detach().double()), name
