"""Every engine moves exactly the right bytes: all sizes, offsets, alignments and dtypes, against plain file I/O."""

import ctypes
import mmap
import os
import random

import dsx_nvme
import dsx_nvme.errors
import pytest
import torch
from dsx_nvme import native

ENGINES = [*(e for e in native.ENGINES if not native.refusal(e)), "python"]
SIZES = [0, 1, 511, 512, 4097, (1 << 20) + 3]
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.fixture(params=ENGINES)
def engine(request):
    with dsx_nvme.Engine(request.param, block_size=1 << 18, queue_depth=4, threads=2) as found:
        yield found


def content(nbytes, seed=0):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def placed(data, aligned):
    """A copy of `data` on page-aligned memory, or one byte off."""
    room = dsx_nvme.empty(data.numel() + 1, dtype=torch.uint8)
    view = room[: data.numel()] if aligned else room[1 : data.numel() + 1]
    view.copy_(data)
    return view


def on_disk(path):
    with open(path, "rb") as file:
        return file.read()


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("nbytes", SIZES)
def test_sizes_offsets_and_alignments(engine, nbytes, aligned, tmp_path):
    data = content(nbytes, nbytes)
    for offset in (None, 0, 1, 512, 4096, 8191):
        path = tmp_path / f"{offset}"
        assert engine.write(placed(data, aligned), path, offset).wait() == nbytes
        start = offset or 0
        written = on_disk(path)
        assert written[start:] == bytes(data.tolist())
        if nbytes:
            assert len(written) == start + nbytes and not any(written[:start])
        back = placed(torch.zeros_like(data), aligned)
        assert engine.read(back, path, start).wait() == nbytes
        assert torch.equal(back, data)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_shapes(engine, dtype, tmp_path):
    for shape in ((), (3,), (5, 7, 11), (0, 4), (1025, 3)):
        numel = max(1, torch.Size(shape).numel())
        raw = content(numel * dtype.itemsize)
        raw = raw % 2 if dtype is torch.bool else raw
        tensor = raw.view(dtype)[: torch.Size(shape).numel()].view(shape)
        engine.write(tensor, tmp_path / "t").wait()
        back = torch.empty(shape, dtype=dtype)
        engine.read(back, tmp_path / "t").wait()
        assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_scattered_tensors(engine, tmp_path):
    base = torch.arange(600 * 500, dtype=torch.float32).view(600, 500)
    for view in (base.t(), base[:, ::3], base[10:20, 5:6], base.expand(2, 600, 500)):
        engine.write(view, tmp_path / "t").wait()
        assert on_disk(tmp_path / "t") == view.contiguous().numpy().tobytes()
    target = torch.zeros(500, 600).t()
    engine.write(base, tmp_path / "t").wait()
    engine.read(target, tmp_path / "t").wait()
    assert torch.equal(target, base) and not target.is_contiguous()


def test_neighbours_stay_as_they_are(engine, tmp_path):
    path = tmp_path / "t"
    before = content(100_000, 1)
    path.write_bytes(bytes(before.tolist()))
    piece = content(33_333, 2)
    engine.write(piece, path, 12_345).wait()
    expected = before.clone()
    expected[12_345 : 12_345 + 33_333] = piece
    assert on_disk(path) == bytes(expected.tolist())


def test_a_whole_tensor_leaves_no_stale_tail_and_a_placed_one_keeps_it(engine, tmp_path):
    path = tmp_path / "t"
    for offset, left in ((None, 5000), (0, 20_000)):
        path.write_bytes(b"x" * 20_000)
        engine.write(content(5000), path, offset).wait()
        assert path.stat().st_size == left


def test_beyond_2_gib_in_a_sparse_file(engine, tmp_path):
    path, far = tmp_path / "t", (5 << 30) + 7
    data = content(70_001)
    with open(path, "wb") as file:
        file.truncate(far)
    engine.write(data, path, far).wait()
    assert path.stat().st_size == far + data.numel() and path.stat().st_blocks * 512 < 1 << 20
    back = torch.zeros(data.numel() + 9, dtype=torch.uint8)
    engine.read(back, path, far - 9).wait()
    assert not back[:9].any() and torch.equal(back[9:], data)


