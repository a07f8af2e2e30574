// Python stacks of launches: taken at every launch as code objects and positions, and made readable only for a report.
#include <Python.h>
#include <dlfcn.h>
#include <frameobject.h>
#include <pthread.h>

#include <cstring>

#include "core.h"

namespace sim {

namespace {
constexpr int kDeepest = 48;

struct Frame {
    PyCodeObject* code;
    int at;  // the instruction (from Python 3.11 on), or the line
};

std::mutex m;
std::vector<std::vector<Frame>> all(1);  // 0 is no stack
std::unordered_multimap<size_t, int> by_hash;
std::atomic<bool> stopped{false};
void (*backward_probe)(Place&) = nullptr;

thread_local int depth = 0;
thread_local Place place;

bool same(const std::vector<Frame>& a, const Frame* b, int n) {
    if (int(a.size()) != n) return false;
    for (int i = 0; i < n; i++)
        if (a[i].code != b[i].code || a[i].at != b[i].at) return false;
    return true;
}

int keep(const Frame* frames, int n) {  // Python's lock is held
    size_t hash = size_t(n);
    for (int i = 0; i < n; i++) hash = hash * 1000003 ^ (size_t(frames[i].code) >> 4) ^ (size_t(frames[i].at) << 40);
    std::lock_guard<std::mutex> g(m);
    auto [from, to] = by_hash.equal_range(hash);
    for (auto it = from; it != to; ++it)
        if (same(all[it->second], frames, n)) return it->second;
    for (int i = 0; i < n; i++) Py_INCREF(frames[i].code);
    all.emplace_back(frames, frames + n);
    by_hash.emplace(hash, int(all.size()) - 1);
    return int(all.size()) - 1;
}
}  // namespace

int capture_stack() {
    // A thread that Python does not know runs no Python, and must not ask for the lock.
    if (stopped || !PyGILState_GetThisThreadState()) return 0;
    PyGILState_STATE lock = PyGILState_Ensure();
    Frame frames[kDeepest];
    int n = 0;
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    while (frame && n < kDeepest) {
        PyCodeObject* code = PyFrame_GetCode(frame);
#if PY_VERSION_HEX >= 0x030b0000
        frames[n++] = {code, PyFrame_GetLasti(frame)};
#else
        frames[n++] = {code, PyFrame_GetLineNumber(frame)};
#endif
        Py_DECREF(code);  // the frame keeps it
        PyFrameObject* back = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    int id = n ? keep(frames, n) : 0;
    PyGILState_Release(lock);
    return id;
}

// The name in Python's table of its threads; asking for the thread itself would enter one that Python did not start. If
// somebody has asked, its name is no name: "Dummy-1".
static std::string name_in_python() {
    if (stopped || !PyGILState_GetThisThreadState()) return "";
    PyGILState_STATE lock = PyGILState_Ensure();
    std::string found;
    PyObject* key = PyUnicode_FromString("threading");
    PyObject* threading = PyImport_GetModule(key);
    PyObject* all = threading ? PyObject_GetAttrString(threading, "_active") : nullptr;
    PyObject* ident = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
    PyObject* mine = all ? PyObject_GetItem(all, ident) : nullptr;
    PyObject* name = mine ? PyObject_GetAttrString(mine, "name") : nullptr;
    const char* text = name ? PyUnicode_AsUTF8(name) : nullptr;
    if (text && strcmp(Py_TYPE(mine)->tp_name, "_DummyThread")) found = text;
    PyErr_Clear();
    for (PyObject* o : {key, threading, all, ident, mine, name}) Py_XDECREF(o);
    PyGILState_Release(lock);
    return found;
}

const std::string& thread_name() {
    static thread_local std::string name;
    if (!name.empty()) return name;
    name = name_in_python();
    char text[32] = "";
    if (name.empty() && pthread_getname_np(pthread_self(), text, sizeof text) == 0) name = text;
    return name;
}

void set_backward_probe(void (*fn)(Place&)) { backward_probe = fn; }

void stop_stacks() { stopped = true; }

CallSite::CallSite() {
    if (depth++) return;
    place = {};
    place.stack = capture_stack();
    if (backward_probe) backward_probe(place);
}

CallSite::~CallSite() {
    if (--depth) return;
    place = {};
    if (!stopped) deliver();
}

const Place& CallSite::here() { return place; }

PythonLockReleased::PythonLockReleased() : state_(nullptr) {
    if (!stopped && PyGILState_GetThisThreadState() && PyGILState_Check()) state_ = PyEval_SaveThread();
}

PythonLockReleased::~PythonLockReleased() {
    if (state_) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

void dump_python_stacks() {  // faulthandler's own function: it needs no lock, and writes to a file descriptor
    using Dump = const char* (*)(int, void*, void*);
    auto dump = Dump(dlsym(RTLD_DEFAULT, "_Py_DumpTracebackThreads"));
    if (dump) dump(2, nullptr, nullptr);
}

}  // namespace sim

extern "C" PyObject* sim_stack(int id) {  // [(file, line, function), ...], innermost first; Python's lock is held
    std::vector<sim::Frame> frames;
    {
        std::lock_guard<std::mutex> g(sim::m);
        if (id > 0 && size_t(id) < sim::all.size()) frames = sim::all[size_t(id)];
    }
    PyObject* list = PyList_New(0);
    for (auto& f : frames) {
#if PY_VERSION_HEX >= 0x030b0000
        int line = PyCode_Addr2Line(f.code, f.at);
#else
        int line = f.at;
#endif
        PyObject* item = Py_BuildValue("(OiO)", f.code->co_filename, line, f.code->co_name);
        PyList_Append(list, item);
        Py_XDECREF(item);
    }
    return list;
}
