"""What goes wrong on disk ends in an OSError with file, offset and errno, never in silent zeros.

Interruptions and partial results are mended.
"""

import errno
import os
import resource
import shutil
import subprocess
import sys
import tempfile

import dsx_nvme
import dsx_nvme.errors
import pytest
import torch
from dsx_nvme import native

ENGINES = [*(e for e in native.ENGINES if not native.refusal(e)), "python"]
NATIVE = [e for e in ENGINES if e != "python"]


@pytest.fixture(params=ENGINES)
def engine(request):
    with dsx_nvme.Engine(request.param, block_size=1 << 16, queue_depth=4) as found:
        yield found


def in_child(code, *arguments):
    """Run code in a fresh interpreter; its last line of output."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture
def limited():
    """A limit on the size of files, lifted afterwards."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield 1 << 20
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_past_the_file_size_limit_is_an_error(engine, limited, tmp_path):
    with pytest.raises(OSError) as caught:
        engine.write(torch.ones(4 << 20, dtype=torch.uint8), tmp_path / "t").wait()
    assert caught.value.errno == errno.EFBIG and caught.value.filename == str(tmp_path / "t")
    assert "ulimit -f" in str(caught.value)


def test_a_write_that_stops_inside_an_existing_file_is_an_error(engine, tmp_path, limited):
    """Nothing to reserve: the limit strikes in the middle of the transfer, as a short write first."""
    with dsx_nvme.Engine(engine.options.engine, block_size=1 << 18, direct=False) as plain:
        with pytest.raises(OSError) as caught:
            plain.write(torch.ones(4 << 20, dtype=torch.uint8), tmp_path / "t").wait()
    assert caught.value.errno == errno.EFBIG and caught.value.offset == limited


@pytest.mark.parametrize("nbytes", [4000, 516])
def test_sizes_that_are_no_sectors_arrive_whole(engine, nbytes, tmp_path):
    data = torch.arange(nbytes, dtype=torch.int32).to(torch.uint8)
    engine.write(data, tmp_path / "t").wait()
    assert (tmp_path / "t").read_bytes() == bytes(data.tolist())


def test_a_misaligned_pointer_arrives_whole(engine, tmp_path):
    data = torch.arange(2049, dtype=torch.int32)[1:]
    assert data.data_ptr() % 8 == 4
    engine.write(data, tmp_path / "t").wait()
    assert (tmp_path / "t").read_bytes() == data.numpy().tobytes()


def test_a_file_that_is_too_short_is_an_error(engine, tmp_path):
    for size in (0, 1, 4096, 70_000, 131_072):
        (tmp_path / "t").write_bytes(b"x" * size)
        with pytest.raises(dsx_nvme.errors.EndOfFileError) as caught:
            engine.read(torch.zeros(200_000, dtype=torch.uint8), tmp_path / "t").wait()
        assert caught.value.errno == errno.ENODATA and f"ends at {size}" in str(caught.value)


def test_missing_files_folders_and_closed_descriptors(engine, tmp_path):
    tensor = torch.zeros(10)
    with pytest.raises(FileNotFoundError):
        engine.read(tensor, tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        engine.write(tensor, tmp_path / "none" / "t")
    with pytest.raises(IsADirectoryError):
        engine.write(tensor, tmp_path)
    with pytest.raises(OSError) as caught:
        engine.read(tensor, tmp_path)
    assert caught.value.errno == errno.EISDIR
    fd = os.open(tmp_path / "t", os.O_CREAT | os.O_RDWR)
    engine.write(tensor, fd, 0).wait()
    os.close(fd)
    with pytest.raises(OSError) as caught:
        engine.write(tensor, fd, 0)
    assert caught.value.errno == errno.EBADF


def test_a_device_that_is_full(engine):
    with pytest.raises(OSError) as caught:
        engine.write(torch.zeros(1 << 20), "/dev/full", 0).wait()
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == "/dev/full"


def test_a_device_that_fails(engine):
    """The kernel answers EIO for memory of this process that is not mapped."""
    with pytest.raises(OSError) as caught:
        engine.read(torch.zeros(1000), "/proc/self/mem", 0).wait()
    assert caught.value.errno == errno.EIO


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a small file system needs root"
)
def test_a_small_file_system_that_fills_up(engine):
    folder = tempfile.mkdtemp()
    if subprocess.call(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], stderr=subprocess.DEVNULL):
        os.rmdir(folder)
        pytest.skip("mount is not allowed here")
    try:
        with pytest.raises(OSError) as caught:
            engine.write(torch.ones(3 << 20, dtype=torch.uint8), f"{folder}/t").wait()
        assert caught.value.errno == errno.ENOSPC and caught.value.filename == f"{folder}/t"
        with dsx_nvme.TensorStore(f"{folder}/s", engine=engine, keep=False) as store, pytest.raises(OSError) as caught:
            store.put("a", torch.ones(3 << 20, dtype=torch.uint8)).wait()
        assert caught.value.errno == errno.ENOSPC
    finally:
        subprocess.check_call(["umount", folder])
        os.rmdir(folder)


