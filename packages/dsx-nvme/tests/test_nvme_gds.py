"""`gds_handle` over a stand-in for cuFile that moves host memory and keeps a record.

Pinning, splitting, many transfers at once, devices, registration of files, short counts, errors; and without cuFile.
"""

import contextlib
import ctypes
import errno
import os
import shutil
import subprocess
import threading

import dsx_nvme
import dsx_nvme.errors
import pytest
import torch
from dsx_nvme import cufile, staging

# The calls of the real library as NVIDIA's reference gives them; `fake_*` are the test's own strings to pull.
SOURCE = r"""
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <set>
#include <mutex>
#include <sys/types.h>
#include <unistd.h>
struct Error { int code, cuda; };
struct Descriptor { int type; union { int fd; void* pointer; } handle; const void* operations; };
static std::mutex lock;
static std::set<void*> files; static std::set<const void*> buffers;
static long moves, registered, most = 1 << 30, fail_code, driver_code;
extern "C" {
void fake_set(long at_most, long code, long driver) {
    most = at_most; fail_code = code; driver_code = driver; moves = registered = 0;
}
long fake_moves() { return moves; }
long fake_files() { return (long)files.size(); }
long fake_registered() { return registered; }
long fake_buffers() { return (long)buffers.size(); }
Error cuFileDriverOpen() { return {(int)driver_code, 0}; }
Error cuFileHandleRegister(void** out, Descriptor* d) {
    std::lock_guard<std::mutex> g(lock);
    if (d->type != 1 || d->handle.fd < 0) return {5001, 0};
    int* f = new int(d->handle.fd); files.insert(f); *out = f; ++registered; return {0, 0};
}
void cuFileHandleDeregister(void* f) { std::lock_guard<std::mutex> g(lock); files.erase(f); delete (int*)f; }
Error cuFileBufRegister(const void* p, size_t n, int) {
    std::lock_guard<std::mutex> g(lock); buffers.insert(p); return {n ? 0 : 5002, 0};
}
Error cuFileBufDeregister(const void* p) {
    std::lock_guard<std::mutex> g(lock); return {buffers.erase(p) ? 0 : 5003, 0};
}
static ssize_t moved(ssize_t n) { std::lock_guard<std::mutex> g(lock); ++moves; return n; }
static bool failing(ssize_t* r) {
    if (fail_code > 0) { *r = -fail_code; return true; }
    if (fail_code < 0) { errno = (int)-fail_code; *r = -1; return true; }
    return false;
}
// O_DIRECT files want alignment that host memory here need not have: the stand-in opens the file again without it.
static int plain(void* f) { return dup(*(int*)f); }
ssize_t cuFileRead(void* f, void* base, size_t n, off_t at, off_t start) {
    ssize_t r; if (failing(&r)) return r;
    size_t k = n < (size_t)most ? n : (size_t)most; int fd = plain(f);
    r = moved(pread(fd, (char*)base + start, k, at)); int e = errno; close(fd); errno = e; return r;
}
ssize_t cuFileWrite(void* f, const void* base, size_t n, off_t at, off_t start) {
    ssize_t r; if (failing(&r)) return r;
    size_t k = n < (size_t)most ? n : (size_t)most; int fd = plain(f);
    r = moved(pwrite(fd, (const char*)base + start, k, at)); int e = errno; close(fd); errno = e; return r;
}
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler for the stand-in")
    folder = tmp_path_factory.mktemp("cufile")
    (folder / "fake.cpp").write_text(SOURCE)
    subprocess.check_call([compiler, "-shared", "-fPIC", "-O1", "-o", folder / "libcufile.so", folder / "fake.cpp"])
    return folder / "libcufile.so"


@pytest.fixture
def fake(library, monkeypatch):
    """The stand-in, found as the real library is; tensors of host memory count as a device's."""
    monkeypatch.setenv(cufile.LIBRARY_VARIABLE, str(library))
    monkeypatch.setattr(staging, "on_device", lambda tensor: True)
    loaded = ctypes.CDLL(str(library))
    loaded.fake_set.argtypes = [ctypes.c_long] * 3
    loaded.fake_set(1 << 30, 0, 0)
    yield loaded
    assert loaded.fake_files() == 0


