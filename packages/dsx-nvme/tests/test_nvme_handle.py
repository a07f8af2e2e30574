"""The calls that DeepNVMe scripts make: names, arguments, answers, and the ways in which they must not lie."""

import inspect
import os

import dsx_nvme
import dsx_nvme.errors
import pytest
import torch


@pytest.fixture
def handle():
    with dsx_nvme.aio_handle(queue_depth=16, intra_op_parallelism=2) as found:
        yield found


def test_the_tutorials_calls(tmp_path):
    """As scripts write it, file by file."""
    path = str(tmp_path / "test.pt")
    h = (
        dsx_nvme.AsyncIOBuilder()
        .load()
        .aio_handle(
            block_size=1048576, queue_depth=32, single_submit=False, overlap_events=True, intra_op_parallelism=8
        )
    )
    t = torch.arange(1024**2, dtype=torch.uint8)
    assert h.sync_pwrite(t, path) == 1 and os.path.getsize(path) == 1024**2
    os.unlink(path)
    assert h.async_pwrite(t, path) == 0 and h.wait() == 1 and os.path.getsize(path) == 1024**2
    back = torch.zeros_like(t)
    assert h.async_pread(back, path) == 0 and h.wait() == 1 and torch.equal(back, t)
    assert h.wait() == 0


def test_defaults_and_getters():
    parameters = inspect.signature(dsx_nvme.aio_handle).parameters
    defaults = {n: p.default for n, p in parameters.items() if n != "engine"}
    assert defaults == {
        "block_size": 1 << 20, "queue_depth": 128, "single_submit": False, "overlap_events": False,
        "intra_op_parallelism": 1,
    }  # fmt: skip
    assert list(inspect.signature(dsx_nvme.gds_handle).parameters) == list(parameters)
    with dsx_nvme.aio_handle(1000, 7, True, True, 3) as h:
        found = (
            h.get_block_size(), h.get_queue_depth(), h.get_single_submit(), h.get_overlap_events(),
            h.get_intra_op_parallelism(), h.get_alignment(),
        )  # fmt: skip
    assert found == (1000, 7, True, True, 3, 1536)


def test_several_transfers_and_one_wait(handle, tmp_path):
    tensors = [torch.full((1000 + i,), i, dtype=torch.int16) for i in range(20)]
    for i, t in enumerate(tensors):
        assert handle.async_pwrite(t, str(tmp_path / f"{i}")) == 0
    assert handle.wait() == 20
    backs = [torch.zeros_like(t) for t in tensors]
    for i, back in enumerate(backs):
        handle.pread(back, str(tmp_path / f"{i}"), False, True)
    assert handle.wait() == 20 and all(map(torch.equal, tensors, backs))


def test_offsets_place_tensors_in_one_file(handle, tmp_path):
    path = str(tmp_path / "t")
    parts = [torch.full((999,), i, dtype=torch.uint8) for i in range(4)]
    for i in (2, 0, 3, 1):
        handle.async_pwrite(parts[i], path, i * 999)
    assert handle.wait() == 4
    whole = torch.zeros(4 * 999, dtype=torch.uint8)
    assert handle.read(whole, path, False, 0) == 1 and torch.equal(whole, torch.cat(parts))
    middle = torch.zeros(999, dtype=torch.uint8)
    handle.sync_pread(middle, path, 2 * 999)
    assert torch.equal(middle, parts[2])


def test_descriptors_are_files_too(handle, tmp_path):
    fd = os.open(tmp_path / "t", os.O_RDWR | os.O_CREAT)
    handle.async_pwrite(torch.arange(500, dtype=torch.int32), fd, 512)
    assert handle.wait() == 1
    back = torch.zeros(500, dtype=torch.int32)
    handle.sync_pread(back, fd, 512)
    assert torch.equal(back, torch.arange(500, dtype=torch.int32)) and os.fstat(fd).st_size == 512 + 2000
    os.close(fd)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="needs O_DIRECT")
@pytest.mark.parametrize("flags", [os.O_APPEND, getattr(os, "O_DIRECT", 0)], ids=["O_APPEND", "O_DIRECT"])
def test_the_flags_of_a_descriptor_change_neither_offsets_nor_sizes(flags, handle, tmp_path):
    whole = torch.arange(3 * 4096 + 77, dtype=torch.int32).view(torch.uint8)
    try:
        fd = os.open(tmp_path / "t", os.O_RDWR | os.O_CREAT | flags)
    except OSError:
        pytest.skip("this file system refuses O_DIRECT")
    try:
        for start, stop in ((20_000, whole.numel()), (0, 20_000)):  # unaligned ends, the later part first
            handle.sync_pwrite(whole[start:stop], fd, start)
        assert (tmp_path / "t").read_bytes() == whole.numpy().tobytes()
        back = torch.zeros(1001, dtype=torch.uint8)
        handle.sync_pread(back, fd, 3)
        assert torch.equal(back, whole[3:1004])
    finally:
        os.close(fd)


