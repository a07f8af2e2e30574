// The only file that knows Python: converts arguments, releases the GIL, and keeps a forked child away from the
// parent's threads. A std::system_error becomes an OSError with its errno.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <unistd.h>

#include <stdexcept>
#include <string>
#include <system_error>

#include "dsx_nvme/engine.h"
#include "dsx_nvme/system.h"

namespace py = pybind11;
using namespace dsx_nvme;

namespace {

Kind kind_of(const std::string& name) {
    if (name == "io_uring") return Kind::uring;
    if (name == "libaio") return Kind::libaio;
    if (name == "threads") return Kind::threads;
    throw std::invalid_argument("engine '" + name + "': expected io_uring, libaio or threads");
}

char* pointer(uintptr_t address) { return reinterpret_cast<char*>(address); }

// An engine that remembers its process. In a forked child its threads do not exist and its locks may be held for
// ever: there every call is refused, and the destructor leaves everything as it is.
class OwnedEngine {
  public:
    explicit OwnedEngine(const Options& o) : engine_(std::make_unique<Engine>(o)), owner_(getpid()) {}
    ~OwnedEngine() {
        if (getpid() != owner_) {
            (void)engine_.release();
        } else {
            py::gil_scoped_release unlocked;
            engine_.reset();
        }
    }
    Engine& get() {
        if (getpid() != owner_) throw std::runtime_error("this I/O engine belongs to the parent process");
        if (!engine_) throw std::runtime_error("this I/O engine is closed");
        return *engine_;
    }
    void close() {
        if (!engine_) return;
        get();
        auto last = std::move(engine_);
        py::gil_scoped_release unlocked;
        last.reset();
    }

  private:
    std::unique_ptr<Engine> engine_;
    pid_t owner_;
};

py::dict statistics(OwnedEngine& owned) {
    Engine& e = owned.get();
    const Statistics& s = e.statistics();
    py::dict d;
    d["bytes_read"] = s.bytes_read.load();
    d["bytes_written"] = s.bytes_written.load();
    d["direct_bytes"] = s.direct_bytes.load();
    d["bounced_bytes"] = s.bounced_bytes.load();
    d["requests"] = s.requests.load();
    d["submissions"] = s.submissions.load();
    d["retries"] = s.retries.load();
    d["partial"] = s.partial.load();
    d["direct_refused"] = s.direct_refused.load();
    d["registered_buffers"] = s.registered_buffers.load();
    d["registered_files"] = s.registered_files.load();
    d["fixed_submissions"] = s.fixed_submissions.load();
    d["registration_refused"] = e.refused_registration();
    return d;
}

uint64_t submit(OwnedEngine& owned, bool write, int direct_fd, int plain_fd, int file_slot, uintptr_t memory,
                uint64_t nbytes, uint64_t offset, uint32_t memory_align, uint32_t offset_align) {
    Transfer t;
    t.write = write;
    t.direct_fd = direct_fd;
    t.plain_fd = plain_fd;
    t.file_slot = file_slot;
    t.memory = pointer(memory);
    t.nbytes = nbytes;
    t.offset = offset;
    t.memory_align = memory_align;
    t.offset_align = offset_align;
    Engine& e = owned.get();
    py::gil_scoped_release unlocked;
    return e.submit(t);
}

// None while it is not finished.
py::object wait(OwnedEngine& owned, uint64_t id, double seconds) {
    Engine& e = owned.get();
    Outcome o;
    {
        py::gil_scoped_release unlocked;
        o = e.wait(id, seconds);
    }
    if (!o.finished) return py::none();
    return py::make_tuple(o.moved, o.error, o.error_offset, o.lost);
}

const char* sanitizer() {
#if defined(__SANITIZE_ADDRESS__)
    return "address";
#elif defined(__SANITIZE_THREAD__)
    return "thread";
#else
    return "";
#endif
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    py::register_local_exception_translator([](std::exception_ptr p) {
        try {
            if (p) std::rethrow_exception(p);
        } catch (const std::system_error& e) {
            PyErr_SetObject(PyExc_OSError, py::make_tuple(e.code().value(), e.what()).ptr());
        }
    });
    m.attr("ABI") = 2;
    m.attr("END_OF_FILE") = kEndOfFile;
    m.def("sanitizer", &sanitizer);
    m.def("probe", [](const std::string& name) {
        const Kind kind = kind_of(name);
        py::gil_scoped_release unlocked;
        return probe(kind);
    });
    m.def("direct_alignment", &direct_alignment);
    m.def("reserve", &reserve, py::call_guard<py::gil_scoped_release>());
    m.def("punch", &punch, py::call_guard<py::gil_scoped_release>());
    m.def("crc32", [](uint32_t seed, uintptr_t p, size_t n) {
        py::gil_scoped_release unlocked;
        return crc32(seed, pointer(p), n);
    });
    py::class_<OwnedEngine>(m, "Engine")
        .def(py::init([](const std::string& kind, uint64_t block_size, unsigned queue_depth, unsigned workers,
                         bool single_submit, bool overlap) {
            Options o;
            o.kind = kind_of(kind);
            o.block_size = block_size;
            o.queue_depth = queue_depth;
            o.workers = workers;
            o.single_submit = single_submit;
            o.overlap = overlap;
            py::gil_scoped_release unlocked;
            return std::make_unique<OwnedEngine>(o);
        }))
        .def("submit", &submit)
        .def("wait", &wait)
        .def("poll", [](OwnedEngine& e, uint64_t id) { return e.get().poll(id); })
        .def("add_buffer", [](OwnedEngine& e, uintptr_t p, uint64_t n) { return e.get().add_buffer(pointer(p), n); })
        .def("drop_buffer", [](OwnedEngine& e, int slot) { e.get().drop_buffer(slot); })
        .def("add_file", [](OwnedEngine& e, int fd) { return e.get().add_file(fd); })
        .def("drop_file", [](OwnedEngine& e, int slot) { e.get().drop_file(slot); })
        .def("inject_results", [](OwnedEngine& e, const std::vector<int64_t>& r) { e.get().inject_results(r); })
        .def("inject_failure", [](OwnedEngine& e, int error, double s) { e.get().inject_failure(error, s); })
        .def("statistics", &statistics)
        .def("close", &OwnedEngine::close);
}
