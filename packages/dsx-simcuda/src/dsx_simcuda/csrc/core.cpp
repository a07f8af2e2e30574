#include "core.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace sim {

Options& options() {
    static Options o;
    return o;
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// ---------------------------------------------------------------- telling
static void (*listener)(const char*, const char*) = nullptr;
static std::atomic<uint64_t> syncs{0};
static std::mutex text_m;
static std::string found;

void listen(void (*fn)(const char*, const char*)) { listener = fn; }

void host_sync(const char* why) {
    syncs++;
    if (listener) listener("sync", why);
}

uint64_t host_syncs() { return syncs; }

void report(const char* kind, const std::string& text) {
    {
        std::lock_guard<std::mutex> g(text_m);
        found += std::string(kind) + ": " + text + "\n";
    }
    if (listener) listener(kind, text.c_str());
    else fprintf(stderr, "sim %s: %s\n", kind, text.c_str());
}

std::string races_text() {
    std::lock_guard<std::mutex> g(text_m);
    return found;
}

static std::mutex error_m;
static std::string device_error;

void raise_device_errors() {
    std::lock_guard<std::mutex> g(error_m);
    if (!device_error.empty()) throw std::runtime_error("sim device error (asynchronous): " + device_error);
}

// ---------------------------------------------------------------- clocks: who is ordered behind whom
static std::recursive_mutex clock_m;  // guards all clocks, the intervals and the allocator
static Clock host;                    // what the host (any thread of it) has waited for

static void merge(Clock& into, const Clock& from) {
    if (into.size() < from.size()) into.resize(from.size());
    for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

static uint64_t at(const Clock& c, int i) { return size_t(i) < c.size() ? c[i] : 0; }

struct Access {
    int number = -1;
    uint64_t when = 0;
    std::string name;
};

struct Interval {
    uintptr_t hi;
    Access writer;
    std::vector<Access> readers;
};

static std::map<uintptr_t, Interval> intervals;  // by lo; a byte in none was never touched
static std::map<std::pair<std::string, std::string>, int> told;

static void split(uintptr_t x) {
    auto it = intervals.upper_bound(x);
    if (it == intervals.begin()) return;
    --it;
    if (it->first < x && x < it->second.hi) {
        Interval right = it->second;
        it->second.hi = x;
        intervals.emplace(x, std::move(right));
    }
}

static void race(const char* what, const Access& before, const Access& after, uintptr_t where) {
    auto key = std::make_pair(before.name, std::string(what) + after.name);
    if (told[key]++ > 5000) return;
    char text[512];
    snprintf(text, sizeof text, "%s: %s on stream %d is not ordered after %s on stream %d (address %#zx)", what,
             after.name.c_str(), after.number, before.name.c_str(), before.number, size_t(where));
    report("race", text);
}

static void touch(Stream* s, const std::string& name, const Span& span) {
    if (span.lo >= span.hi) return;
    split(span.lo);
    split(span.hi);
    Access mine{s->number, at(s->clock, s->number), name};
    uintptr_t x = span.lo;
    auto it = intervals.lower_bound(span.lo);
    while (x < span.hi) {
        if (it == intervals.end() || it->first > x) {
            uintptr_t hi = it == intervals.end() ? span.hi : std::min<uintptr_t>(it->first, span.hi);
            it = intervals.emplace(x, Interval{hi, {}, {}}).first;
        }
        Interval& v = it->second;
        auto ordered = [&](const Access& a) {
            return a.number < 0 || a.number == s->number || at(s->clock, a.number) >= a.when;
        };
        if (!ordered(v.writer)) race(span.write ? "write after write" : "read after write", v.writer, mine, x);
        if (span.write) {
            for (auto& r : v.readers)
                if (!ordered(r)) race("write after read", r, mine, x);
            v.writer = mine;
            v.readers.clear();
        } else {
            bool there = false;
            for (auto& r : v.readers)
                if (r.number == s->number) {
                    r = mine;
                    there = true;
                }
            if (!there) v.readers.push_back(mine);
        }
        x = v.hi;
        ++it;
    }
}

// ---------------------------------------------------------------- streams
static std::vector<Stream*> all_streams;
static std::map<std::pair<int, int>, Stream*> by_id;
static std::mutex streams_m;
constexpr int POOL = 32;
static std::atomic<unsigned> next_low{0}, next_high{0};

Stream* stream(int dev, int id) {
    std::lock_guard<std::mutex> g(streams_m);
    auto& s = by_id[{dev, id}];
    if (!s) {
        s = new Stream;
        s->dev = dev;
        s->id = id;
        s->number = int(all_streams.size());
        s->dice.seed(options().seed * 1000003 + dev * 1009 + id);
        all_streams.push_back(s);
        s->worker = std::thread([s] { s->loop(); });
        s->worker.detach();
    }
    return s;
}

int from_pool(bool high) { return high ? 1 + POOL + int(next_high++ % POOL) : 1 + int(next_low++ % POOL); }

thread_local int my_device = 0;
thread_local std::unordered_map<int, Stream*> my_streams;

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

uint64_t Stream::push(std::string name, std::function<void()> run, const std::vector<Span>& spans) {
    if (options().races) {
        std::lock_guard<std::recursive_mutex> g(clock_m);
        merge(clock, host);
        if (size_t(number) >= clock.size()) clock.resize(number + 1);
        clock[number]++;
        for (auto& span : spans) touch(this, name, span);
    }
    std::lock_guard<std::mutex> g(m);
    queue.push_back({std::move(run), std::move(name), now()});
    submitted++;
    work.notify_one();
    return submitted;
}

void Stream::loop() {
    std::unique_lock<std::mutex> g(m);
    auto& o = options();
    for (;;) {
        work.wait(g, [&] { return !queue.empty(); });
        if (o.mode == 2) {
            double left = o.cap_ms / 1e3 - (now() - queue.front().at);
            if (left > 0) work.wait_for(g, std::chrono::duration<double>(left), [&] { return demanded > completed; });
        }
        Job job = std::move(queue.front());
        queue.pop_front();
        running = job.name;
        g.unlock();
        if ((o.mode == 3 && id != 0) || (o.mode == 4 && id == 0))
            std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(o.delay_us));
        if (o.mode == 1 && dice() % 4 == 0)
            std::this_thread::sleep_for(
                std::chrono::duration<double, std::micro>(o.delay_us * 2 * double(dice() % 1000) / 1000));
        try {
            job.run();
        } catch (const std::exception& e) {
            std::lock_guard<std::mutex> eg(error_m);
            if (device_error.empty()) device_error = job.name + ": " + std::string(e.what()).substr(0, 600);
        }
        job.run = nullptr;
        g.lock();
        running.clear();
        completed++;
        done.notify_all();
    }
}

void Stream::wait(uint64_t until) {
    std::unique_lock<std::mutex> g(m);
    if (completed >= until) return;
    demanded = std::max(demanded, until);
    work.notify_one();
    if (!done.wait_for(g, std::chrono::duration<double>(options().hang_s), [&] { return completed >= until; })) {
        std::string text = "device " + std::to_string(dev) + " stream " + std::to_string(id) + " did not finish in " +
                           std::to_string(options().hang_s) + " s; it runs '" + running + "', behind it:";
        int n = 0;
        for (auto& j : queue)
            if (n++ < 8) text += " " + j.name;
        g.unlock();
        report("hang", text);
        _exit(99);
    }
}

bool Stream::finished(uint64_t until) {
    std::lock_guard<std::mutex> g(m);
    return completed >= until;
}

// ---------------------------------------------------------------- events
void record(Event* e, Stream* s) {
    auto mark = std::make_shared<Mark>();
    mark->stream = s;
    mark->time = std::make_shared<double>(0);
    auto time = mark->time;
    {
        std::lock_guard<std::recursive_mutex> g(clock_m);
        mark->until = s->push("record", [time] { *time = now(); });
        mark->clock = s->clock;
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
    {
        std::lock_guard<std::recursive_mutex> g(clock_m);
        merge(s->clock, mark->clock);
    }
    s->push("wait event", [mark] { mark->stream->wait(mark->until); });
}

bool query(Event* e) {
    auto mark = mark_of(e);
    if (!mark) return true;
    if (!mark->stream->finished(mark->until)) return false;
    std::lock_guard<std::recursive_mutex> g(clock_m);
    merge(host, mark->clock);
    return true;
}

void synchronize(Event* e) {
    auto mark = mark_of(e);
    if (!mark) return;
    mark->stream->wait(mark->until);
    {
        std::lock_guard<std::recursive_mutex> g(clock_m);
        merge(host, mark->clock);
    }
    raise_device_errors();
}

void synchronize(Stream* s) {
    Event e;
    record(&e, s);
    synchronize(&e);
}

void synchronize_device(int dev) {
    std::vector<Stream*> them;
    {
        std::lock_guard<std::mutex> g(streams_m);
        for (auto* s : all_streams)
            if (s->dev == dev) them.push_back(s);
    }
    for (auto* s : them) synchronize(s);
}

// ---------------------------------------------------------------- memory
constexpr size_t ROUND = 512;

struct Block {
    size_t bytes, asked;
    Stream* stream;
    std::vector<Stream*> uses;
    bool of_small;
};

struct Device {
    char* face = nullptr;  // what programs hold: no access
    char* back = nullptr;  // the same bytes, for workers
    size_t limit = 0;
    std::map<char*, size_t> free_ranges;  // not reserved by the cache
    std::map<std::pair<Stream*, bool>, std::map<char*, size_t>>
        cached;                        // free blocks by owning stream and kind (small, large); neighbours merge
    std::map<char*, size_t> segments;  // reserved, by begin
    std::vector<std::pair<std::vector<std::shared_ptr<Event>>, std::pair<char*, Block>>> waiting;  // record_stream
    std::unordered_map<void*, Block> used;
    Stats s{};
};

static Device devices_[8];
static std::once_flag once[8];

static Device& device(int dev) {
    std::call_once(once[dev], [dev] {
        Device& d = devices_[dev];
        size_t n = options().bytes;
        int fd = memfd_create("sim", 0);
        if (ftruncate(fd, off_t(n))) abort();
        d.face = (char*)mmap(nullptr, n, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        d.back = (char*)mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        d.free_ranges[d.face] = n;
        d.limit = n;
        d.s.total = n;
    });
    return devices_[dev];
}

int device_of(const void* p) {
    for (int i = 0; i < options().devices; i++) {
        Device& d = device(i);
        if ((char*)p >= d.face && (char*)p < d.face + options().bytes) return i;
    }
    return -1;
}

void* alias(const void* p) {
    if (!p) return nullptr;
    int dev = device_of(p);
    if (dev < 0) return const_cast<void*>(p);
    return devices_[dev].back + ((char*)p - devices_[dev].face);
}

static void poison(Stream* s, char* p, size_t n, const char* why) {
    std::vector<Span> spans;
    if (options().races > 1) spans.push_back({uintptr_t(p), uintptr_t(p) + n, true});
    void* back = alias(p);
    bool fill = options().poison;
    if (!fill && spans.empty()) return;
    s->push(
        why,
        [back, n, fill] {
            if (fill) memset(back, 0xFF, n);
        },
        spans);
}

static void give_back(Device& d, char* p, size_t n) {
    auto it = d.free_ranges.emplace(p, n).first;
    auto next = std::next(it);
    if (next != d.free_ranges.end() && it->first + it->second == next->first) {
        it->second += next->second;
        d.free_ranges.erase(next);
    }
    if (it != d.free_ranges.begin()) {
        auto before = std::prev(it);
        if (before->first + before->second == it->first) {
            before->second += it->second;
            d.free_ranges.erase(it);
        }
    }
    d.s.reserved -= n;
}

static bool small(size_t n) { return n <= (size_t(1) << 20); }

static void cache(Device& d, char* p, const Block& b) {
    auto& pool = d.cached[{b.stream, b.of_small}];
    auto it = pool.emplace(p, b.bytes).first;
    auto next = std::next(it);
    if (next != pool.end() && it->first + it->second == next->first && !d.segments.count(next->first)) {
        it->second += next->second;
        pool.erase(next);
    }
    if (it != pool.begin() && !d.segments.count(it->first)) {
        auto before = std::prev(it);
        if (before->first + before->second == it->first) {
            before->second += it->second;
            pool.erase(it);
        }
    }
}

static void process(Device& d, bool wait) {
    for (size_t i = 0; i < d.waiting.size();) {
        auto& w = d.waiting[i];
        bool all = true;
        for (auto& e : w.first) {
            if (wait) synchronize(e.get());
            all = all && query(e.get());
        }
        if (all) {
            cache(d, w.second.first, w.second.second);
            d.waiting.erase(d.waiting.begin() + i);
        } else i++;
    }
}

void empty_cache(int dev) {
    std::lock_guard<std::recursive_mutex> g(clock_m);
    Device& d = device(dev);
    process(d, true);
    for (auto& [key, pool] : d.cached) {
        if (!pool.empty()) synchronize(key.first);  // cudaFree waits for the device
        for (auto it = pool.begin(); it != pool.end();) {
            auto seg = d.segments.find(it->first);
            if (seg != d.segments.end() && seg->second == it->second) {  // a whole segment is free
                give_back(d, it->first, it->second);
                d.segments.erase(seg);
                it = pool.erase(it);
            } else ++it;
        }
    }
}

static char* carve(Device& d, size_t n) {
    if (d.s.reserved + n > d.limit) return nullptr;
    for (auto it = d.free_ranges.begin(); it != d.free_ranges.end(); ++it)
        if (it->second >= n) {
            char* p = it->first;
            size_t left = it->second - n;
            d.free_ranges.erase(it);
            if (left) d.free_ranges[p + n] = left;
            d.s.reserved += n;
            d.s.peak_reserved = std::max(d.s.peak_reserved, d.s.reserved);
            return p;
        }
    return nullptr;
}

void* allocate(size_t asked, int dev, Stream* s) {
    size_t n = std::max(ROUND, (asked + ROUND - 1) / ROUND * ROUND);
    std::lock_guard<std::recursive_mutex> g(clock_m);
    Device& d = device(dev);
    process(d, false);
    char* p = nullptr;
    const bool of_small = small(n);
    auto& pool = d.cached[{s, of_small}];
    auto fit = [&]() -> bool {  // best fit, split as CUDA's allocator does
        auto best = pool.end();
        for (auto it = pool.begin(); it != pool.end(); ++it)
            if (it->second >= n && (best == pool.end() || it->second < best->second)) best = it;
        if (best == pool.end()) return false;
        p = best->first;
        size_t left = best->second - n;
        pool.erase(best);
        if (left >= (of_small ? ROUND : (size_t(1) << 20))) pool[p + n] = left;
        else n += left;
        return true;
    };
    if (!fit()) {
        const size_t mib = size_t(1) << 20;
        size_t want = of_small ? 2 * mib : n < 10 * mib ? 20 * mib : (n + 2 * mib - 1) / (2 * mib) * (2 * mib);
        char* seg = carve(d, want);
        if (!seg) {
            d.s.retries++;
            empty_cache(dev);
            if (!fit()) seg = carve(d, want);
        }
        if (seg) {
            d.segments[seg] = want;
            pool[seg] = want;
            fit();
        }
    }
    if (!p) {
        d.s.ooms++;
        return nullptr;
    }
    d.used[p] = {n, asked, s, {}, of_small};
    d.s.allocated += n;
    d.s.peak = std::max(d.s.peak, d.s.allocated);
    d.s.mallocs++;
    poison(s, p, n, "new memory");
    return p;
}

void release(void* p) {
    if (!p) return;
    std::lock_guard<std::recursive_mutex> g(clock_m);
    int dev = device_of(p);
    Device& d = device(dev);
    auto it = d.used.find(p);
    if (it == d.used.end()) {
        report("misuse", "free of memory that is not allocated");
        return;
    }
    Block b = it->second;
    d.used.erase(it);
    d.s.allocated -= b.bytes;
    d.s.frees++;
    if (b.uses.empty()) {
        // Not filled here: another stream may rightly still read it, if the owner waits for that stream before it
        // allocates again.
        if (options().strict_free) b.stream->push("free", [] {}, {{uintptr_t(p), uintptr_t(p) + b.bytes, true}});
        cache(d, (char*)p, b);
        return;
    }
    std::vector<std::shared_ptr<Event>> events;
    for (auto* s : b.uses) {
        events.push_back(std::make_shared<Event>());
        record(events.back().get(), s);
    }
    d.waiting.push_back({events, {(char*)p, b}});
}

void record_use(void* p, Stream* s) {
    std::lock_guard<std::recursive_mutex> g(clock_m);
    int dev = device_of(p);
    if (dev < 0) return;
    auto it = device(dev).used.find(p);
    if (it == device(dev).used.end() || it->second.stream == s) return;
    auto& u = it->second.uses;
    if (std::find(u.begin(), u.end(), s) == u.end()) u.push_back(s);
}

size_t block_bytes(const void* p) {
    std::lock_guard<std::recursive_mutex> g(clock_m);
    int dev = device_of(p);
    auto it = device(dev).used.find(const_cast<void*>(p));
    return it == device(dev).used.end() ? 0 : it->second.bytes;
}

Stats stats(int dev) {
    std::lock_guard<std::recursive_mutex> g(clock_m);
    return device(dev).s;
}

void reset_peak(int dev) {
    std::lock_guard<std::recursive_mutex> g(clock_m);
    auto& s = device(dev).s;
    s.peak = s.allocated;
    s.peak_reserved = s.reserved;
}

void set_limit(int dev, size_t n) {
    std::lock_guard<std::recursive_mutex> g(clock_m);
    device(dev).limit = std::min(n, options().bytes);
}

// ---------------------------------------------------------------- pinned host memory
struct Pinned {
    size_t bytes;
    bool registered, freed;
    std::vector<std::pair<Stream*, uint64_t>> uses;
};

static std::mutex pinned_m;
static std::map<uintptr_t, Pinned> pins;

static std::map<uintptr_t, Pinned>::iterator pin_at(const void* p) {
    auto it = pins.upper_bound(uintptr_t(p));
    if (it == pins.begin()) return pins.end();
    --it;
    return uintptr_t(p) < it->first + it->second.bytes ? it : pins.end();
}

void* pinned_allocate(size_t n) {
    if (!n) return nullptr;
    std::lock_guard<std::mutex> g(pinned_m);
    for (auto& [at, b] : pins)
        if (b.freed && b.bytes >= n && b.bytes <= 2 * n + 4096) {
            bool idle = true;
            for (auto& [s, until] : b.uses) idle = idle && s->finished(until);
            if (!idle) continue;
            b.uses.clear();
            b.freed = false;
            return (void*)at;
        }
    size_t room = (n + 4095) / 4096 * 4096;
    void* p = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (options().poison) memset(p, 0xFF, room);
    pins[uintptr_t(p)] = {room, false, false, {}};
    return p;
}

void pinned_release(void* p) {
    std::lock_guard<std::mutex> g(pinned_m);
    auto it = pin_at(p);
    if (it != pins.end()) it->second.freed = true;
}

bool pinned(const void* p) {
    std::lock_guard<std::mutex> g(pinned_m);
    auto it = pin_at(p);
    return it != pins.end() && !it->second.freed;
}

void pinned_register(void* p, size_t n) {
    std::lock_guard<std::mutex> g(pinned_m);
    pins[uintptr_t(p)] = {n, true, false, {}};
}

void pinned_unregister(void* p) {
    std::lock_guard<std::mutex> g(pinned_m);
    auto it = pin_at(p);
    if (it == pins.end()) return;
    for (auto& [s, until] : it->second.uses)
        if (!s->finished(until)) report("misuse", "host memory is unregistered while a copy uses it");
    pins.erase(it);
}

void pinned_use(const void* p, Stream* s, uint64_t until) {
    std::lock_guard<std::mutex> g(pinned_m);
    auto it = pin_at(p);
    if (it != pins.end()) it->second.uses.push_back({s, until});
}

void paced(size_t bytes) {
    double gbps = options().gbps;
    if (gbps > 0) std::this_thread::sleep_for(std::chrono::duration<double>(double(bytes) / (gbps * 1e9)));
}

}  // namespace sim

extern "C" {
int sim_devices() { return sim::options().devices; }

uint64_t sim_host_syncs() { return sim::host_syncs(); }

void sim_listen(void (*fn)(const char*, const char*)) { sim::listen(fn); }

int sim_option(const char* name, double value) {
    auto& o = sim::options();
    std::string n = name;
    if (n == "mode") o.mode = int(value);
    else if (n == "seed") o.seed = uint64_t(value);
    else if (n == "devices") o.devices = int(value);
    else if (n == "memory_mib") o.bytes = size_t(value) << 20;
    else if (n == "delay_us") o.delay_us = value;
    else if (n == "cap_ms") o.cap_ms = value;
    else if (n == "gbps") o.gbps = value;
    else if (n == "poison") o.poison = int(value);
    else if (n == "races") o.races = int(value);
    else if (n == "hang_s") o.hang_s = value;
    else if (n == "one_collective") o.one_collective = value != 0;
    else if (n == "strict_free") o.strict_free = int(value);
    else return 1;
    return 0;
}

void sim_synchronize_all() {
    for (int i = 0; i < sim::options().devices; i++) {
        try {
            sim::synchronize_device(i);
        } catch (...) {}
    }
}

int sim_get_device() { return sim::device_now(); }

int sim_set_device(int d) { return sim::set_device(d); }

int sim_current_stream(int dev) { return sim::current(dev)->id; }

void sim_synchronize(int dev) {
    sim::host_sync("device synchronize");
    try {
        sim::synchronize_device(dev);
    } catch (...) {}
}

void sim_empty_cache(int dev) { sim::empty_cache(dev); }

void sim_reset_peak(int dev) { sim::reset_peak(dev); }

void sim_set_limit(int dev, size_t n) { sim::set_limit(dev, n); }

size_t sim_stat(int dev, int what) {
    auto s = sim::stats(dev);
    size_t all[] = {s.allocated, s.peak, s.reserved, s.peak_reserved, s.total, s.mallocs, s.frees, s.retries, s.ooms};
    return all[what];
}

double sim_elapsed(void* a, void* b) {
    auto *x = (sim::Event*)a, *y = (sim::Event*)b;
    sim::synchronize(x);
    sim::synchronize(y);
    return (*y->mark->time - *x->mark->time) * 1e3;
}

void sim_sleep(double seconds) {
    sim::current(sim::device_now())->push("sleep", [seconds] {
        std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    });
}

void sim_pin(void* p, size_t n) { sim::pinned_register(p, n); }

void sim_unpin(void* p) { sim::pinned_unregister(p); }

const char* sim_reports() {
    static thread_local std::string text;
    text = sim::races_text();
    return text.c_str();
}
}