def wide_but_small(nbytes, window=32 << 20):
    """A tensor of `nbytes` addresses over `window` bytes of memory that appear again and again.

    Touching 2 GiB would take seconds.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    size = -(-nbytes // window) * window
    base = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    fd, fixed = os.memfd_create("window"), 0x10
    os.truncate(fd, window)
    for start in range(0, size, window):
        place = libc.mmap(base + start, window, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | fixed, fd, 0)
        assert place == base + start
    os.close(fd)
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(base), dtype=torch.uint8)


def test_one_transfer_of_more_than_2_gib_from_a_sparse_file(tmp_path):
    """A file of holes with its last bytes real; and the same file five bytes shorter."""
    path, nbytes = tmp_path / "t", (2 << 30) + 4099
    with open(path, "wb") as file:
        file.truncate(nbytes)
        file.seek(nbytes - 5)
        file.write(b"12345")
    room = wide_but_small(nbytes)
    with dsx_nvme.Engine(queue_depth=1, block_size=64 << 20) as engine:
        assert engine.read(room, path).wait() == nbytes
        assert bytes(room[-6:].tolist()) == b"\x0012345"
        with open(path, "r+b") as file:
            file.truncate(nbytes - 5)
        with pytest.raises(dsx_nvme.errors.EndOfFileError) as caught:
            engine.read(room[-9000:], path, nbytes - 9000).wait()
        assert caught.value.offset == nbytes - 5


def test_random_operations_against_plain_files(engine, tmp_path):
    rng = random.Random(0)
    path, model = tmp_path / "t", bytearray()
    path.touch()
    for step in range(120):
        offset = rng.choice([rng.randrange(300_000), rng.randrange(60) * 4096])
        nbytes = rng.choice([rng.randrange(1, 9000), rng.randrange(1, 400_000), rng.randrange(1, 40) * 4096])
        data = placed(content(nbytes, step), rng.random() < 0.5)
        if rng.random() < 0.6:
            engine.write(data, path, offset).wait()
            model.extend(bytes(max(0, offset + nbytes - len(model))))
            model[offset : offset + nbytes] = bytes(data.tolist())
        elif offset + nbytes <= len(model):
            engine.read(data, path, offset).wait()
            assert bytes(data.tolist()) == bytes(model[offset : offset + nbytes])
        else:
            with pytest.raises(dsx_nvme.errors.EndOfFileError):
                engine.read(data, path, offset).wait()
        if rng.random() < 0.1:
            cut = rng.randrange(len(model) + 1)
            os.truncate(path, cut)
            del model[cut:]
    assert on_disk(path) == bytes(model)


def test_a_thousand_concurrent_operations(engine, tmp_path):
    """Disjoint ranges of a few files, written all at once, then read back all at once."""
    rng = random.Random(1)
    paths = [tmp_path / f"{i}" for i in range(5)]
    ends = dict.fromkeys(paths, 0)
    jobs = []
    for seed in range(1000):
        path, nbytes = rng.choice(paths), rng.choice([1, 100, 4096, 9000, 30_000])
        ends[path] += rng.choice([0, 0, 13, 4096])
        jobs.append((path, ends[path], content(nbytes, seed)))
        ends[path] += nbytes
    rng.shuffle(jobs)
    for path, offset, data in jobs:
        engine.write(data, path, offset)
    engine.wait_all()
    backs = [torch.zeros_like(data) for _, _, data in jobs]
    tickets = [engine.read(back, path, offset) for back, (path, offset, _) in zip(backs, jobs)]
    assert [t.wait() for t in tickets] == [data.numel() for _, _, data in jobs]
    assert all(torch.equal(back, data) for back, (_, _, data) in zip(backs, jobs))


@pytest.mark.parametrize("options", [{"single_submit": True}, {"overlap_events": False}, {"direct": False}], ids=str)
def test_settings_change_no_bytes(options, tmp_path):
    data = content(3_000_001)
    for name in ENGINES:
        with dsx_nvme.Engine(name, block_size=1 << 16, queue_depth=8, threads=3, **options) as engine:
            for start in (0, 1):  # with and without bounce buffers
                engine.write(data[start:], tmp_path / "t").wait()
                back = torch.zeros_like(data)
                engine.read(back[start:], tmp_path / "t").wait()
                assert torch.equal(back[start:], data[start:])


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
def test_what_completes_while_submitting_is_not_waited_for_again(direct, tmp_path):
    # Two places, each filled and finished by its own submission: nothing is left that could end a wait.
    data = content(1 << 20)
    for name in ENGINES:
        options = {"block_size": 1 << 16, "queue_depth": 2, "single_submit": True, "direct": direct}
        with dsx_nvme.Engine(name, **options) as engine:
            for start in (0, 1):
                for _ in range(5):
                    engine.write(data[start:], tmp_path / "t").wait()
                assert on_disk(tmp_path / "t") == data[start:].numpy().tobytes()


@pytest.mark.native
@pytest.mark.skipif(native.refusal("io_uring") != "", reason="needs io_uring")
def test_registered_memory_and_files_are_used(tmp_path):
    with dsx_nvme.Engine("io_uring", block_size=1 << 18) as engine:
        tensor = dsx_nvme.empty(1 << 20, dtype=torch.uint8).copy_(content(1 << 20))
        engine.write(tensor, tmp_path / "t").wait()  # the engine exists from here on
        engine.register(tensor)
        file = engine.open(tmp_path / "t", write=True)
        if not file.access.direct:
            pytest.skip("needs direct I/O")
        for round in range(3):
            tensor.fill_(round)
            engine.write(tensor, file, 0).wait()
            assert set((tmp_path / "t").read_bytes()) == {round}
        stats = engine.stats()["io_uring"]
        if stats["registration_refused"]:
            pytest.skip(stats["registration_refused"])
        assert stats["registered_buffers"] == stats["registered_files"] == 1 and stats["fixed_submissions"] >= 12
        engine.unregister(tensor)
        engine.close_file(file)
        engine.write(tensor, tmp_path / "t").wait()
        assert engine.stats()["io_uring"]["fixed_submissions"] == stats["fixed_submissions"]


@pytest.mark.native
@pytest.mark.skipif(native.module() is None, reason="needs the compiled module")
def test_direct_io_is_used_where_the_file_system_has_it(tmp_path):
    found = dsx_nvme.access(tmp_path)
    with dsx_nvme.Engine() as engine:
        engine.write(content((1 << 20) + 1), tmp_path / "t").wait()
        ((kind, stats),) = engine.stats().items()
    assert kind == found.engine
    assert stats["direct_bytes"] == (1 << 20 if found.direct else 0)
    assert stats["bytes_written"] == (1 << 20) + 1
