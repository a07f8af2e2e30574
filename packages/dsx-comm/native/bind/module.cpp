// The only file that knows Python. Addresses come in as integers; sizes and dtypes were checked by the Python side,
// ranks and codes are checked here. Every call that may wait releases the interpreter lock.
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>

#include "dsx_comm/mailbox.h"
#include "dsx_comm/queue.h"

namespace py = pybind11;
using namespace dsx;

namespace {

using Address = std::uintptr_t;
using Addresses = std::vector<Address>;
using Words = const Addresses&;  // in which storages keep the addresses of their memory (lease.h)

struct Mapping {
    void* at;
    size_t bytes;
    Mapping(int fd, size_t total, size_t eager) : bytes(total) {
        at = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (at == MAP_FAILED) throw std::runtime_error(std::string("mmap: ") + std::strerror(errno));
#ifdef MADV_POPULATE_WRITE
        (void)madvise(at, eager, MADV_POPULATE_WRITE);  // only saves page faults later; old kernels refuse
#else
        (void)eager;
#endif
    }
    Mapping(const Mapping&) = delete;
    ~Mapping() { munmap(at, bytes); }
};

struct Forked : std::runtime_error {
    using std::runtime_error::runtime_error;
};

pid_t this_process = getpid();  // a handler of fork keeps it right: asking the kernel in every call costs too much

// Whether a thread of its own could be started for `body`; a limit of memory or processes may forbid it.
template <class Body> bool started(Body body) {
    try {
        std::thread(std::move(body)).detach();
        return true;
    } catch (const std::system_error&) { return false; }
}

struct Core {
    Mapping mapping;
    Group group;
    Mailboxes boxes;
    Queue queue;
    const pid_t owner = this_process;
    Core(int fd, size_t total, size_t eager, Settings s)
        : mapping(fd, total, eager), group(mapping.at, std::move(s)), boxes(group) {}