def handle(threads=1):
    """Through the page cache: the stand-in has no aligned memory to offer."""
    found = dsx_nvme.gds_handle(intra_op_parallelism=threads)
    object.__setattr__(found.engine.options, "direct", False)
    return found


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("most", [1 << 30, 5000])
def test_bytes_arrive_whatever_the_library_splits(fake, threads, most, tmp_path):
    with handle(threads) as h:
        assert h.mode == "cufile" and h.reason == ""
        for numel in (0, 1, 1023, 50_001):
            fake.fake_set(most, 0, 0)
            data, back = torch.randn(numel), torch.zeros(numel)
            assert h.sync_pwrite(data, str(tmp_path / "t")) == 1
            assert (tmp_path / "t").read_bytes() == data.numpy().tobytes()
            assert h.async_pread(back, str(tmp_path / "t")) == 0 and h.wait() == 1
            assert torch.equal(back, data)
            assert fake.fake_moves() >= 2 * (numel > 0) * max(min(threads, numel * 4 // 4096), numel * 4 // most)
        h.sync_pwrite(torch.ones(10), str(tmp_path / "t"), 4)
        assert (tmp_path / "t").stat().st_size == 50_001 * 4


@pytest.mark.parametrize("transfers, threads", [(8, 2), (20, 4), (20, 1)])
def test_many_transfers_at_once_come_to_their_end(fake, transfers, threads, tmp_path):
    """Transfers of several parts each, more of them than the pool has threads."""
    tensors = [torch.full((9000,), float(i)) for i in range(transfers)]
    backs = [torch.zeros(9000) for _ in range(transfers)]
    counts = []

    def work():
        with handle(threads) as h:
            for i, t in enumerate(tensors):
                h.async_pwrite(t, str(tmp_path / f"{i}"))
            counts.append(h.wait())
            for i, back in enumerate(backs):
                h.async_pread(back, str(tmp_path / f"{i}"))
            counts.append(h.wait())

    runner = threading.Thread(target=work, daemon=True)
    runner.start()
    runner.join(60)
    assert counts == [transfers, transfers], "the transfers stand still"
    assert all(map(torch.equal, tensors, backs))


def test_every_call_of_the_library_is_made_on_the_tensors_device(fake, tmp_path, monkeypatch):
    """Threads begin on device 0.

    Here host memory plays a tensor of `cpu`; what counts is which thread set it, and when.
    """
    current, seen = threading.local(), []

    @contextlib.contextmanager
    def guard(device):
        current.device = device
        yield
        del current.device

    monkeypatch.setattr(staging, "device_guard", guard)
    for name in ("transfer", "pin", "unpin"):
        real = getattr(cufile.CuFile, name)

        def noted(self, *args, real=real, name=name):
            seen.append((name, threading.get_ident(), getattr(current, "device", None)))
            return real(self, *args)

        monkeypatch.setattr(cufile.CuFile, name, noted)
    with handle(3) as h:
        t = torch.ones(50_000)
        h.pin_device_tensor(t)
        h.sync_pwrite(t, str(tmp_path / "t"))
        h.sync_pread(t, str(tmp_path / "t"))
    names = [name for name, _, _ in seen]
    assert names.count("transfer") == 6 and "pin" in names and "unpin" in names
    assert all(device == torch.device("cpu") for _, _, device in seen)
    assert threading.get_ident() not in {thread for name, thread, _ in seen if name == "transfer"}


def test_the_guard_sets_the_device_that_the_tensor_lies_on(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(entered.append(device)))
    with staging.device_guard(torch.device("cuda", 1)), staging.device_guard(torch.device("cpu")):
        pass
    assert entered == [1]


def test_a_file_is_registered_once_for_as_long_as_it_is_open(fake, tmp_path):
    with handle(2) as h:
        t = torch.arange(50_000, dtype=torch.float32)
        file = h.engine.open(tmp_path / "t", write=True)
        for start in range(0, 50_000, 5000):
            h.async_pwrite(t[start : start + 5000], file, start * 4)
        h.wait()
        back = torch.zeros(50_000)
        h.sync_pread(back, file)
        assert torch.equal(back, t) and fake.fake_registered() == fake.fake_files() == 1
        h.engine.close_file(file)
        assert fake.fake_files() == 0
        h.async_pread(back, str(tmp_path / "t"))
        h.async_pread(torch.zeros(10), str(tmp_path / "t"))  # the same file, while it is open
        h.wait()
        assert fake.fake_registered() <= 3 and fake.fake_files() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_use_its_parents_library(fake, tmp_path):
    torch.set_num_threads(1)
    with handle() as h:
        h.sync_pwrite(torch.ones(10), str(tmp_path / "t"))
        child = os.fork()
        if child == 0:
            try:
                h.sync_pwrite(torch.ones(10), str(tmp_path / "t"))
            except dsx_nvme.errors.ForkError:
                os._exit(0)
            finally:
                os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_pinning(fake):
    with handle() as h:
        t = (
            h.new_pinned_device_tensor(1000, torch.zeros(1, dtype=torch.bfloat16))
            if torch.cuda.is_available()
            else torch.zeros(1000)
        )
        assert h.pin_device_tensor(t) is True and h.is_pinned(t) and fake.fake_buffers() == 1
        assert h.pin_device_tensor(t) is True and fake.fake_buffers() == 1
        assert h.unpin_device_tensor(t) is True and fake.fake_buffers() == 0
        assert h.unpin_device_tensor(t) is False and not h.is_pinned(t)
        h.pin_device_tensor(t)
    assert fake.fake_buffers() == 0  # closing unpins


def test_new_pinned_device_tensor_frees_once(fake):
    with handle() as h:
        t = h.new_pinned_device_tensor(77, torch.zeros(3, dtype=torch.int16))
        assert t.shape == (77,) and t.dtype == torch.int16 and fake.fake_buffers() == 1
        assert h.free_pinned_device_tensor(t) is True and h.free_pinned_device_tensor(t) is False


def test_errors_of_the_library_are_os_errors(fake, tmp_path):
    with handle(2) as h:
        h.sync_pwrite(torch.zeros(5000), str(tmp_path / "t"))
        for code, number in ((-errno.ENOSPC, errno.ENOSPC), (5027, errno.EIO)):
            fake.fake_set(1 << 30, code, 0)
            with pytest.raises(dsx_nvme.errors.TransferError) as caught:
                h.sync_pread(torch.zeros(5000), str(tmp_path / "t"))
            assert caught.value.errno == number and caught.value.filename == str(tmp_path / "t")
            assert code < 0 or "code 5027" in str(caught.value)
        fake.fake_set(1 << 30, 0, 0)
        with pytest.raises(dsx_nvme.errors.EndOfFileError, match="the file ends at 20000, "):
            h.sync_pread(torch.zeros(9000), str(tmp_path / "t"))
        with pytest.raises(dsx_nvme.errors.EndOfFileError, match="the file ends at 20000, "):
            h.sync_pread(torch.zeros(10), str(tmp_path / "t"), 10**12)


def test_a_driver_that_does_not_open_means_host_buffers(fake, tmp_path):
    fake.fake_set(1 << 30, 0, 5005)
    h = dsx_nvme.gds_handle()
    assert h.mode == "bounce" and "cuFileDriverOpen answered code 5005" in h.reason
    h.close()


def test_without_cufile_everything_works_through_host_buffers(monkeypatch, tmp_path):
    monkeypatch.setenv(cufile.LIBRARY_VARIABLE, str(tmp_path / "none.so"))
    with dsx_nvme.gds_handle() as h:
        assert h.mode == "bounce" and "none.so" in h.reason and not dsx_nvme.GDSBuilder().is_compatible()
        data, back = torch.randn(3000), torch.zeros(3000)
        h.sync_pwrite(data, str(tmp_path / "t"))
        h.sync_pread(back, str(tmp_path / "t"))
        assert torch.equal(data, back)
        t = h.new_pinned_device_tensor(10, data)
        assert t.numel() == 10 and h.is_pinned(t) and h.free_pinned_device_tensor(t) is True
        with pytest.raises(dsx_nvme.errors.TensorError, match="expected one on a GPU"):
            h.pin_device_tensor(data)
        assert h.unpin_device_tensor(data) is False
