// Streams and events: a stream is a queue with a worker thread, an event is a place in one.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <stdexcept>

#include "core.h"

namespace sim {

namespace {
std::vector<Stream*> all_streams;
std::map<std::pair<int, int>, Stream*> by_id;
std::mutex streams_m;
constexpr int kPool = 32;  // as CUDA: ids are handed out in turn
std::atomic<unsigned> next_low{0}, next_high{0};
std::mutex error_m;
std::string device_error;
bool error_raised = false;
pid_t owner = 0;  // the process that has the workers of the streams

thread_local int my_device = 0;
thread_local std::unordered_map<int, Stream*> my_streams;

using Microseconds = std::chrono::duration<double, std::micro>;
}  // namespace

Options& options() {
    static Options o;
    return o;
}

bool set_option(const std::string& name, double value) {
    auto& o = options();
    if (name == "mode") o.mode = int(value);
    else if (name == "seed") o.seed = uint64_t(value);
    else if (name == "devices") o.devices = int(value);
    else if (name == "memory_mib") o.bytes = size_t(value) << 20;
    else if (name == "delay_us") o.delay_us = value;
    else if (name == "cap_ms") o.cap_ms = value;
    else if (name == "gbps") o.gbps = value;
    else if (name == "poison") o.poison = value != 0;
    else if (name == "races") o.races = int(value);
    else if (name == "hang_s") o.hang_s = value;
    else if (name == "one_collective") o.one_collective = value != 0;
    else if (name == "strict_free") o.strict_free = value != 0;
    else if (name == "sync_debug") o.sync_debug = int(value);
    else return false;
    return true;
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void fail(const std::string& text) {
    std::lock_guard<std::mutex> g(error_m);
    if (device_error.empty()) device_error = text.substr(0, text.find("\nException raised from"));
}

void raise_device_errors() {
    std::lock_guard<std::mutex> g(error_m);
    if (device_error.empty()) return;
    error_raised = true;
    throw std::runtime_error("CUDA error (simulated, raised by a later wait of the host): " + device_error);
}

std::string unraised_error() {
    std::lock_guard<std::mutex> g(error_m);
    return error_raised ? "" : device_error;
}

// ---------------------------------------------------------------- streams
Stream* stream(int dev, int id) {
    {
        std::lock_guard<std::mutex> g(streams_m);
        auto found = by_id.find({dev, id});
        if (found != by_id.end()) return found->second;
    }
    CallSite site;
    std::lock_guard<std::mutex> g(streams_m);
    auto& s = by_id[{dev, id}];
    if (s) return s;
    s = new Stream;
    s->dev = dev;
    s->id = id;
    if (all_streams.empty()) owner = getpid();
    s->number = int(all_streams.size());
    s->made_at = CallSite::here().stack;
    s->dice.seed(options().seed * 1000003 + uint64_t(dev) * 1009 + uint64_t(id));
    all_streams.push_back(s);
    std::thread([s] { s->loop(); }).detach();
    return s;
}

Stream* stream_by_number(int number) {
    std::lock_guard<std::mutex> g(streams_m);
    return all_streams.at(size_t(number));
}

std::vector<Stream*> streams() {
    std::lock_guard<std::mutex> g(streams_m);
    return all_streams;
}

int id_from_pool(bool high) { return high ? 1 + kPool + int(next_high++ % kPool) : 1 + int(next_low++ % kPool); }

int device_now() { return my_device; }

int set_device(int dev) {
    int was = my_device;
    my_device = dev;
    return was;
}

Stream* current(int dev) {
    auto& s = my_streams[dev];
    if (!s) s = stream(dev, 0);
    return s;
}

Stream* exchange(Stream* s) {
    Stream* was = current(s->dev);
    my_streams[s->dev] = s;
    return was;
}

static uint64_t enqueue(Stream* s, std::string name, std::function<void()> run) {
    std::lock_guard<std::mutex> g(s->m);
    s->queue.push_back({std::move(run), std::move(name), now()});
    s->work.notify_one();
    return ++s->submitted;
}

uint64_t Stream::push(std::string name, std::function<void()> run, const std::vector<Span>& spans, Kind kind) {
    if (getpid() != owner)
        throw std::runtime_error(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
            "'spawn' "
            "start method (simulated device)");
    CallSite site;
    std::lock_guard<std::recursive_mutex> g(order_lock());
    order(this, name, kind, spans, nullptr);
    return enqueue(this, std::move(name), std::move(run));
}

void Stream::loop() {
    std::unique_lock<std::mutex> g(m);
    auto& o = options();
    for (;;) {
        work.wait(g, [&] { return !queue.empty(); });
        if (o.mode == kLazy) {
            double left = o.cap_ms / 1e3 - (now() - queue.front().at);
            if (left > 0) work.wait_for(g, std::chrono::duration<double>(left), [&] { return demanded > completed; });
        }
        Job job = std::move(queue.front());
        queue.pop_front();
        running = job.name;
        g.unlock();
        if ((o.mode == kSlowSide && id != 0) || (o.mode == kSlowDefault && id == 0))
            std::this_thread::sleep_for(Microseconds(o.delay_us));
        if (o.mode == kRandom && dice() % 4 == 0)
            std::this_thread::sleep_for(Microseconds(o.delay_us * 2 * double(dice() % 1000) / 1000));
        try {
            job.run();
        } catch (const std::exception& e) { fail(job.name + ": " + std::string(e.what()).substr(0, 2000)); }
        job.run = nullptr;
        g.lock();
        running.clear();
        completed++;
        done.notify_all();
    }
}

static void hang(Stream* s, std::unique_lock<std::mutex>& held) {
    std::string text = "device " + std::to_string(s->dev) + " stream " + std::to_string(s->id) + " did not finish in " +
                       std::to_string(int(options().hang_s)) + " s; it runs '" + s->running + "', behind it:";
    int n = 0;
    for (auto& j : s->queue)
        if (n++ < 8) text += " " + j.name;
    held.unlock();
    for (Stream* other : streams()) {
        if (other == s) continue;
        std::lock_guard<std::mutex> g(other->m);
        if (!other->running.empty())
            text += "; device " + std::to_string(other->dev) + " stream " + std::to_string(other->id) + " runs '" +
                    other->running + "'";
    }
    fprintf(stderr, "simcuda: hang: %s\n", text.c_str());
    dump_python_stacks();
    fflush(stderr);
    _exit(99);
}

void Stream::wait(uint64_t until) {
    if (finished(until)) return;
    // Not all of torch's operators give Python's lock away before they wait: those that dispatch DTensors keep it. The
    // stream needs it where it drops the last reference to a tensor that Python knows.
    PythonLockReleased others_run;
    std::unique_lock<std::mutex> g(m);
    if (completed >= until) return;
    demanded = std::max(demanded, until);
    work.notify_one();
    auto limit = std::chrono::duration<double>(options().hang_s);
    if (!done.wait_for(g, limit, [&] { return completed >= until; })) hang(this, g);
}

bool Stream::finished(uint64_t until) {
    std::lock_guard<std::mutex> g(m);
    return completed >= until;
}

// ---------------------------------------------------------------- events
void record(Event* e, Stream* s) {
    CallSite site;
    auto mark = std::make_shared<Mark>();
    mark->stream = s;
    mark->time = std::make_shared<double>(0);
    auto time = mark->time;
    {
        std::lock_guard<std::recursive_mutex> g(order_lock());
        mark->until = s->push("record event", [time] { *time = now(); }, {}, Kind::kRecord);
        mark->clock = s->clock;
        mark->tick = s->clock[size_t(s->number)];
    }
    std::lock_guard<std::mutex> g(e->m);
    e->mark = mark;
}

static std::shared_ptr<Mark> mark_of(Event* e) {
    std::lock_guard<std::mutex> g(e->m);
    return e->mark;
}

void block(Event* e, Stream* s) {
    auto mark = mark_of(e);
    if (!mark || mark->stream == s) return;
    CallSite site;
    std::lock_guard<std::recursive_mutex> g(order_lock());
    order(s, "wait for event", Kind::kWait, {}, mark.get());
    enqueue(s, "wait for event", [mark] { mark->stream->wait(mark->until); });
}

bool query(Event* e) {
    auto mark = mark_of(e);
    if (!mark) return true;
    if (!mark->stream->finished(mark->until)) return false;
    host_has_waited_for(mark->clock);
    return true;
}

void synchronize(Event* e) {
    auto mark = mark_of(e);
    if (!mark) return;
    mark->stream->wait(mark->until);
    host_has_waited_for(mark->clock);
    raise_device_errors();
}

void synchronize(Stream* s) {
    Event e;
    record(&e, s);
    synchronize(&e);
}

void wait_for_device(int dev) {
    std::vector<Event> events(streams().size());
    Clock all;
    size_t n = 0;
    for (auto* s : streams())
        if (s->dev == dev && n < events.size()) record(&events[n++], s);
    for (size_t i = 0; i < n; i++) {
        auto mark = mark_of(&events[i]);
        mark->stream->wait(mark->until);
        if (all.size() < mark->clock.size()) all.resize(mark->clock.size());
        for (size_t k = 0; k < mark->clock.size(); k++) all[k] = std::max(all[k], mark->clock[k]);
    }
    host_has_waited_for(all);
}

void synchronize_device(int dev) {
    wait_for_device(dev);
    raise_device_errors();
}

double elapsed_ms(Event* a, Event* b) {
    auto x = mark_of(a), y = mark_of(b);
    if (!x || !y) throw std::runtime_error("both events must be recorded before their time is asked for");
    if (!x->stream->finished(x->until) || !y->stream->finished(y->until))
        throw std::runtime_error("CUDA error: device not ready (an event has not happened yet; synchronize it first)");
    return (*y->time - *x->time) * 1e3;
}

}  // namespace sim
