// The collectives that add up. See group.h for the rule of steps.
#include <algorithm>
#include <cstring>

#include "dsx_comm/chunks.h"
#include "dsx_comm/group.h"

namespace dsx {
namespace {

int64_t hash_sizes(const int64_t* sizes, int n) {
    uint64_t h = 1469598103934665603ull;
    for (int i = 0; i < n; i++) h = (h ^ static_cast<uint64_t>(sizes[i])) * 1099511628211ull;
    return static_cast<int64_t>(h | 1);
}

Descriptor with(const Descriptor& plain, const ReduceSpec& spec) {
    Descriptor d = plain;
    d.dtype = static_cast<int32_t>(spec.dtype);
    d.reduce = spec.average ? 7 : static_cast<int32_t>(spec.reduce);
    int64_t factor;
    std::memcpy(&factor, &spec.premultiply, sizeof factor);
    if (spec.premultiply != 1.0) d.shape ^= factor | 1;
    return d;
}

int64_t width_of(const ReduceSpec& spec) { return static_cast<int64_t>(size_of(spec.dtype)); }

// Reduces what all ranks have to one place, a block at a time: give the sources, then run.
class Reducer {
  public:
    Reducer(const Kernels& k, const ReduceSpec& spec, int ranks)
        : run_(k.reduce[static_cast<int>(spec.dtype)][static_cast<int>(spec.reduce)]), width_(width_of(spec)),
          sources_(static_cast<size_t>(ranks)) {
        args_.nsources = ranks;
        args_.sources = sources_.data();
        args_.premultiply = spec.premultiply;
        args_.divide = spec.average ? ranks : 1.0;
    }
    const void*& source(int r) { return sources_[static_cast<size_t>(r)]; }
    void past_cache(bool stream) { args_.stream = stream; }
    void run(void* dst, int64_t bytes) {
        args_.dst = dst;
        args_.count = bytes / width_;
        run_(args_);
    }

