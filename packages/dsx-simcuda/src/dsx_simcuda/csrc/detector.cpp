// Who is ordered behind whom: a clock per stream, and the last accesses of every byte range.
//
// A launch ticks its stream's clock. An event holds a copy of the clock, a stream that waits for it merges the copy, a
// wait of the host merges it into the host's clock, and every launch merges the host's. An access is ordered behind an
// earlier one if the clock of its stream has reached the earlier one's tick.
#include <algorithm>
#include <set>

#include "core.h"

namespace sim {

namespace {
constexpr size_t kHistory = 20000;
std::recursive_mutex lock;
Clock host;  // what the host (any thread of it) has waited for
std::atomic<uint64_t> next_id{1};
std::deque<LaunchPtr> last_launches;

struct Access {
    LaunchPtr launch;
    std::shared_ptr<const Geometry> gaps;
    uintptr_t lo = 0;
};

struct Interval {
    uintptr_t hi;
    std::vector<Access> writers;  // more than one only where they have gaps
    std::vector<Access> readers;  // the last one of each stream, or more where they have gaps
};

constexpr size_t kMostGaps = 8;  // accesses with gaps that an interval remembers

std::map<uintptr_t, Interval> intervals;  // by lo; a byte in none was never touched
size_t prune_at = 4096;

void merge(Clock& into, const Clock& from) {
    if (into.size() < from.size()) into.resize(from.size());
    for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

uint64_t at(const Clock& c, int i) { return size_t(i) < c.size() ? c[size_t(i)] : 0; }

bool reached(const Clock& c, const Access& a) { return at(c, a.launch->stream) >= a.launch->tick; }

void split(uintptr_t x) {
    auto it = intervals.upper_bound(x);
    if (it == intervals.begin()) return;
    --it;
    if (it->first < x && x < it->second.hi) {
        Interval right = it->second;
        it->second.hi = x;
        intervals.emplace(x, std::move(right));
    }
}

// What every later launch is ordered behind anyway need not be remembered.
void prune() {
    if (intervals.size() < prune_at) return;
    for (auto it = intervals.begin(); it != intervals.end();) {
        Interval& v = it->second;
        for (auto* list : {&v.writers, &v.readers})
            std::erase_if(*list, [](const Access& a) { return reached(host, a); });
        it = v.writers.empty() && v.readers.empty() ? intervals.erase(it) : std::next(it);
    }
    prune_at = std::max<size_t>(4096, 2 * intervals.size());
}

// The runs of bytes of an access, as [lo, hi) pairs; empty if they are too many to list.
std::vector<std::pair<uintptr_t, uintptr_t>> runs(const Geometry& g, uintptr_t lo) {
    std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size), the smallest stride first
    for (size_t i = 0; i < g.sizes.size(); i++)
        if (g.sizes[i] != 1 && g.strides[i] != 0) dims.push_back({g.strides[i], g.sizes[i]});
    std::sort(dims.begin(), dims.end());
    int64_t run = 1;
    size_t first = 0;
    for (; first < dims.size() && dims[first].first == run; first++) run *= dims[first].second;
    std::vector<std::pair<uintptr_t, uintptr_t>> found{{lo, lo + size_t(run) * g.item}};
    for (size_t d = first; d < dims.size(); d++) {
        if (found.size() * size_t(dims[d].second) > 2000000) return {};
        std::vector<std::pair<uintptr_t, uintptr_t>> more;
        for (int64_t i = 0; i < dims[d].second; i++)
            for (auto& [a, b] : found) {
                size_t offset = size_t(i * dims[d].first) * g.item;
                more.push_back({a + offset, b + offset});
            }
        found = std::move(more);
    }
    std::sort(found.begin(), found.end());
    return found;
}

// Whether two accesses of which one has gaps really share a byte.
bool share_bytes(const Access& a, const Access& b, uintptr_t lo, uintptr_t hi) {
    if (!a.gaps && !b.gaps) return true;
    std::vector<std::pair<uintptr_t, uintptr_t>> whole{{lo, hi}};
    auto x = a.gaps ? runs(*a.gaps, a.lo) : whole, y = b.gaps ? runs(*b.gaps, b.lo) : whole;
    if (x.empty() || y.empty()) return true;
    for (size_t i = 0, j = 0; i < x.size() && j < y.size();) {
        if (std::max(x[i].first, y[j].first) < std::min(x[i].second, y[j].second)) return true;
        x[i].second < y[j].second ? i++ : j++;
    }
    return false;
}

const char* kind_of(const Access& mine, bool write, bool before_wrote) {
    if (mine.launch->kind == Kind::kNewMemory || mine.launch->kind == Kind::kFree) return "freed while in use";
    if (!write) return "read before write";
    return before_wrote ? "write after write" : "write after read";
}

void race(const Access& before, const Access& mine, const char* kind, uintptr_t where) {
    Report r;
    r.kind = kind;
    r.later = mine.launch;
    r.earlier = before.launch;
    r.address = where;
    r.place = mine.launch->place;
    r.device = device_of((void*)where);
    block_of(where, r.block, r.block_bytes);
    Stream *late = stream_by_number(mine.launch->stream), *early = stream_by_number(before.launch->stream);
    // The later stream did wait since, but for a stream of another device, where the memory is not used.
    const LaunchPtr& wait = late->last_wait;
    bool foreign = wait && wait->id > before.launch->id && stream_by_number(wait->other_stream)->dev != late->dev;
    r.wrong_device = r.device >= 0 && (late->dev != early->dev || (foreign && late->dev == r.device));
    report(std::move(r));
}

class Toucher {  // the accesses of one launch
  public:
    Toucher(Stream* s, LaunchPtr launch) : stream_(s), launch_(std::move(launch)) {}