    bool inherited() const { return owner != this_process; }
    // A child of the process would act in the place of its parent, with locks and threads as they were in the moment of
    // the fork.
    void check_process() const {
        if (inherited())
            throw Forked(
                "process " + std::to_string(this_process) + " was forked from process " + std::to_string(owner) +
                ", which is rank " + group.name(group.rank()) +
                ": it cannot take that rank's place in a group. Communicate in the parent, or start processes with "
                "the method 'spawn'");
    }
};
using CorePtr = std::shared_ptr<Core>;

// In a child nothing is destroyed: condition variables would wait for threads that it does not have.
void destroy(Core* core) {
    if (!core->inherited()) delete core;
}

template <class T> T* pointer(Address a) { return reinterpret_cast<T*>(a); }

ReduceSpec spec_of(int dtype, int reduce, bool average, double premultiply) {
    if (dtype < 0 || dtype >= static_cast<int>(Dtype::count) || reduce < 0 ||
        reduce >= static_cast<int>(Reduce::count) || !kernels().reduce[dtype][reduce])
        throw std::invalid_argument("no such reduction");
    return {static_cast<Dtype>(dtype), static_cast<Reduce>(reduce), premultiply, average};
}

// Python's handler of a signal (Ctrl-C) has only set a flag, and runs when the main thread asks.
void look_for_signals() {
    if (static_cast<pid_t>(syscall(SYS_gettid)) != getpid()) return;
    py::gil_scoped_acquire hold;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// An operation that was issued: a call in the queue, or a transfer.
struct Pending {
    CorePtr core;
    ItemPtr item;
    TransferPtr transfer;

    bool done() const {
        core->check_process();
        return item ? core->queue.finished(item) : core->boxes.finished(transfer);
    }
    void wait(double timeout) const {
        core->check_process();
        py::gil_scoped_release release;
        item ? core->queue.wait(item, look_for_signals) : core->boxes.wait(transfer, timeout);
    }
    int peer() const { return transfer ? transfer->peer : -1; }
};

struct PyGroup {
    CorePtr core;

    PyGroup(int fd, size_t total, size_t eager, int rank, std::vector<int> names, int lock_fd, double spin_us,
            double yield_us, double look_s, int64_t one_shot, const std::string& stores) {
        Settings s;
        if (stores == "plain") s.stores = StorePolicy::Way::plain;
        if (stores == "past") s.stores = StorePolicy::Way::non_temporal;
        s.look = look_for_signals;
        s.rank = rank, s.names = std::move(names), s.lock_fd = lock_fd, s.spin_us = spin_us, s.yield_us = yield_us;
        s.look_s = look_s, s.one_shot = one_shot;
        core = CorePtr(new Core(fd, total, eager, std::move(s)), destroy);
        if (static_cast<int>(core->group.settings().names.size()) != core->group.size())
            throw std::invalid_argument("one name per rank");
    }

    void check_root(int root) const {
        if (root < 0 || root >= core->group.size()) throw std::invalid_argument("no such rank in the group");
    }
    void check_parts(const std::vector<Addresses>& lists) const {
        for (auto& l : lists)
            if (static_cast<int>(l.size()) != core->group.size()) throw std::invalid_argument("one address per rank");
    }

    // None when it is done; the handle of an asynchronous call.
    py::object issue(Words words, bool asynchronous, std::function<void(Group&)> call) {
        core->check_process();
        auto run = [core = core.get(), call = std::move(call), leases = Leases(words)] {
            core->group.with_leases(leases, call);
        };
        if (!asynchronous) {
            {
                py::gil_scoped_release release;
                core->queue.run_now(run);
            }
            return py::none();
        }
        auto item = core->queue.submit(std::move(run));
        if (core->queue.wants_thread() && !started([core = core] { core->queue.serve(); })) {
            core->queue.thread_is_missing();  // under a limit of memory or processes: the call is done at once
            py::gil_scoped_release release;
            try {
                core->queue.wait(item);
            } catch (...) {}  // the item keeps it for who waits
        }
        return py::cast(Pending{core, item, nullptr});
    }

    Symmetric symmetric(int64_t memory, int64_t offset, const Addresses& bases) const {
        Symmetric s;
        if (memory < 0) return s;
        check_parts({bases});
        s.memory = memory, s.offset = offset;
        for (Address b : bases) s.bases.push_back(pointer<char>(b));
        return s;
    }

    py::object barrier(Words words, double timeout, bool async) {
        return issue(words, async, [=](Group& g) { g.barrier(timeout); });
    }
    py::object all_reduce(Address data, int64_t count, int dtype, int reduce, bool average, double premultiply,
                          int64_t memory, int64_t offset, const Addresses& bases, Words words, double timeout,
                          bool async) {
        auto spec = spec_of(dtype, reduce, average, premultiply);
        auto where = symmetric(memory, offset, bases);
        return issue(words, async, [=](Group& g) { g.all_reduce(pointer<void>(data), count, spec, where, timeout); });
    }
    py::object all_gather(Address source, Addresses outputs, int64_t bytes, int code, int64_t memory, int64_t offset,
                          const Addresses& bases, Words words, double timeout, bool async) {
        check_parts({outputs});
        auto where = symmetric(memory, offset, bases);
        return issue(words, async, [=](Group& g) {
            g.all_gather(pointer<void>(source), reinterpret_cast<char* const*>(outputs.data()), bytes, code, where,
                         timeout);
        });
    }
    py::object reduce_scatter(Address output, Addresses inputs, std::vector<int64_t> counts, int dtype, int reduce,
                              bool average, double premultiply, int64_t memory, int64_t offset, const Addresses& bases,
                              Words words, double timeout, bool async) {
        check_parts({inputs});
        if (counts.size() != inputs.size()) throw std::invalid_argument("one count per rank");
        auto spec = spec_of(dtype, reduce, average, premultiply);
        auto where = symmetric(memory, offset, bases);
        return issue(words, async, [=](Group& g) {
            g.reduce_scatter(pointer<void>(output), reinterpret_cast<const char* const*>(inputs.data()), counts.data(),
                             spec, where, timeout);
        });
    }
    py::object broadcast(Address data, int64_t bytes, int code, int root, Words words, double timeout, bool async) {
        check_root(root);
        return issue(words, async, [=](Group& g) { g.broadcast(pointer<void>(data), bytes, code, root, timeout); });
    }
    py::object reduce(Address data, int64_t count, int root, int dtype, int reduce, bool average, double premultiply,
                      Words words, double timeout, bool async) {
        check_root(root);
        auto spec = spec_of(dtype, reduce, average, premultiply);
        return issue(words, async, [=](Group& g) { g.reduce(pointer<void>(data), count, root, spec, timeout); });
    }
    py::object gather(Address source, Addresses outputs, int64_t bytes, int code, int root, Words words, double timeout,
                      bool async) {
        check_root(root);
        if (core->group.rank() == root) check_parts({outputs});
        return issue(words, async, [=](Group& g) {
            g.gather(pointer<void>(source), reinterpret_cast<char* const*>(outputs.data()), bytes, code, root, timeout);
        });
    }
    py::object scatter(Addresses inputs, Address output, int64_t bytes, int code, int root, Words words, double timeout,
                       bool async) {
        check_root(root);
        if (core->group.rank() == root) check_parts({inputs});
        return issue(words, async, [=](Group& g) {
            g.scatter(reinterpret_cast<const char* const*>(inputs.data()), pointer<void>(output), bytes, code, root,
                      timeout);
        });
    }
    py::object all_to_all(Addresses inputs, std::vector<int64_t> in_bytes, Addresses outputs,
                          std::vector<int64_t> out_bytes, int code, Words words, double timeout, bool async) {
        check_parts({inputs, outputs});
        if (in_bytes.size() != inputs.size() || out_bytes.size() != inputs.size())
            throw std::invalid_argument("one size per rank");
        return issue(words, async, [=](Group& g) {
            g.all_to_all(reinterpret_cast<const char* const*>(inputs.data()), in_bytes.data(),
                         reinterpret_cast<char* const*>(outputs.data()), out_bytes.data(), code, timeout);
        });
    }

    Pending transfer(bool sending, int peer, Address data, int64_t bytes, int64_t tag, int code, Words words) {
        core->check_process();
        if (peer >= core->group.size() || (sending && peer < 0) || peer == core->group.rank())
            throw std::invalid_argument("send/recv: no such peer");
        TransferPtr t;
        {
            py::gil_scoped_release release;
            t = sending ? core->boxes.send(peer, pointer<void>(data), bytes, tag, code, Leases(words))
                        : core->boxes.receive(peer, pointer<void>(data), bytes, tag, code, Leases(words));
        }
        return {core, nullptr, t};
    }
    void serve_transfers() {  // called for asynchronous ones that are not done yet
        if (core->boxes.wants_thread() && !started([core = core] { core->boxes.background(); }))
            core->boxes.thread_is_missing();  // whoever waits moves the messages
    }

    void close() {
        core->queue.stop();
        core->boxes.stop();
    }
};

size_t format(int fd, int size, size_t in_bytes, size_t slice_bytes, size_t mailbox_bytes, uint64_t nonce0,
              uint64_t nonce1) {
    Layout layout{size, in_bytes, slice_bytes, mailbox_bytes};
    Mapping mapping(fd, layout.total(), PAGE);
    Group::format(mapping.at, layout, nonce0, nonce1);
    return layout.eager();
}

py::tuple sizes(int size, size_t in_bytes, size_t slice_bytes, size_t mailbox_bytes) {
    Layout layout{size, in_bytes, slice_bytes, mailbox_bytes};
    return py::make_tuple(layout.total(), layout.eager());
}

py::tuple probe(int fd) {  // nonce and size that stand in the segment; 0 where it is none of ours
    Mapping mapping(fd, PAGE, PAGE);
    auto* g = static_cast<GroupHeader*>(mapping.at);
    if (g->magic != MAGIC) return py::make_tuple(uint64_t{0}, uint64_t{0}, 0);
    return py::make_tuple(g->nonce[0], g->nonce[1], g->size);
}

py::tuple layout(int fd) {
    Mapping mapping(fd, PAGE, PAGE);
    auto* g = static_cast<GroupHeader*>(mapping.at);
    return py::make_tuple(g->in_bytes, g->slice_bytes, g->size);
}

void reduce_now(Address dst, const Addresses& sources, int64_t count, int dtype, int reduce, bool average,
                double premultiply, const std::string& isa, bool past_cache) {
    auto spec = spec_of(dtype, reduce, average, premultiply);
    const Kernels& k = isa.empty() ? kernels() : kernels_named(isa);
    ReduceArgs a{};
    std::vector<const void*> from;
    for (Address s : sources) from.push_back(pointer<void>(s));
    a.dst = pointer<void>(dst), a.sources = from.data(), a.nsources = static_cast<int>(from.size()), a.count = count;
    a.premultiply = premultiply, a.divide = average ? static_cast<double>(from.size()) : 1.0, a.stream = past_cache;
    k.reduce[dtype][reduce](a);
    fence_stores();
}

std::string sanitizer() {
#if defined(__SANITIZE_ADDRESS__)
    return "address";
#elif defined(__SANITIZE_THREAD__)
    return "thread";
#else
    return "";
#endif
}

// Lets a process that would end with exit code 0 end with `code`; any other exit code stays. Only the C library knows
// the code of a program that raised SystemExit: Python drops it before its own functions at exit run.
bool replace_exit_code_zero(int code) {
#ifdef __GLIBC__
    auto end = [](int asked, void* instead) {
        if ((asked & 0xFF) != 0) return;  // of 256 the system keeps 0
        std::fflush(nullptr);
        _exit(static_cast<int>(reinterpret_cast<std::intptr_t>(instead)));
    };
    return on_exit(end, reinterpret_cast<void*>(static_cast<std::intptr_t>(code))) == 0;
#else
    return false;
#endif
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.attr("ABI") = 4;
    pthread_atfork(nullptr, nullptr, [] { this_process = getpid(); });
    py::register_exception<PeerLost>(m, "PeerLost", PyExc_RuntimeError);
    py::register_exception<WaitTimeout>(m, "WaitTimeout", PyExc_RuntimeError);
    py::register_exception<Mismatch>(m, "Mismatch", PyExc_RuntimeError);
    py::register_exception<Aborted>(m, "Aborted", PyExc_RuntimeError);
    py::register_exception<Hang>(m, "Hang", PyExc_RuntimeError);
    py::register_exception<Forked>(m, "Forked", PyExc_RuntimeError);
    m.def("isa", [] { return kernels().name; });
    m.def("isas", &runnable_isas);
    m.def("sanitizer", &sanitizer);
    m.def("format", &format);
    m.def("sizes", &sizes);
    m.def("replace_exit_code_zero", &replace_exit_code_zero);
    m.def("probe", &probe);
    m.def("layout", &layout);
    m.def("reduce", &reduce_now);
    py::class_<Pending>(m, "Pending")
        .def("done", &Pending::done)
        .def("wait", &Pending::wait)
        .def_property_readonly("peer", &Pending::peer);
    py::class_<PyGroup>(m, "Group")
        .def(py::init<int, size_t, size_t, int, std::vector<int>, int, double, double, double, int64_t,
                      const std::string&>())
        .def("barrier", &PyGroup::barrier)
        .def("all_reduce", &PyGroup::all_reduce)
        .def("all_gather", &PyGroup::all_gather)
        .def("reduce_scatter", &PyGroup::reduce_scatter)
        .def("broadcast", &PyGroup::broadcast)
        .def("reduce", &PyGroup::reduce)
        .def("gather", &PyGroup::gather)
        .def("scatter", &PyGroup::scatter)
        .def("all_to_all", &PyGroup::all_to_all)
        .def("transfer", &PyGroup::transfer)
        .def("serve_transfers", &PyGroup::serve_transfers)
        .def("poison", [](PyGroup& g, const std::string& text,
                          bool hang) { g.core->group.poison(hang ? Failure::hang : Failure::aborted, text); })
        .def("poison_text", [](PyGroup& g) { return g.core->group.poison_text(); })
        .def("lost", [](PyGroup& g) { return g.core->group.lost(); })
        .def("close", &PyGroup::close);
}