  private:
    ReduceFn run_;
    int64_t width_;
    std::vector<const void*> sources_;
    ReduceArgs args_{};
};

}  // namespace

void Group::all_reduce(void* data, int64_t count, const ReduceSpec& spec, const Symmetric& where, double timeout) {
    auto context = begin("all_reduce", timeout);
    const int64_t bytes = count * width_of(spec);
    Descriptor mine = with(descriptor(Call::all_reduce, bytes), spec);
    mine.memory = where.memory;
    mine.offset = where.offset;
    if (where && open(context, mine)) return symmetric_all_reduce(spec, where, context, mine);
    mine.memory = -1;
    if (bytes <= set_.one_shot) return one_shot_all_reduce(data, spec, context, mine);
    staged_all_reduce(static_cast<char*>(data), spec, context, mine);
}

// Every rank copies all of its data to shared memory, and every rank sums all of it.
void Group::one_shot_all_reduce(void* data, const ReduceSpec& spec, const CallContext& context,
                                const Descriptor& mine) {
    do put(in(rank(), step_ + 1), data, static_cast<size_t>(mine.bytes));
    while (!open(context, mine));
    Reducer sum(k_, spec, size());
    for (int r = 0; r < size(); r++) sum.source(r) = r == rank() ? data : in(r, step_);
    sum.run(data, mine.bytes);
}

// Chunk c passes three stages, one per step: the peers' slices are shown (in), the own slice is summed and shown (out),
// the peers' sums are fetched. In one step the three stages of three chunks run interleaved.
void Group::staged_all_reduce(char* data, const ReduceSpec& spec, const CallContext& context, const Descriptor& mine) {
    const Slices slices(mine.bytes, size(), static_cast<int64_t>(layout_.slice_bytes));
    const int64_t n = slices.chunks.n;
    Reducer sum(k_, spec, size());
    // calls act(rank, place in data, bytes) for the part at `at` of the slices of chunk c that belong to others; false:
    // there is none
    auto theirs = [&](int64_t c, int64_t at, auto&& act) {
        bool any = false;
        for (int k = 1; k < size(); k++) {
            const int r = (rank() + k) % size();
            const auto span = slices.of(c, r);
            if (at >= span.length) continue;
            any = true;
            act(r, data + span.begin + at, static_cast<size_t>(std::min(BLOCK, span.length - at)));
        }
        return any;
    };
    auto own = [&](int64_t c, int64_t at) {
        const auto span = slices.of(c, rank());
        if (at >= span.length) return false;
        char* place = data + span.begin + at;
        const int64_t bytes = std::min(BLOCK, span.length - at);
        for (int r = 0; r < size(); r++) sum.source(r) = r == rank() ? place : in(r, rank(), step_) + at;
        sum.run(place, bytes);
        copy_to_shared(out(rank(), step_ + 1) + at, place, static_cast<size_t>(bytes));
        return true;
    };
    in_steps(n + 1, context, mine, [&](int64_t s) {
        stores_.step(mine.bytes);
        bool any = true;
        for (int64_t at = 0; any && at < slices.limit; at += BLOCK) {
            any = s < n &&
                  theirs(s, at, [&](int r, char* p, size_t bytes) { put(in(rank(), r, step_ + 1) + at, p, bytes); });
            if (s >= 1 && s - 1 < n) any |= own(s - 1, at);
            if (s >= 2)
                any |= theirs(s - 2, at, [&](int r, char* p, size_t bytes) { put(p, out(r, step_) + at, bytes); });
        }
    });
}

// Each rank sums its slice over the peers' memory and writes it there: no staging.
void Group::symmetric_all_reduce(const ReduceSpec& spec, const Symmetric& where, const CallContext& context,
                                 const Descriptor& mine) {
    const auto from = peers(where);
    auto place = [&](int r, int64_t at) { return const_cast<char*>(from[static_cast<size_t>(r)]) + at; };
    const int64_t each = static_cast<int64_t>(up(static_cast<size_t>((mine.bytes + size() - 1) / size()), LINE));
    const int64_t begin = std::min(mine.bytes, each * rank()), end = std::min(mine.bytes, each * (rank() + 1));
    Reducer sum(k_, spec, size());
    for (int64_t at = begin; at < end; at += BLOCK) {
        const int64_t bytes = std::min(BLOCK, end - at);
        for (int r = 0; r < size(); r++) sum.source(r) = place(r, at);
        char* result = place(rank(), at);
        sum.run(result, bytes);
        for (int k = 1; k < size(); k++)  // lines that were read just now
            put(place((rank() + k) % size(), at), result, static_cast<size_t>(bytes));
    }
    post();
    await(context);
}

void Group::reduce_scatter(void* output, const char* const* inputs, const int64_t* counts, const ReduceSpec& spec,
                           const Symmetric& where, double timeout) {
    auto context = begin("reduce_scatter", timeout);
    int64_t total = 0;
    for (int r = 0; r < size(); r++) total += counts[r] * width_of(spec);
    Descriptor mine = with(descriptor(Call::reduce_scatter, total), spec);
    mine.shape ^= hash_sizes(counts, size());
    mine.memory = where.memory;
    mine.offset = where.offset;
    const Scattered parts{static_cast<char*>(output), inputs, counts, width_of(spec)};
    if (where && open(context, mine)) return symmetric_reduce_scatter(parts, spec, where, context);
    mine.memory = -1;
    staged_reduce_scatter(parts, spec, context, mine);
}

// Outputs that do not fit the caches are written past them; in place, the lines are in the cache already.
bool Group::past_cache(const Scattered& parts) const {
    return is_large(parts.bytes(rank())) && parts.output != parts.inputs[rank()];
}

// Each rank sums its part over the peers' memory.
void Group::symmetric_reduce_scatter(const Scattered& parts, const ReduceSpec& spec, const Symmetric& where,
                                     const CallContext& context) {
    const auto from = peers(where);
    const int64_t skip = parts.inputs[rank()] - parts.inputs[0], own = parts.bytes(rank());
    Reducer sum(k_, spec, size());
    sum.past_cache(past_cache(parts));
    for (int64_t at = 0; at < own; at += BLOCK) {
        for (int r = 0; r < size(); r++) sum.source(r) = from[static_cast<size_t>(r)] + skip + at;
        sum.run(parts.output + at, std::min(BLOCK, own - at));
    }
    post();
    await(context);
}

// Chunk c passes two stages, one per step: the peers' parts are shown, the own one is summed.
void Group::staged_reduce_scatter(const Scattered& parts, const ReduceSpec& spec, const CallContext& context,
                                  const Descriptor& mine) {
    int64_t largest = 0;
    for (int r = 0; r < size(); r++) largest = std::max(largest, parts.bytes(r));
    const auto limit = static_cast<int64_t>(layout_.slice_bytes);
    const Chunks chunks(largest, limit);
    Reducer sum(k_, spec, size());
    sum.past_cache(past_cache(parts));
    // bytes left of rank r's part in chunk c from `at` on, at most a block
    auto left = [&](int64_t c, int r, int64_t at) {
        return std::min(BLOCK, std::min(parts.bytes(r), chunks.begin(c + 1)) - chunks.begin(c) - at);
    };
    auto give = [&](int64_t c, int64_t at) {
        bool any = false;
        for (int k = 1; k < size(); k++) {
            const int r = (rank() + k) % size();
            const int64_t bytes = left(c, r, at);
            if (bytes <= 0) continue;
            any = true;
            put(in(rank(), r, step_ + 1) + at, parts.inputs[r] + chunks.begin(c) + at, static_cast<size_t>(bytes));
        }
        return any;
    };
    auto take = [&](int64_t c, int64_t at) {
        const int64_t bytes = left(c, rank(), at), begin = chunks.begin(c) + at;
        if (bytes <= 0) return false;
        for (int r = 0; r < size(); r++)
            sum.source(r) = r == rank() ? parts.inputs[r] + begin : in(r, rank(), step_) + at;
        sum.run(parts.output + begin, bytes);
        return true;
    };
    in_steps(chunks.n, context, mine, [&](int64_t s) {
        bool any = true;
        for (int64_t at = 0; any && at < limit; at += BLOCK) {
            any = s < chunks.n && give(s, at);
            if (s >= 1) any |= take(s - 1, at);
        }
    });
}

void Group::reduce(void* data, int64_t count, int root, const ReduceSpec& spec, double timeout) {
    auto context = begin("reduce", timeout);
    Descriptor mine = with(descriptor(Call::reduce, count * width_of(spec)), spec);
    mine.root = root;
    auto* user = static_cast<char*>(data);
    const Chunks chunks(mine.bytes, static_cast<int64_t>(layout_.in_bytes));
    Reducer sum(k_, spec, size());
    in_steps(chunks.n, context, mine, [&](int64_t s) {
        stores_.step(mine.bytes);
        if (s < chunks.n && rank() != root)
            stores_.copy(in(rank(), step_ + 1), user + chunks.begin(s), static_cast<size_t>(chunks.size(s)));
        if (s == 0 || rank() != root) return;
        for (int64_t at = 0; at < chunks.size(s - 1); at += BLOCK) {
            char* place = user + chunks.begin(s - 1) + at;
            for (int r = 0; r < size(); r++) sum.source(r) = r == root ? place : in(r, step_) + at;
            sum.run(place, std::min(BLOCK, chunks.size(s - 1) - at));
        }
    });
}

}  // namespace dsx