def test_a_folder_that_is_read_only(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    tmp_path.chmod(0o755)
    code = """
import os, sys, torch, dsx_nvme
if os.geteuid() == 0: os.setuid(65534)  # root may write everywhere
try: dsx_nvme.Engine().write(torch.zeros(10), sys.argv[1])
except PermissionError as error: print(error.errno, error.filename == sys.argv[1])
"""
    folder = tempfile.mkdtemp(dir="/tmp")
    try:
        os.chmod(folder, 0o555)
        assert in_child(code, f"{folder}/t") == f"{errno.EACCES} True"
    finally:
        os.rmdir(folder)


@pytest.mark.skipif(native.native_status()["sanitizer"] != "", reason="the sanitizer itself needs address space")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux bounds address space")
def test_threads_that_a_limit_forbids_are_an_error_of_the_limit(tmp_path):
    code = """
import resource, sys, torch, dsx_nvme
tensor = torch.ones(1000)
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (4096 * pages + (1 << 20),) * 2)  # less than the stack of a thread
said = []
for what in (lambda: dsx_nvme.Engine().write(tensor, sys.argv[1] + "/t"),
             lambda: dsx_nvme.TensorStore(sys.argv[1]).put("a", tensor)):
    try: what()
    except dsx_nvme.errors.EngineStartError as error: said.append("ulimit -v" in str(error))
print(*said)
"""
    assert in_child(code, tmp_path) == "True True"


@pytest.mark.skipif(native.native_status()["sanitizer"] != "", reason="the sanitizer itself needs descriptors")
def test_few_descriptors_slow_things_down_but_break_nothing(tmp_path):
    code = """
import resource, sys, torch, dsx_nvme
engine = dsx_nvme.Engine(queue_depth=4)
tensor = torch.arange(5000)
engine.write(tensor, sys.argv[1] + "/first").wait()
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
for i in range(200): engine.write(tensor, f"{sys.argv[1]}/{i}")
engine.wait_all()
back = [torch.empty_like(tensor) for _ in range(200)]
for i in range(200): engine.read(back[i], f"{sys.argv[1]}/{i}")
engine.wait_all()
held = []
try:
    while True: held.append(open(sys.argv[1] + "/first"))
except OSError: pass
try: engine.read(tensor, sys.argv[1] + "/first")
except OSError as error: print(all(torch.equal(b, tensor) for b in back), error.errno)
"""
    assert in_child(code, tmp_path) == f"True {errno.EMFILE}"


@pytest.mark.native
@pytest.mark.skipif(not NATIVE, reason="needs the compiled module")
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("start", [0, 1], ids=["aligned", "bounced"])
def test_interruptions_and_partial_results_are_mended(name, start, tmp_path):
    data = dsx_nvme.empty(600_001, dtype=torch.uint8)
    data.copy_(torch.arange(600_001, dtype=torch.int64).to(torch.uint8))
    trouble = [
        -errno.EINVAL,
        -errno.EINTR,
        -errno.EAGAIN,
        512,
        0,
        4096 + 1,
        -errno.EINTR,
        100,
        -errno.EAGAIN,
        1,
        0,
        65_535,
    ]
    with dsx_nvme.Engine(name, block_size=1 << 16, queue_depth=4) as engine:
        part = data[start:]
        engine.write(part, tmp_path / "t").wait()
        native_engine = engine._state.engines[name]
        native_engine.inject_results(trouble)
        engine.write(part, tmp_path / "t").wait()
        assert (tmp_path / "t").read_bytes() == bytes(part.tolist())
        native_engine.inject_results(trouble)
        back = torch.zeros_like(part)
        engine.read(back, tmp_path / "t").wait()
        assert torch.equal(back, part)
        stats = engine.stats()[name]
        assert stats["retries"] >= 4 and stats["partial"] >= 4
        assert stats["direct_refused"] >= (1 if dsx_nvme.access(tmp_path).direct else 0)


@pytest.mark.native
@pytest.mark.skipif(not NATIVE, reason="needs the compiled module")
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_failing_block_fails_its_transfer_and_no_other(name, number, tmp_path):
    data = torch.ones(1 << 20, dtype=torch.uint8)
    with dsx_nvme.Engine(name, block_size=1 << 16, queue_depth=2) as engine:
        engine.write(data, tmp_path / "a").wait()
        engine._state.engines[name].inject_results([0, 0, -number])
        bad = engine.write(data, tmp_path / "a")
        with pytest.raises(OSError) as caught:
            bad.wait()
        assert caught.value.errno == number and caught.value.filename == str(tmp_path / "a")
        assert caught.value.offset % (1 << 16) == 0 and caught.value.op == "write" and caught.value.nbytes == 1 << 20
        with pytest.raises(OSError):
            bad.wait()  # asked again, it says the same
        assert engine.write(data, tmp_path / "b").wait() == 1 << 20


@pytest.mark.native
@pytest.mark.skipif(not NATIVE, reason="needs the compiled module")
@pytest.mark.parametrize("name", NATIVE)
def test_endless_interruption_is_an_error_in_the_end(name, tmp_path):
    with dsx_nvme.Engine(name, queue_depth=1) as engine:
        engine.write(torch.zeros(4096), tmp_path / "t").wait()
        engine._state.engines[name].inject_results([-errno.EAGAIN] * 3000)
        with pytest.raises(OSError) as caught:
            engine.write(torch.zeros(4096), tmp_path / "t").wait()
        assert caught.value.errno == errno.EAGAIN


def test_an_error_nobody_waited_for_is_raised_by_wait_all(engine, tmp_path):
    (tmp_path / "short").write_bytes(b"x")
    good = torch.zeros(1000, dtype=torch.uint8)
    engine.read(torch.zeros(1000), tmp_path / "short")
    ticket = engine.write(good, tmp_path / "t")
    with pytest.raises(dsx_nvme.errors.EndOfFileError):
        engine.wait_all()
    assert ticket.wait() == 1000
    assert engine.wait_all() == 0
