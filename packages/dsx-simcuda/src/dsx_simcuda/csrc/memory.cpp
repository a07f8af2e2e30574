// Device memory: one memory file per device, and a caching allocator with the semantics of CUDA's.
//
// The file is mapped twice. Tensors hold addresses of the face, which nobody may touch: an access on the host is a
// fault. Workers use the back. Blocks belong to the stream that they were allocated on, and go back to its pool when
// they are freed, or, after record_stream, when the events of the other streams have happened.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "core.h"

namespace sim {

void Count::add(int64_t n) {
    current += n;
    peak = std::max(peak, current);
    (n > 0 ? allocated : freed) += n > 0 ? n : -n;
}

namespace {
constexpr size_t kRound = 512, kMib = size_t(1) << 20;
constexpr int kDevices = 8;

struct Block {
    size_t bytes, asked;
    Stream* stream;
    std::vector<Stream*> uses;  // record_stream
    bool of_small;
};

struct Waiting {  // a freed block and the events that must happen before it is used again
    std::vector<std::shared_ptr<Event>> events;
    char* at;
    Block block;
};

struct Device {
    char* face = nullptr;
    char* back = nullptr;
    size_t limit = 0, reserved = 0;
    std::map<char*, size_t> free_ranges;                                 // not reserved by the cache
    std::map<std::pair<Stream*, bool>, std::map<char*, size_t>> cached;  // free blocks by stream and size class
    std::map<char*, std::pair<size_t, bool>> segments;                   // reserved: bytes, whether of small blocks
    std::vector<Waiting> waiting;
    std::map<char*, Block> used;
    Stats s;

