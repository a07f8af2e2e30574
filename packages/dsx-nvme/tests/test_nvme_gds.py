"""`gds_handle` over a stand-in for cuFile that moves host memory and keeps a record: pinning, splitting, short counts, errors, and the way without it."""

import ctypes
import errno
import shutil
import subprocess

import dsx_nvme
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
static long moves, most = 1 << 30, fail_code, driver_code;
extern "C" {
void fake_set(long at_most, long code, long driver) { most = at_most; fail_code = code; driver_code = driver; moves = 0; }
long fake_moves() { return moves; }
long fake_files() { return (long)files.size(); }
long fake_buffers() { return (long)buffers.size(); }
Error cuFileDriverOpen() { return {(int)driver_code, 0}; }
Error cuFileHandleRegister(void** out, Descriptor* d) {
    std::lock_guard<std::mutex> g(lock);
    if (d->type != 1 || d->handle.fd < 0) return {5001, 0};
    int* f = new int(d->handle.fd); files.insert(f); *out = f; return {0, 0};
}
void cuFileHandleDeregister(void* f) { std::lock_guard<std::mutex> g(lock); files.erase(f); delete (int*)f; }
Error cuFileBufRegister(const void* p, size_t n, int) { std::lock_guard<std::mutex> g(lock); buffers.insert(p); return {n ? 0 : 5002, 0}; }
Error cuFileBufDeregister(const void* p) { std::lock_guard<std::mutex> g(lock); return {buffers.erase(p) ? 0 : 5003, 0}; }
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
            with pytest.raises(dsx_nvme.TransferError) as caught:
                h.sync_pread(torch.zeros(5000), str(tmp_path / "t"))
            assert caught.value.errno == number and caught.value.filename == str(tmp_path / "t")
            assert code < 0 or "code 5027" in str(caught.value)
        fake.fake_set(1 << 30, 0, 0)
        with pytest.raises(dsx_nvme.EndOfFileError):
            h.sync_pread(torch.zeros(9000), str(tmp_path / "t"))


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
        with pytest.raises(dsx_nvme.TensorError, match="expected one on a GPU"):
            h.pin_device_tensor(data)
        assert h.unpin_device_tensor(data) is False