    void touch(const Span& span) {
        if (span.lo >= span.hi) return;
        split(span.lo);
        split(span.hi);
        Access mine{launch_, span.gaps, span.lo};
        const bool replaces = span.write && !span.gaps;
        auto it = intervals.lower_bound(span.lo);
        for (uintptr_t x = span.lo; x < span.hi;) {
            if (it == intervals.end() || it->first > x) {
                uintptr_t hi = it == intervals.end() ? span.hi : std::min<uintptr_t>(it->first, span.hi);
                if (!replaces) add(intervals.emplace_hint(it, x, Interval{hi, {}, {}})->second, mine, span.write);
                x = hi;
                continue;
            }
            Interval& v = it->second;
            for (auto& w : v.writers) compare(w, mine, span.write, x, v.hi, true);
            for (auto& r : v.readers)
                if (span.write) compare(r, mine, true, x, v.hi, false);
            x = v.hi;
            if (replaces) {
                it = intervals.erase(it);
            } else {
                add(v, mine, span.write);
                ++it;
            }
        }
        if (replaces) intervals[span.lo] = Interval{span.hi, {mine}, {}};
    }

  private:
    Stream* stream_;
    LaunchPtr launch_;
    std::set<std::pair<uint64_t, const char*>> told_;

    void compare(const Access& before, const Access& mine, bool write, uintptr_t lo, uintptr_t hi, bool wrote) {
        if (before.launch->stream == stream_->number || reached(stream_->clock, before)) return;
        const char* kind = kind_of(mine, write, wrote);
        if (told_.count({before.launch->id, kind}) || !share_bytes(before, mine, lo, hi)) return;
        told_.insert({before.launch->id, kind});
        race(before, mine, kind, lo);
    }

    // A later access of the same stream stands for an earlier one, unless one of them has gaps that the other has not.
    static void add(Interval& v, const Access& mine, bool write) {
        auto& list = write ? v.writers : v.readers;
        for (auto& a : list)
            if (a.launch->stream == mine.launch->stream && !a.gaps && !mine.gaps) {
                a = mine;
                return;
            }
        if (list.size() >= kMostGaps && mine.gaps) list.erase(list.begin());
        list.push_back(mine);
    }
};
}  // namespace

std::recursive_mutex& order_lock() { return lock; }

LaunchPtr order(Stream* s, const std::string& name, Kind kind, const std::vector<Span>& spans, const Mark* waits_for) {
    auto launch = std::make_shared<Launch>();
    launch->id = next_id++;
    launch->stream = s->number;
    launch->kind = kind;
    launch->name = name;
    launch->place = CallSite::here();
    merge(s->clock, host);
    if (waits_for) {
        merge(s->clock, waits_for->clock);
        launch->other_stream = waits_for->stream->number;
        launch->other_tick = waits_for->tick;
    }
    if (size_t(s->number) >= s->clock.size()) s->clock.resize(size_t(s->number) + 1);
    launch->tick = ++s->clock[size_t(s->number)];
    if (waits_for) s->last_wait = launch;
    if (options().races) {
        Toucher toucher(s, launch);
        for (auto& span : spans) toucher.touch(span);
    }
    last_launches.push_back(launch);
    if (last_launches.size() > kHistory) last_launches.pop_front();
    return launch;
}

void order_on_device(Stream* s, const void* communicator) {
    struct Last {
        LaunchPtr launch;
        Clock clock;  // what its operations are ordered behind: they run one after the other, on whatever streams
    };
    static std::map<std::pair<int, const void*>, Last> all;
    LaunchPtr launch = last_launches.back();
    Last& mine = all[{s->dev, communicator}];
    merge(mine.clock, s->clock);
    mine.launch = launch;
    for (auto& [key, other] : all) {
        if (key.first != s->dev || &other == &mine) continue;
        if (at(mine.clock, other.launch->stream) >= other.launch->tick) continue;
        Report r;
        r.kind = "collectives not ordered";
        r.later = launch;
        r.earlier = other.launch;
        r.place = launch->place;
        r.device = s->dev;
        report(std::move(r));
    }
}

void host_has_waited_for(const Clock& clock) {
    std::lock_guard<std::recursive_mutex> g(lock);
    merge(host, clock);
    prune();
    pinned_settle();
}

bool host_is_behind(int stream, uint64_t tick) { return at(host, stream) >= tick; }

void forget_accesses(uintptr_t lo, uintptr_t hi) {
    std::lock_guard<std::recursive_mutex> g(lock);
    split(lo);
    split(hi);
    intervals.erase(intervals.lower_bound(lo), intervals.lower_bound(hi));
}

std::vector<LaunchPtr> history() {
    std::lock_guard<std::recursive_mutex> g(lock);
    return {last_launches.begin(), last_launches.end()};
}

uint64_t launches() { return next_id - 1; }

size_t intervals_kept() {
    std::lock_guard<std::recursive_mutex> g(lock);
    return intervals.size();
}

}  // namespace sim
