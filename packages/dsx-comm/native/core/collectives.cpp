// The collectives. Loops over chunks interleave what has to be read from memory with what lies in the cache, block by block,
// so that neither waits for the other; see group.h for the rule of steps.
//
// Symmetric memory helps only where all ranks' data lies in it. The first step of a call tells; if some have it and some do not, those
// without forget what they staged in that step, and all begin again as if nobody had (`s = -1; continue`).
#include <algorithm>
#include <cstring>

#include "dsx_comm/group.h"

namespace dsx {
namespace {

constexpr int64_t BLOCK = 16384;           // bytes that are handled in one go inside a chunk
constexpr int64_t STREAM_FROM = 2 << 20;   // outputs of this size do not fit the caches beside their inputs: write past them

// memcpy that may be given nothing: the pointers of empty tensors are null
inline void put(void* dst, const void* src, size_t bytes) {
    if (bytes != 0) std::memcpy(dst, src, bytes);
}

const char* call_name(int32_t call) {
    static const char* const names[] = {"nothing", "all_reduce", "all_gather", "reduce_scatter", "broadcast",
                                        "reduce",  "gather",     "scatter",    "all_to_all",     "barrier"};
    return call >= 0 && call <= static_cast<int32_t>(Call::barrier) ? names[call] : "?";
}
const char* dtype_name(int32_t d) {
    // beyond `Dtype`: what is only moved (shm/codes.py)
    static const char* const names[] = {"float32", "float64", "bfloat16", "float16", "int8", "uint8", "int16", "int32", "int64",
                                        "bool", "complex64", "complex128", "a dtype of its own"};
    return names[std::min<int32_t>(d, sizeof names / sizeof *names - 1)];
}
const char* reduce_name(int32_t r) {
    static const char* const names[] = {"SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"};
    return r >= 0 && r < 8 ? names[r] : "?";
}

bool alike(const Descriptor& a, const Descriptor& b) {
    return a.call == b.call && a.dtype == b.dtype && a.reduce == b.reduce && a.root == b.root && a.bytes == b.bytes &&
           a.shape == b.shape;
}

std::string say(const Descriptor& d) {
    std::string text = call_name(d.call);
    if (d.call == static_cast<int32_t>(Call::barrier)) return text;
    text += " of " + std::to_string(d.bytes) + " bytes";
    if (d.dtype >= 0) text += std::string(" ") + dtype_name(d.dtype);
    if (d.reduce >= 0) text += std::string(" ") + reduce_name(d.reduce);
    if (d.root >= 0) text += " root " + std::to_string(d.root);
    if (d.shape != 0) text += " (part sizes hash " + std::to_string(d.shape & 0xffff) + ")";
    return text;
}

int64_t hash_sizes(const int64_t* sizes, int n) {
    uint64_t h = 1469598103934665603ull;
    for (int i = 0; i < n; i++) h = (h ^ static_cast<uint64_t>(sizes[i])) * 1099511628211ull;
    return static_cast<int64_t>(h | 1);
}

// Splits `total` into `n` pieces of equal size (but the last), multiples of a cache line, each at most `limit`.
struct Chunks {
    int64_t total, piece, n;
    Chunks(int64_t total_, int64_t limit) : total(total_) {
        n = std::max<int64_t>(1, (total + limit - 1) / limit);
        piece = std::min<int64_t>(limit, static_cast<int64_t>(up(static_cast<size_t>((total + n - 1) / n), LINE)));
    }
    int64_t begin(int64_t c) const { return std::min(total, c * piece); }
    int64_t size(int64_t c) const { return begin(c + 1) - begin(c); }
};

}  // namespace

Group::Group(void* memory, Settings settings)
    : base_(static_cast<char*>(memory)), set_(std::move(settings)), k_(kernels()), outlet_(k_, set_.stores) {
    auto* g = group();
    layout_.size = g->size;
    layout_.in_bytes = static_cast<size_t>(g->in_bytes);
    layout_.slice_bytes = static_cast<size_t>(g->slice_bytes);
    layout_.mailbox_bytes = static_cast<size_t>(g->mailbox_bytes);
    set_.one_shot = std::min<int64_t>(set_.one_shot, g->in_bytes);
}

void Group::format(void* memory, const Layout& layout, uint64_t nonce0, uint64_t nonce1) {
    auto* g = static_cast<GroupHeader*>(memory);
    g->size = layout.size;
    g->in_bytes = static_cast<int64_t>(layout.in_bytes);
    g->slice_bytes = static_cast<int64_t>(layout.slice_bytes);
    g->mailbox_bytes = static_cast<int64_t>(layout.mailbox_bytes);
    g->total = static_cast<int64_t>(layout.total());
    g->nonce[0] = nonce0;
    g->nonce[1] = nonce1;
    g->magic = MAGIC;
}

Group::Doing Group::begin(const char* what, double timeout) {
    check_poison();
    calls_++;
    return {what, Clock::now() + std::chrono::microseconds(static_cast<int64_t>(std::min(timeout, 1e9) * 1e6)), timeout, {}};
}

Descriptor Group::descriptor(Call call, int64_t bytes, int code) const {
    Descriptor d;
    d.call = static_cast<int32_t>(call);
    d.dtype = code;
    d.reduce = -1;
    d.bytes = bytes;
    d.sequence = calls_;
    return d;
}

void Group::describe(const Descriptor& mine) { header(rank())->doing[(step_ + 1) & 1] = mine; }

bool Group::agree(const Descriptor& mine) const {
    bool same_memory = true;
    for (int r = 0; r < size(); r++) {
        if (r == rank()) continue;
        const Descriptor& theirs = header(r)->doing[step_ & 1];
        if (!alike(mine, theirs)) disagree(mine);
        same_memory = same_memory && mine.memory == theirs.memory;
    }
    return same_memory;
}

void Group::disagree(const Descriptor& mine) const {
    std::string text = "ranks call different collectives (call #" + std::to_string(calls_) + " of the group): ";
    for (int r = 0; r < size(); r++)
        text += (r ? "; rank " : "rank ") + name(r) + ": " + say(r == rank() ? mine : header(r)->doing[step_ & 1]);
    throw Mismatch(text + ". No data was exchanged.");
}

bool Group::open(const Doing& doing, const Descriptor& mine) {
    describe(mine);
    post();
    await(doing);
    return agree(mine);
}

void Group::show(char* place, const char* from, size_t bytes) {
    if (size() == 2)
        put(place, from, bytes);
    else
        outlet_.copy(place, from, bytes);
}

ReduceArgs Group::reduction(const ReduceSpec& spec) const {
    ReduceArgs a{};
    a.nsources = size();
    a.premultiply = spec.premultiply;
    a.divide = spec.average ? size() : 1.0;
    return a;
}

void Group::barrier(double timeout) {
    auto doing = begin("barrier", timeout);
    open(doing, descriptor(Call::barrier, 0));
}

// - reductions

static Descriptor with(const Descriptor& plain, const ReduceSpec& spec) {
    Descriptor d = plain;
    d.dtype = static_cast<int32_t>(spec.dtype);
    d.reduce = spec.average ? 7 : static_cast<int32_t>(spec.reduce);
    int64_t factor;
    std::memcpy(&factor, &spec.premultiply, sizeof factor);
    if (spec.premultiply != 1.0) d.shape ^= factor | 1;
    return d;
}

void Group::all_reduce(void* data, int64_t count, const ReduceSpec& spec, const Symmetric& where, double timeout) {
    auto doing = begin("all_reduce", timeout);
    int64_t bytes = count * static_cast<int64_t>(size_of(spec.dtype));
    Descriptor mine = with(descriptor(Call::all_reduce, bytes), spec);
    mine.memory = where.memory;
    mine.offset = where.offset;
    if (where && open(doing, mine)) return symmetric_all_reduce(spec, where, doing, mine);
    mine.memory = -1;
    if (bytes <= set_.one_shot) return one_shot_all_reduce(data, count, spec, doing, mine);
    staged_all_reduce(static_cast<char*>(data), count, spec, doing, mine);
}

// Everybody shows everything, everybody sums everything.
void Group::one_shot_all_reduce(void* data, int64_t count, const ReduceSpec& spec, const Doing& doing, const Descriptor& mine) {
    do put(in(rank(), step_ + 1), data, static_cast<size_t>(mine.bytes));
    while (!open(doing, mine));
    std::vector<const void*> sources(static_cast<size_t>(size()));
    for (int r = 0; r < size(); r++) sources[static_cast<size_t>(r)] = r == rank() ? data : in(r, step_);
    ReduceArgs a = reduction(spec);
    a.dst = data;
    a.sources = sources.data();
    a.count = count;
    k_.reduce[static_cast<int>(spec.dtype)][static_cast<int>(spec.reduce)](a);
}

// Chunk c passes three stages, one per step: the peers' slices are shown (in), the own slice is summed and shown (out), the peers'
// sums are fetched. In one step the three stages of three chunks run interleaved.
void Group::staged_all_reduce(char* data, int64_t count, const ReduceSpec& spec, const Doing& doing, const Descriptor& mine) {
    const int P = size();
    const auto width = static_cast<int64_t>(size_of(spec.dtype));
    const auto slice_limit = static_cast<int64_t>(layout_.slice_bytes);
    const Chunks chunks(count * width, slice_limit * P);
    // in chunk c rank r owns the bytes [begin, begin + length)
    auto slice = [&](int64_t c, int r, int64_t& begin, int64_t& length) {
        int64_t each = static_cast<int64_t>(up(static_cast<size_t>((chunks.size(c) + P - 1) / P), LINE));
        each = std::min(each, slice_limit);
        int64_t from = std::min(chunks.size(c), each * r), to = std::min(chunks.size(c), each * (r + 1));
        begin = chunks.begin(c) + from, length = to - from;
    };
    auto reduce = k_.reduce[static_cast<int>(spec.dtype)][static_cast<int>(spec.reduce)];
    std::vector<const void*> sources(static_cast<size_t>(P));
    ReduceArgs args = reduction(spec);
    args.sources = sources.data();

    for (int64_t s = 0; s < chunks.n + 2; s++) {
        if (s == 0) describe(mine);
        if (s == 1 && !agree(mine)) { s = -1; continue; }
        const uint64_t now = step_ + 1, before = step_;
        outlet_.step(mine.bytes);
        for (int64_t at = 0; at < slice_limit; at += BLOCK) {
            bool any = false;
            int64_t begin, length;
            auto part = [&] { return std::min(BLOCK, length - at); };
            if (s < chunks.n)
                for (int k = 1; k < P; k++) {
                    int r = (rank() + k) % P;
                    slice(s, r, begin, length);
                    if (at >= length) continue;
                    any = true;
                    put(in(rank(), r, now) + at, data + begin + at, static_cast<size_t>(part()));
                }
            if (s >= 1 && s - 1 < chunks.n) {
                slice(s - 1, rank(), begin, length);
                if (at < length) {
                    any = true;
                    for (int r = 0; r < P; r++)
                        sources[static_cast<size_t>(r)] =
                            r == rank() ? data + begin + at : in(r, rank(), before) + at;
                    args.dst = data + begin + at;
                    args.count = part() / width;
                    reduce(args);
                    show(out(rank(), now) + at, data + begin + at, static_cast<size_t>(part()));
                }
            }
            if (s >= 2)
                for (int k = 1; k < P; k++) {
                    int r = (rank() + k) % P;
                    slice(s - 2, r, begin, length);
                    if (at >= length) continue;
                    any = true;
                    put(data + begin + at, out(r, before) + at, static_cast<size_t>(part()));
                }
            if (!any) break;
        }
        if (s < chunks.n + 1) {
            post();
            await(doing);
        }
    }
}

std::vector<const char*> Group::peers(const Symmetric& where) const {
    std::vector<const char*> found(static_cast<size_t>(size()));
    for (int r = 0; r < size(); r++)
        found[static_cast<size_t>(r)] = where.bases[static_cast<size_t>(r)] +
                                        (r == rank() ? where.offset : header(r)->doing[step_ & 1].offset);
    return found;
}

// Each rank sums its slice over the peers' memory and writes it there: no staging.
void Group::symmetric_all_reduce(const ReduceSpec& spec, const Symmetric& where, const Doing& doing, const Descriptor& mine) {
    const auto width = static_cast<int64_t>(size_of(spec.dtype));
    const auto from = peers(where);
    const int64_t each = static_cast<int64_t>(up(static_cast<size_t>((mine.bytes + size() - 1) / size()), LINE));
    const int64_t begin = std::min(mine.bytes, each * rank()), end = std::min(mine.bytes, each * (rank() + 1));
    std::vector<const void*> sources(from.size());
    ReduceArgs a = reduction(spec);
    a.sources = sources.data();
    for (int64_t at = begin; at < end; at += BLOCK) {
        for (size_t r = 0; r < from.size(); r++) sources[r] = from[r] + at;
        a.count = std::min(BLOCK, end - at) / width;
        a.dst = const_cast<char*>(from[static_cast<size_t>(rank())]) + at;
        k_.reduce[static_cast<int>(spec.dtype)][static_cast<int>(spec.reduce)](a);
        for (int k = 1; k < size(); k++)  // lines that were read just now
            put(const_cast<char*>(from[static_cast<size_t>((rank() + k) % size())]) + at, a.dst, static_cast<size_t>(a.count * width));
    }
    post();
    await(doing);
}

void Group::reduce_scatter(void* output, const char* const* inputs, const int64_t* counts, const ReduceSpec& spec,
                           const Symmetric& where, double timeout) {
    auto doing = begin("reduce_scatter", timeout);
    const int P = size();
    const auto width = static_cast<int64_t>(size_of(spec.dtype));
    int64_t total = 0, largest = 0;
    for (int r = 0; r < P; r++) total += counts[r] * width, largest = std::max(largest, counts[r] * width);
    Descriptor mine = with(descriptor(Call::reduce_scatter, total), spec);
    mine.shape ^= hash_sizes(counts, P);
    mine.memory = where.memory;
    mine.offset = where.offset;
    auto reduce = k_.reduce[static_cast<int>(spec.dtype)][static_cast<int>(spec.reduce)];
    std::vector<const void*> sources(static_cast<size_t>(P));
    ReduceArgs args = reduction(spec);
    args.sources = sources.data();
    auto* to = static_cast<char*>(output);
    const int64_t own = counts[rank()] * width;
    // in place the lines are in the cache already
    args.stream = own >= STREAM_FROM && to != inputs[rank()];
    if (where && open(doing, mine)) {
        const auto from = peers(where);
        const int64_t skip = inputs[rank()] - inputs[0];
        for (int64_t at = 0; at < own; at += BLOCK) {
            for (size_t r = 0; r < from.size(); r++) sources[r] = from[r] + skip + at;
            args.dst = to + at;
            args.count = std::min(BLOCK, own - at) / width;
            reduce(args);
        }
        post();
        return await(doing);
    }
    mine.memory = -1;
    const auto limit = static_cast<int64_t>(layout_.slice_bytes);
    const Chunks chunks(largest, limit);
    auto length = [&](int64_t c, int r) {
        return std::max<int64_t>(0, std::min(counts[r] * width, chunks.begin(c + 1)) - chunks.begin(c));
    };
    for (int64_t s = 0; s < chunks.n + 1; s++) {
        if (s == 0) describe(mine);
        if (s == 1 && !agree(mine)) { s = -1; continue; }
        const uint64_t now = step_ + 1, before = step_;
        for (int64_t at = 0; at < limit; at += BLOCK) {
            bool any = false;
            if (s < chunks.n)
                for (int k = 1; k < P; k++) {
                    int r = (rank() + k) % P;
                    int64_t left = length(s, r) - at;
                    if (left <= 0) continue;
                    any = true;
                    put(in(rank(), r, now) + at, inputs[r] + chunks.begin(s) + at, static_cast<size_t>(std::min(BLOCK, left)));
                }
            int64_t left = s >= 1 ? length(s - 1, rank()) - at : 0;
            if (left > 0) {
                any = true;
                const int64_t begin = chunks.begin(s - 1) + at;
                for (int r = 0; r < P; r++)
                    sources[static_cast<size_t>(r)] = r == rank() ? inputs[r] + begin : in(r, rank(), before) + at;
                args.dst = to + begin;
                args.count = std::min(BLOCK, left) / width;
                reduce(args);
            }
            if (!any) break;
        }
        if (s < chunks.n) {
            post();
            await(doing);
        }
    }
}

void Group::reduce(void* data, int64_t count, int root, const ReduceSpec& spec, double timeout) {
    auto doing = begin("reduce", timeout);
    const int P = size();
    const auto width = static_cast<int64_t>(size_of(spec.dtype));
    Descriptor mine = with(descriptor(Call::reduce, count * width), spec);
    mine.root = root;
    auto* user = static_cast<char*>(data);
    const Chunks chunks(count * width, static_cast<int64_t>(layout_.in_bytes));
    std::vector<const void*> sources(static_cast<size_t>(P));
    ReduceArgs args = reduction(spec);
    args.sources = sources.data();
    for (int64_t s = 0; s < chunks.n + 1; s++) {
        if (s == 0) describe(mine);
        if (s == 1) agree(mine);
        const uint64_t now = step_ + 1, before = step_;
        outlet_.step(mine.bytes);
        if (s < chunks.n && rank() != root)
            outlet_.copy(in(rank(), now), user + chunks.begin(s), static_cast<size_t>(chunks.size(s)));
        if (s >= 1 && rank() == root) {
            for (int64_t at = 0; at < chunks.size(s - 1); at += BLOCK) {
                for (int r = 0; r < P; r++)
                    sources[static_cast<size_t>(r)] = r == root ? user + chunks.begin(s - 1) + at : in(r, before) + at;
                args.dst = user + chunks.begin(s - 1) + at;
                args.count = std::min(BLOCK, chunks.size(s - 1) - at) / width;
                k_.reduce[static_cast<int>(spec.dtype)][static_cast<int>(spec.reduce)](args);
            }
        }
        if (s < chunks.n) {
            post();
            await(doing);
        }
    }
}

// - copies

void Group::all_gather(const void* source, char* const* outputs, int64_t bytes, int code, const Symmetric& where, double timeout) {
    auto doing = begin("all_gather", timeout);
    Descriptor mine = descriptor(Call::all_gather, bytes, code);
    mine.memory = where.memory;
    mine.offset = where.offset;
    const auto* from = static_cast<const char*>(source);
    char* own = outputs[rank()];
    const bool stream = bytes >= STREAM_FROM / 2;
    if (where && open(doing, mine)) {
        const auto memory = peers(where);
        for (int k = 0; k < size(); k++) {
            int r = (rank() + k) % size();
            if (outputs[r] != memory[static_cast<size_t>(r)])
                k_.copy(outputs[r], memory[static_cast<size_t>(r)], static_cast<size_t>(bytes), stream);
        }
        post();
        return await(doing);
    }
    mine.memory = -1;
    const Chunks chunks(bytes, static_cast<int64_t>(layout_.in_bytes));
    for (int64_t s = 0; s < chunks.n + 1; s++) {
        if (s == 0) describe(mine);
        if (s == 1 && !agree(mine)) { s = -1; continue; }
        const uint64_t now = step_ + 1, before = step_;
        outlet_.step(bytes * size());
        const int64_t next = s < chunks.n ? chunks.size(s) : 0, last = s >= 1 ? chunks.size(s - 1) : 0;
        for (int64_t at = 0; at < std::max(next, last); at += BLOCK) {
            if (at < next) {
                const auto n = static_cast<size_t>(std::min(BLOCK, next - at));
                const char* piece = from + chunks.begin(s) + at;
                show(in(rank(), now) + at, piece, n);
                if (own != from) k_.copy(own + chunks.begin(s) + at, piece, n, stream);
            }
            if (at < last) {
                const auto n = static_cast<size_t>(std::min(BLOCK, last - at));
                for (int k = 1; k < size(); k++) {
                    int r = (rank() + k) % size();
                    k_.copy(outputs[r] + chunks.begin(s - 1) + at, in(r, before) + at, n, stream);
                }
            }
        }
        if (s < chunks.n) {
            post();
            await(doing);
        }
    }
}

void Group::broadcast(void* data, int64_t bytes, int code, int root, double timeout) {
    auto doing = begin("broadcast", timeout);
    Descriptor mine = descriptor(Call::broadcast, bytes, code);
    mine.root = root;
    auto* user = static_cast<char*>(data);
    const Chunks chunks(bytes, static_cast<int64_t>(layout_.in_bytes));
    for (int64_t s = 0; s < chunks.n + 1; s++) {
        if (s == 0) describe(mine);
        if (s == 1) agree(mine);
        outlet_.step(bytes);
        if (rank() == root && s < chunks.n)
            outlet_.copy(in(root, step_ + 1), user + chunks.begin(s), static_cast<size_t>(chunks.size(s)));
        if (rank() != root && s >= 1)
            k_.copy(user + chunks.begin(s - 1), in(root, step_), static_cast<size_t>(chunks.size(s - 1)), bytes >= STREAM_FROM);
        if (s < chunks.n) {
            post();
            await(doing);
        }
    }
}

void Group::gather(const void* source, char* const* outputs, int64_t bytes, int code, int root, double timeout) {
    auto doing = begin("gather", timeout);
    Descriptor mine = descriptor(Call::gather, bytes, code);
    mine.root = root;
    const auto* from = static_cast<const char*>(source);
    const Chunks chunks(bytes, static_cast<int64_t>(layout_.in_bytes));
    for (int64_t s = 0; s < chunks.n + 1; s++) {
        if (s == 0) describe(mine);
        if (s == 1) agree(mine);
        if (rank() != root && s < chunks.n)
            put(in(rank(), step_ + 1), from + chunks.begin(s), static_cast<size_t>(chunks.size(s)));
        if (rank() == root) {
            if (s < chunks.n && outputs[root] != from)
                put(outputs[root] + chunks.begin(s), from + chunks.begin(s), static_cast<size_t>(chunks.size(s)));
            if (s >= 1)
                for (int r = 0; r < size(); r++)
                    if (r != root)
                        put(outputs[r] + chunks.begin(s - 1), in(r, step_), static_cast<size_t>(chunks.size(s - 1)));
        }
        if (s < chunks.n) {
            post();
            await(doing);
        }
    }
}

void Group::scatter(const char* const* inputs, void* output, int64_t bytes, int code, int root, double timeout) {
    auto doing = begin("scatter", timeout);
    Descriptor mine = descriptor(Call::scatter, bytes, code);
    mine.root = root;
    const auto limit = static_cast<int64_t>(layout_.slice_bytes);
    auto* to = static_cast<char*>(output);
    const Chunks chunks(bytes, limit);
    for (int64_t s = 0; s < chunks.n + 1; s++) {
        if (s == 0) describe(mine);
        if (s == 1) agree(mine);
        if (rank() == root && s < chunks.n)
            for (int r = 0; r < size(); r++) {
                char* place = r == root ? to + chunks.begin(s) : in(root, r, step_ + 1);
                const char* piece = inputs[r] + chunks.begin(s);
                if (place != piece) put(place, piece, static_cast<size_t>(chunks.size(s)));
            }
        if (rank() != root && s >= 1)
            put(to + chunks.begin(s - 1), in(root, rank(), step_), static_cast<size_t>(chunks.size(s - 1)));
        if (s < chunks.n) {
            post();
            await(doing);
        }
    }
}

// The first step shows the sizes: how many more there are is known only then.
void Group::all_to_all(const char* const* inputs, const int64_t* in_bytes, char* const* outputs, const int64_t* out_bytes,
                       int code, double timeout) {
    auto doing = begin("all_to_all", timeout);
    const int P = size();
    Descriptor mine = descriptor(Call::all_to_all, 0, code);
    for (int r = 0; r < P; r++) mine.largest = std::max(mine.largest, in_bytes[r]);
    put(in(rank(), step_ + 1), in_bytes, static_cast<size_t>(P) * sizeof(int64_t));
    open(doing, mine);
    int64_t largest = mine.largest;
    std::string wrong;
    for (int r = 0; r < P; r++) {
        largest = std::max(largest, r == rank() ? 0 : header(r)->doing[step_ & 1].largest);
        int64_t sent = r == rank() ? in_bytes[r] : reinterpret_cast<const int64_t*>(in(r, step_))[rank()];
        if (sent != out_bytes[r] && wrong.empty())
            wrong = "all_to_all: rank " + name(r) + " sends " + std::to_string(sent) + " bytes to rank " + name(rank()) +
                    ", which expects " + std::to_string(out_bytes[r]) + " from it";
    }
    if (!wrong.empty()) {  // the others do not know yet
        poison(Failure::mismatch, wrong);
        throw Mismatch(wrong);
    }
    if (inputs[rank()] != outputs[rank()] && in_bytes[rank()] != 0)
        std::memmove(outputs[rank()], inputs[rank()], static_cast<size_t>(in_bytes[rank()]));
    const auto limit = static_cast<int64_t>(layout_.slice_bytes);
    const Chunks chunks(largest, limit);
    for (int64_t s = 0; s < chunks.n + 1; s++) {
        const uint64_t now = step_ + 1, before = step_;
        for (int k = 1; k < P; k++) {
            int r = (rank() + k) % P;
            if (s < chunks.n) {
                int64_t n = std::min(in_bytes[r], chunks.begin(s + 1)) - chunks.begin(s);
                if (n > 0) put(in(rank(), r, now), inputs[r] + chunks.begin(s), static_cast<size_t>(n));
            }
            if (s >= 1) {
                int64_t n = std::min(out_bytes[r], chunks.begin(s)) - chunks.begin(s - 1);
                if (n > 0)
                    put(outputs[r] + chunks.begin(s - 1), in(r, rank(), before), static_cast<size_t>(n));
            }
        }
        if (s < chunks.n) {
            post();
            await(doing);
        }
    }
}

}  // namespace dsx
