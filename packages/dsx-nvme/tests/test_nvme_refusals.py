"""What cannot be transferred is refused with a reason before anything changes; a failed write gives its room back."""

import errno
import json
import os
import resource
import shutil
import socket
import subprocess
import tempfile

import dsx_nvme
import dsx_nvme.errors
import pytest
import torch
from dsx_nvme import TensorFile, native

ENGINES = [*(e for e in native.ENGINES if not native.refusal(e)), "python"]


@pytest.fixture(params=ENGINES)
def engine(request):
    with dsx_nvme.Engine(request.param, block_size=1 << 16, queue_depth=4) as found:
        yield found


def test_a_read_far_beyond_the_end_names_the_size(engine, tmp_path):
    (tmp_path / "t").write_bytes(b"x" * 5000)
    for offset in (4990, 5000, 8192, 10**15):
        with pytest.raises(dsx_nvme.errors.EndOfFileError, match="the file ends at 5000, ") as caught:
            engine.read(torch.zeros(100), tmp_path / "t", offset).wait()
        assert f"from offset {offset}" in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipes_and_sockets_are_refused(engine, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader, writer = os.pipe()
    with socket.socket() as plug:
        for target in (tmp_path / "pipe", reader, plug.fileno()):
            with pytest.raises(dsx_nvme.errors.TransferError, match="a pipe or socket has no offsets") as caught:
                engine.read(torch.zeros(10), target)
            assert caught.value.errno == errno.ESPIPE
        for target in (tmp_path / "pipe", writer):
            with pytest.raises(dsx_nvme.errors.TransferError, match="a pipe or socket has no offsets"):
                engine.write(torch.zeros(10), target)
    with pytest.raises(OSError):
        TensorFile.open(tmp_path / "pipe")
    os.close(reader)
    os.close(writer)


def test_descriptors_of_the_other_direction_are_refused(engine, tmp_path):
    (tmp_path / "t").write_bytes(b"x" * 10_000)
    before = (tmp_path / "t").read_bytes()
    for flags, call, words in (
        (os.O_RDONLY, engine.write, "is open for reading only; open it with O_RDWR"),
        (os.O_WRONLY, engine.read, "is open for writing only; open it with O_RDWR or O_RDONLY"),
    ):
        fd = os.open(tmp_path / "t", flags)
        with pytest.raises(dsx_nvme.errors.TransferError, match=words) as caught:
            call(torch.zeros(100), fd, 0)
        assert caught.value.errno == errno.EBADF and str(fd) in str(caught.value)
        os.close(fd)
    assert (tmp_path / "t").read_bytes() == before


@pytest.mark.parametrize("offset", [1.5, 4096.0, "0", -1, 1 << 63, (1 << 63) - 10, 1 << 70])
def test_offsets_that_are_none(offset, engine, tmp_path):
    for call in (engine.read, engine.write):
        with pytest.raises(dsx_nvme.errors.OptionError, match="offset="):
            call(torch.zeros(100), tmp_path / "t", offset)
    assert os.listdir(tmp_path) == []


def test_whole_numbers_of_other_types_are_offsets(engine, tmp_path):
    engine.write(torch.arange(4), tmp_path / "t", torch.tensor(8)).wait()
    assert (tmp_path / "t").stat().st_size == 40


@pytest.mark.parametrize("options", [{"block_size": 1 << 70}, {"queue_depth": 1 << 40}, {"threads": True}])
def test_options_out_of_range(options):
    with pytest.raises(dsx_nvme.errors.OptionError, match="expected a whole number"):
        dsx_nvme.Engine(**options)


@pytest.fixture
def limited():
    """A limit on the size of files, lifted afterwards."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def room(path):
    """Bytes on disk."""
    return os.stat(path).st_blocks * 512


@pytest.mark.parametrize("direct", [True, False])
def test_a_write_that_fails_gives_its_room_back(direct, engine, limited, tmp_path):
    big, small = torch.ones(4 << 20, dtype=torch.uint8), torch.ones(1000, dtype=torch.uint8)
    with dsx_nvme.Engine(engine.options.engine, block_size=1 << 18, direct=direct) as one:
        with pytest.raises(OSError):
            one.write(big, tmp_path / "whole").wait()
        assert os.stat(tmp_path / "whole").st_size == room(tmp_path / "whole") == 0
        one.write(small, tmp_path / "part", 0).wait()
        held = room(tmp_path / "part")
        with pytest.raises(OSError):
            one.write(big, tmp_path / "part", 1000).wait()
        assert (tmp_path / "part").read_bytes()[:1000] == bytes(small.tolist())
        if native.module() is not None:
            assert room(tmp_path / "part") <= held + 4096


def test_a_file_of_another_writer_is_not_cut(engine, limited, tmp_path):
    """A part of a file fails while bytes of others lie before and behind it."""
    with dsx_nvme.Engine(engine.options.engine, block_size=1 << 16, direct=False) as one:
        one.write(torch.full((100,), 1, dtype=torch.uint8), tmp_path / "t", 0).wait()
        bad = one.write(torch.full((2 << 20,), 2, dtype=torch.uint8), tmp_path / "t", 200_000)
        one.write(torch.full((100,), 3, dtype=torch.uint8), tmp_path / "t", 100).wait()
        assert isinstance(bad.exception(), OSError)
    data = (tmp_path / "t").read_bytes()
    assert data[:200] == bytes([1] * 100 + [3] * 100)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a small file system needs root"
)
def test_a_disk_that_was_full_has_room_again(engine):
    folder = tempfile.mkdtemp()
    if subprocess.call(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], stderr=subprocess.DEVNULL):
        os.rmdir(folder)
        pytest.skip("mount is not allowed here")
    try:
        big = torch.ones(3 << 20, dtype=torch.uint8)
        for offset in (None, 0):
            with pytest.raises(OSError) as caught:
                engine.write(big, f"{folder}/t", offset).wait()
            assert caught.value.errno == errno.ENOSPC
            if offset is None or native.module() is not None:
                free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
                assert free > 900 << 10
            os.unlink(f"{folder}/t")
    finally:
        subprocess.check_call(["umount", folder])
        os.rmdir(folder)


def file_of(path, table, nbytes=64):
    """A safetensors file with this header and `nbytes` of data."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(nbytes))


def tensor(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


ONCE = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'
HOSTILE = {
    "negative sizes": {"a": tensor([-2, -2], 0, 16)},
    "a size that is no whole number": {"a": tensor([4.0], 0, 16)},
    "a size that is a word": {"a": tensor([True, 4], 0, 16)},
    "a shape that is a number": {"a": tensor(4, 0, 16)},
    "offsets that are no whole numbers": {"a": tensor([4], 0.0, 16.0)},
    "three offsets": {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16, 32]}},
    "offsets backwards": {"a": tensor([4], 32, 16)},
    "a negative offset": {"a": tensor([4], -16, 0)},
    "bytes behind the end": {"a": tensor([4], 56, 72)},
    "a size of another shape": {"a": tensor([5], 0, 16)},
    "a product that overflows": {"a": tensor([1 << 40, 1 << 40], 0, 16)},
    "many sizes": {"a": tensor([1] * 10_000, 0, 4)},
    "a size of many digits": b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,16]}}',
    "an unknown type": {"a": tensor([4], 0, 16, "F31")},
    "a type that is a list": {"a": tensor([4], 0, 16, ["F32"])},
    "an entry that is a list": {"a": []},
    "a header that is a list": [],
    "metadata that is a list": {"__metadata__": []},
    "no shape": {"a": {"dtype": "F32", "data_offsets": [0, 16]}},
    "100 000 levels": b"[" * 100_000,
    "levels inside an entry": b'{"a":' * 50_000,
    "a checksum that is a number": {"__metadata__": {"crc32.a": 3}},
    "a checksum of no digits": {"__metadata__": {"crc32.a": "zz"}, "a": tensor([4], 0, 16)},
    "a wrong checksum of the header": {"__metadata__": {"header_crc32": "00000000"}, "a": tensor([4], 0, 16)},
    "one name twice": ONCE + b"," + ONCE[1:] + b"}",
    "two tensors in the same bytes": {"a": tensor([4], 0, 16), "b": tensor([4], 0, 16)},
    "tensors that overlap": {"a": tensor([4], 0, 16), "b": tensor([4], 12, 28)},
    "a pad over a tensor": {"a": tensor([4], 0, 16), "__pad_0__": tensor([8], 8, 16, "U8")},
    "not utf-8": b'{"\xff": 3}',
    "a number that is none": b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,16]}}',
}