def test_validation_compares_with_an_ordinary_read(handle, tmp_path, monkeypatch):
    path = str(tmp_path / "t")
    t = torch.arange(3000)
    assert handle.write(t, path, True) == handle.read(t.clone(), path, True) == handle.pwrite(t, path, True, False) == 1
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: b"\0" * n)
    with pytest.raises(OSError, match="differ"):
        handle.write(t, path, True)
    with pytest.raises(dsx_nvme.errors.OptionError, match="synchronous"):
        handle.pwrite(t, path, True, True)


def test_wait_reports_the_failure_after_all_have_ended(handle, tmp_path):
    (tmp_path / "short").write_bytes(b"abc")
    good = torch.zeros(10)
    handle.async_pread(torch.zeros(1000), str(tmp_path / "short"))
    handle.async_pwrite(good, str(tmp_path / "good"))
    with pytest.raises(dsx_nvme.errors.EndOfFileError) as caught:
        handle.wait()
    assert caught.value.filename == str(tmp_path / "short") and (tmp_path / "good").stat().st_size == 40
    assert handle.wait() == 0


def test_locked_tensors(handle, tmp_path):
    example = torch.zeros(3, dtype=torch.bfloat16)
    t = handle.new_cpu_locked_tensor(100_001, example)
    assert t.shape == (100_001,) and t.dtype == torch.bfloat16 and t.data_ptr() % 4096 == 0
    assert handle.is_pinned(t) and handle.is_pinned(t[5:]) and not handle.is_pinned(example)
    t.fill_(2.5)
    handle.sync_pwrite(t, str(tmp_path / "t"))
    handle.async_pwrite(t, str(tmp_path / "u"))
    assert handle.free_cpu_locked_tensor(t) is True and handle.free_cpu_locked_tensor(t) is False
    assert handle.wait() == 1 and (tmp_path / "u").read_bytes() == (tmp_path / "t").read_bytes()
    assert t[0] == 2.5 and not handle.is_pinned(t)  # the memory goes with its last tensor
    assert handle.new_cpu_locked_tensor(0, example).numel() == 0


def test_functional_forms(tmp_path):
    path = str(tmp_path / "t")
    t, back = torch.arange(70_000), torch.zeros(70_000, dtype=torch.int64)
    assert dsx_nvme.aio_write(t, path, 4096, 8, False, True, True) == 1
    assert dsx_nvme.aio_read(back, path, 4096, 8, True, False, True) == 1
    assert torch.equal(t, back)
    target = torch.zeros(70_000, dtype=torch.float64)
    assert dsx_nvme.deepspeed_memcpy(target, t) == 1 and torch.equal(target.view(torch.int64), t)
    with pytest.raises(dsx_nvme.errors.TensorError):
        dsx_nvme.deepspeed_memcpy(target[1:], t)


def test_builders(capsys):
    assert dsx_nvme.AsyncIOBuilder().is_compatible() and dsx_nvme.AsyncIOBuilder().builder().NAME == "async_io"
    assert dsx_nvme.GDSBuilder().NAME == "gds" and dsx_nvme.GDSBuilder().load().gds_handle is dsx_nvme.gds_handle
    assert capsys.readouterr() == ("", "")
    dsx_nvme.AsyncIOBuilder().is_compatible(verbose=True)
    assert "async_io" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [{"block_size": 0}, {"queue_depth": -1}, {"intra_op_parallelism": 0}, {"engine": "magic"}, {"block_size": 1.5}],
)
def test_options_that_are_none(options):
    with pytest.raises(dsx_nvme.errors.OptionError):
        dsx_nvme.aio_handle(**options)


def test_tensors_that_have_no_bytes(handle, tmp_path):
    class Wrapped(torch.Tensor):
        pass

    for bad in (torch.empty(3, device="meta"), torch.eye(3).to_sparse(), torch.zeros(3).as_subclass(Wrapped), [1, 2]):
        with pytest.raises(dsx_nvme.errors.TensorError):
            handle.sync_pwrite(bad, str(tmp_path / "t"))
    assert not (tmp_path / "t").exists()
    handle.sync_pwrite(torch.nn.Parameter(torch.ones(3)), str(tmp_path / "t"))


def test_config_section_makes_the_handle(tmp_path):
    section = {"aio": {"single_submit": "false", "overlap_events": "true", "num_threads": 8, "queue_depth": 32}}
    config = dsx_nvme.AioConfig.from_dict(section)
    with config.handle() as h:
        assert (h.get_intra_op_parallelism(), h.get_queue_depth(), h.get_overlap_events()) == (8, 32, True)
    with config.engine() as engine:
        assert engine.write(torch.zeros(4), tmp_path / "t").wait() == 16
    for bad in ({"queue_dpth": 1}, {"queue_depth": "8"}, {"queue_depth": True}, {"thread_count": 2, "num_threads": 3}):
        with pytest.raises(dsx_nvme.errors.OptionError):
            dsx_nvme.AioConfig.from_dict(bad)