    void count(const char* what, bool of_small, int64_t n) {
        auto& three = s.counts[what];
        three[0].add(n);
        three[of_small ? 1 : 2].add(n);
    }
};

Device devices[kDevices];
std::once_flag once[kDevices];

Device& device(int dev) {
    if (dev < 0 || dev >= options().devices) throw std::runtime_error("CUDA error: invalid device ordinal");
    std::call_once(once[dev], [dev] {
        Device& d = devices[dev];
        size_t n = options().bytes;
        int fd = memfd_create("simcuda-device", 0);
        if (fd < 0 || ftruncate(fd, off_t(n))) throw std::runtime_error("simcuda: no memory file for the device");
        d.face = (char*)mmap(nullptr, n, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        d.back = (char*)mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        if (d.face == MAP_FAILED || d.back == MAP_FAILED) throw std::runtime_error("simcuda: cannot map the device");
        d.free_ranges[d.face] = n;
        d.limit = n;
        d.s.total = int64_t(n);
    });
    return devices[dev];
}

bool is_small(size_t n) { return n <= kMib; }

// Hands the block to its stream: later work of another stream must be ordered behind what used it before.
void hand_out(Stream* s, char* p, size_t n) {
    std::vector<Span> spans;
    if (options().races > 1) spans.push_back({uintptr_t(p), uintptr_t(p) + n, true, nullptr});
    bool fill = options().poison;
    if (!fill && spans.empty()) return;
    s->push(
        "new memory",
        [back = alias(p), n, fill] {
            if (fill) memset(back, 0xFF, n);
        },
        spans, Kind::kNewMemory);
}

// Puts [p, p + n) into a map of free ranges, joined with its neighbours unless a segment begins between them.
void put(std::map<char*, size_t>& ranges, char* p, size_t n, const std::map<char*, std::pair<size_t, bool>>* segments) {
    auto it = ranges.emplace(p, n).first;
    auto next = std::next(it);
    auto apart = [&](char* at) { return segments && segments->count(at); };
    if (next != ranges.end() && it->first + it->second == next->first && !apart(next->first)) {
        it->second += next->second;
        ranges.erase(next);
    }
    if (it == ranges.begin() || apart(it->first)) return;
    auto before = std::prev(it);
    if (before->first + before->second == it->first) {
        before->second += it->second;
        ranges.erase(it);
    }
}

void cache(Device& d, char* p, const Block& b) {
    d.count("active_bytes", b.of_small, -int64_t(b.bytes));
    d.count("active", b.of_small, -1);
    put(d.cached[{b.stream, b.of_small}], p, b.bytes, &d.segments);
}

void reuse_waiting(Device& d, bool wait) {
    std::erase_if(d.waiting, [&](Waiting& w) {
        for (auto& e : w.events) {
            if (wait) synchronize(e.get());
            if (!query(e.get())) return false;
        }
        cache(d, w.at, w.block);
        return true;
    });
}

char* reserve(Device& d, size_t n, bool of_small) {
    if (d.reserved + n > d.limit) return nullptr;
    for (auto it = d.free_ranges.begin(); it != d.free_ranges.end(); ++it) {
        if (it->second < n) continue;
        char* p = it->first;
        size_t left = it->second - n;
        d.free_ranges.erase(it);
        if (left) d.free_ranges[p + n] = left;
        d.reserved += n;
        d.s.segments_made++;
        d.count("reserved_bytes", of_small, int64_t(n));
        d.count("segment", of_small, 1);
        d.segments[p] = {n, of_small};
        return p;
    }
    return nullptr;
}

// The best fitting free block of the stream, split as CUDA's allocator does; its size is set in `n`.
char* take_cached(Device& d, Stream* s, bool of_small, size_t& n) {
    auto& pool = d.cached[{s, of_small}];
    auto best = pool.end();
    for (auto it = pool.begin(); it != pool.end(); ++it)
        if (it->second >= n && (best == pool.end() || it->second < best->second)) best = it;
    if (best == pool.end()) return nullptr;
    char* p = best->first;
    size_t left = best->second - n;
    pool.erase(best);
    if (left >= (of_small ? kRound : kMib)) pool[p + n] = left;
    else n += left;
    return p;
}

size_t segment_size(size_t n) {
    if (is_small(n)) return 2 * kMib;
    return n < 10 * kMib ? 20 * kMib : (n + 2 * kMib - 1) / (2 * kMib) * (2 * kMib);
}
}  // namespace

int device_of(const void* p) {
    for (int i = 0; i < options().devices; i++) {
        Device& d = devices[i];
        if (d.face && (char*)p >= d.face && (char*)p < d.face + options().bytes) return i;
    }
    return -1;
}

void* alias(const void* p) {
    if (!p) return nullptr;
    int dev = device_of(p);
    if (dev < 0) return pinned_alias(p);
    return devices[dev].back + ((char*)p - devices[dev].face);
}

bool block_of(uintptr_t p, uintptr_t& base, size_t& bytes) {
    std::lock_guard<std::recursive_mutex> g(order_lock());
    int dev = device_of((void*)p);
    if (dev < 0) return false;
    auto& used = devices[dev].used;
    auto it = used.upper_bound((char*)p);
    if (it == used.begin()) return false;
    --it;
    if ((char*)p >= it->first + it->second.bytes) return false;
    base = uintptr_t(it->first);
    bytes = it->second.asked;
    return true;
}

void empty_cache(int dev) {
    CallSite site;
    std::lock_guard<std::recursive_mutex> g(order_lock());
    Device& d = device(dev);
    reuse_waiting(d, true);
    for (auto& [key, pool] : d.cached) {
        if (!pool.empty()) synchronize(key.first);  // cudaFree waits for the device
        std::erase_if(pool, [&](auto& range) {
            auto segment = d.segments.find(range.first);
            if (segment == d.segments.end() || segment->second.first != range.second) return false;
            put(d.free_ranges, range.first, range.second, nullptr);
            d.reserved -= range.second;
            d.s.segments_freed++;
            d.count("reserved_bytes", segment->second.second, -int64_t(range.second));
            d.count("segment", segment->second.second, -1);
            d.segments.erase(segment);
            return true;
        });
    }
}

void* allocate(size_t asked, int dev, Stream* s) {
    CallSite site;
    size_t n = std::max(kRound, (asked + kRound - 1) / kRound * kRound);
    std::lock_guard<std::recursive_mutex> g(order_lock());
    Device& d = device(dev);
    reuse_waiting(d, false);
    const bool of_small = is_small(n);
    char* p = take_cached(d, s, of_small, n);
    if (!p) {
        size_t want = segment_size(n);
        char* segment = reserve(d, want, of_small);
        if (!segment) {
            d.s.retries++;
            empty_cache(dev);
            p = take_cached(d, s, of_small, n);
            if (!p) segment = reserve(d, want, of_small);
        }
        if (segment) {
            d.cached[{s, of_small}][segment] = want;
            p = take_cached(d, s, of_small, n);
        }
    }
    if (!p) {
        d.s.ooms++;
        return nullptr;
    }
    hand_out(s, p, n);
    d.used[p] = {n, asked, s, {}, of_small};
    for (auto what : {"allocated_bytes", "active_bytes"}) d.count(what, of_small, int64_t(n));
    for (auto what : {"allocation", "active"}) d.count(what, of_small, 1);
    d.count("requested_bytes", of_small, int64_t(asked));
    return p;
}

void release(void* p) {
    if (!p) return;
    CallSite site;
    std::lock_guard<std::recursive_mutex> g(order_lock());
    int dev = device_of(p);
    if (dev < 0 || !devices[dev].used.count((char*)p)) {
        report("misuse", "memory is freed that is not allocated");
        return;
    }
    Device& d = devices[dev];
    Block b = d.used[(char*)p];
    d.used.erase((char*)p);
    d.count("allocated_bytes", b.of_small, -int64_t(b.bytes));
    d.count("allocation", b.of_small, -1);
    d.count("requested_bytes", b.of_small, -int64_t(b.asked));
    if (b.uses.empty()) {
        // Nothing is written here: another stream may rightly still read the block, if the owner waits for that stream
        // before it allocates again.
        std::vector<Span> span{{uintptr_t(p), uintptr_t(p) + b.bytes, true, nullptr}};
        if (options().strict_free) b.stream->push("free", [] {}, span, Kind::kFree);
        cache(d, (char*)p, b);
        return;
    }
    Waiting w{{}, (char*)p, b};
    for (auto* s : b.uses) {
        w.events.push_back(std::make_shared<Event>());
        record(w.events.back().get(), s);
    }
    d.waiting.push_back(std::move(w));
}

void record_use(void* p, Stream* s) {
    std::lock_guard<std::recursive_mutex> g(order_lock());
    int dev = device_of(p);
    if (dev < 0) return;
    auto it = devices[dev].used.find((char*)p);
    if (it == devices[dev].used.end() || it->second.stream == s) return;
    auto& u = it->second.uses;
    if (std::find(u.begin(), u.end(), s) == u.end()) u.push_back(s);
}

Stats stats(int dev) {
    std::lock_guard<std::recursive_mutex> g(order_lock());
    Device& d = device(dev);
    for (auto what : {"allocated_bytes", "reserved_bytes", "requested_bytes", "active_bytes", "inactive_split_bytes",
                      "allocation", "segment", "active", "inactive_split"})
        d.s.counts[what];
    for (bool of_small : {true, false}) {  // what is free in segments of which a part is used
        int64_t bytes = 0, count = 0;
        for (auto& [key, pool] : d.cached) {
            if (key.second != of_small) continue;
            for (auto& [at, n] : pool) {
                auto segment = d.segments.find(at);
                if (segment != d.segments.end() && segment->second.first == n) continue;
                bytes += int64_t(n);
                count++;
            }
        }
        auto set = [&](const char* what, int64_t value) {
            int64_t change = value - d.s.counts[what][of_small ? 1 : 2].current;
            if (change) d.count(what, of_small, change);
        };
        set("inactive_split_bytes", bytes);
        set("inactive_split", count);
    }
    return d.s;
}

void reset_peak(int dev) {
    std::lock_guard<std::recursive_mutex> g(order_lock());
    for (auto& [what, three] : device(dev).s.counts)
        for (auto& count : three) count.reset_peak();
}

void reset_accumulated(int dev) {
    std::lock_guard<std::recursive_mutex> g(order_lock());
    Stats& s = device(dev).s;
    for (auto& [what, three] : s.counts)
        for (auto& count : three) count.allocated = count.freed = 0;
    s.retries = s.ooms = s.segments_made = s.segments_freed = 0;
}

void set_limit(int dev, size_t n) {
    std::lock_guard<std::recursive_mutex> g(order_lock());
    device(dev).limit = std::min(n, options().bytes);
}

}  // namespace sim