@pytest.mark.parametrize("header", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers(header, tmp_path):
    file_of(tmp_path / "t", header)
    with pytest.raises(dsx_nvme.errors.FormatError) as caught:
        TensorFile.open(tmp_path / "t")
    assert len(str(caught.value)) < 500


def test_a_header_that_is_odd_but_right_opens(tmp_path):
    """Tensors in another order than their bytes, unused bytes between them, tensors without bytes inside others."""
    table = {"b": tensor([4], 48, 64), "none": tensor([0, 3], 8, 8), "a": tensor([4], 0, 16), "": tensor([], 16, 20)}
    file_of(tmp_path / "t", table)
    with TensorFile.open(tmp_path / "t") as file:
        assert {name: tuple(file.read(name).result().shape) for name in file} == {
            "b": (4,), "none": (0, 3), "a": (4,), "": (),
        }  # fmt: skip


def test_no_flipped_byte_of_a_header_loads_something_else(tmp_path):
    tensors = {"a": torch.arange(6, dtype=torch.int32).view(2, 3), "b": torch.ones(6), "c": torch.zeros(2, 3)}
    with TensorFile.create(tmp_path / "t", tensors) as file:
        for name, value in tensors.items():
            file.write(name, value)
    data = (tmp_path / "t").read_bytes()
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        damaged = bytearray(data)
        text = data.index(b"  ")  # from here on the header is filled with spaces
        place = int(torch.randint(0, text, (1,), generator=generator))
        damaged[place] ^= 1 << int(torch.randint(0, 8, (1,), generator=generator))
        (tmp_path / "t").write_bytes(damaged)
        try:
            with TensorFile.open(tmp_path / "t") as file:
                found = {name: file.read(name).result() for name in file}
        except (dsx_nvme.errors.FormatError, dsx_nvme.errors.ChecksumError):
            continue
        assert set(found) == set(tensors)
        assert all(found[n].dtype == t.dtype and torch.equal(found[n], t) for n, t in tensors.items()), place


def test_starts_that_are_none(tmp_path):
    with TensorFile.create(tmp_path / "t", {"a": torch.zeros(10)}) as file:
        for start in (0.5, "1", None):
            with pytest.raises(dsx_nvme.errors.OptionError, match="whole number of elements"):
                file.write("a", torch.zeros(2), start=start)
        with pytest.raises(dsx_nvme.errors.OptionError, match="needs `out`"):
            file.read("a", start=3)
