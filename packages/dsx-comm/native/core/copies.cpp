// The collectives that only move data. See group.h for the rule of steps.
#include <algorithm>
#include <cstring>

#include "dsx_comm/chunks.h"
#include "dsx_comm/group.h"

namespace dsx {

void Group::copy_to_shared(char* place, const char* from, size_t bytes) {
    if (size() == 2) put(place, from, bytes);
    else stores_.copy(place, from, bytes);
}

void Group::all_gather(const void* source, char* const* outputs, int64_t bytes, int code, const Symmetric& where,
                       double timeout) {
    auto context = begin("all_gather", timeout);
    Descriptor mine = descriptor(Call::all_gather, bytes, code);
    mine.memory = where.memory;
    mine.offset = where.offset;
    if (where && open(context, mine)) return symmetric_all_gather(outputs, where, context, mine);
    mine.memory = -1;
    staged_all_gather(static_cast<const char*>(source), outputs, context, mine);
}

// Each rank copies from the peers' memory.
void Group::symmetric_all_gather(char* const* outputs, const Symmetric& where, const CallContext& context,
                                 const Descriptor& mine) {
    const auto memory = peers(where);
    const bool stream = is_large(mine.bytes * size());
    for (int k = 0; k < size(); k++) {
        const int r = (rank() + k) % size();
        const char* from = memory[static_cast<size_t>(r)];
        if (outputs[r] != from) k_.copy(outputs[r], from, static_cast<size_t>(mine.bytes), stream);
    }
    post();
    await(context);
}

void Group::staged_all_gather(const char* from, char* const* outputs, const CallContext& context,
                              const Descriptor& mine) {
    char* own = outputs[rank()];
    const bool stream = is_large(mine.bytes * size());
    const Chunks chunks(mine.bytes, static_cast<int64_t>(layout_.in_bytes));
    in_steps(chunks.n, context, mine, [&](int64_t s) {
        stores_.step(mine.bytes * size());
        const int64_t next = s < chunks.n ? chunks.size(s) : 0, last = s >= 1 ? chunks.size(s - 1) : 0;
        for (int64_t at = 0; at < std::max(next, last); at += BLOCK) {
            if (at < next) {
                const auto n = static_cast<size_t>(std::min(BLOCK, next - at));
                const char* piece = from + chunks.begin(s) + at;
                copy_to_shared(in(rank(), step_ + 1) + at, piece, n);
                if (own != from) k_.copy(own + chunks.begin(s) + at, piece, n, stream);
            }
            if (at < last) {
                const auto n = static_cast<size_t>(std::min(BLOCK, last - at));
                for (int k = 1; k < size(); k++) {
                    const int r = (rank() + k) % size();
                    k_.copy(outputs[r] + chunks.begin(s - 1) + at, in(r, step_) + at, n, stream);
                }
            }
        }
    });
}

void Group::broadcast(void* data, int64_t bytes, int code, int root, double timeout) {
    auto context = begin("broadcast", timeout);
    Descriptor mine = descriptor(Call::broadcast, bytes, code);
    mine.root = root;
    auto* user = static_cast<char*>(data);
    const Chunks chunks(bytes, static_cast<int64_t>(layout_.in_bytes));
    in_steps(chunks.n, context, mine, [&](int64_t s) {
        stores_.step(bytes);
        if (rank() == root && s < chunks.n)
            stores_.copy(in(root, step_ + 1), user + chunks.begin(s), static_cast<size_t>(chunks.size(s)));
        if (rank() != root && s >= 1)
            k_.copy(user + chunks.begin(s - 1), in(root, step_), static_cast<size_t>(chunks.size(s - 1)),
                    is_large(bytes));
    });
}

void Group::gather(const void* source, char* const* outputs, int64_t bytes, int code, int root, double timeout) {
    auto context = begin("gather", timeout);
    Descriptor mine = descriptor(Call::gather, bytes, code);
    mine.root = root;
    const auto* from = static_cast<const char*>(source);
    const bool stream = is_large(bytes * size());
    const Chunks chunks(bytes, static_cast<int64_t>(layout_.in_bytes));
    auto piece = [&](int64_t c) { return static_cast<size_t>(chunks.size(c)); };
    in_steps(chunks.n, context, mine, [&](int64_t s) {
        if (s < chunks.n && rank() != root) put(in(rank(), step_ + 1), from + chunks.begin(s), piece(s));
        if (rank() != root) return;
        if (s < chunks.n && outputs[root] != from)
            k_.copy(outputs[root] + chunks.begin(s), from + chunks.begin(s), piece(s), stream);
        for (int r = 0; s >= 1 && r < size(); r++)
            if (r != root) k_.copy(outputs[r] + chunks.begin(s - 1), in(r, step_), piece(s - 1), stream);
    });
}

void Group::scatter(const char* const* inputs, void* output, int64_t bytes, int code, int root, double timeout) {
    auto context = begin("scatter", timeout);
    Descriptor mine = descriptor(Call::scatter, bytes, code);
    mine.root = root;
    auto* to = static_cast<char*>(output);
    const bool stream = is_large(bytes);
    const Chunks chunks(bytes, static_cast<int64_t>(layout_.slice_bytes));
    in_steps(chunks.n, context, mine, [&](int64_t s) {
        for (int r = 0; rank() == root && s < chunks.n && r < size(); r++) {
            char* place = r == root ? to + chunks.begin(s) : in(root, r, step_ + 1);
            const char* piece = inputs[r] + chunks.begin(s);
            if (place != piece) put(place, piece, static_cast<size_t>(chunks.size(s)));
        }
        if (rank() != root && s >= 1)
            k_.copy(to + chunks.begin(s - 1), in(root, rank(), step_), static_cast<size_t>(chunks.size(s - 1)), stream);
    });
}

// The first step shows all sizes, so that every rank finds the same fault, and how many steps there are.
void Group::all_to_all(const char* const* inputs, const int64_t* in_bytes, char* const* outputs,
                       const int64_t* out_bytes, int code, double timeout) {
    auto context = begin("all_to_all", timeout);
    const int P = size();
    const auto row = static_cast<size_t>(P) * sizeof(int64_t);
    put(in(rank(), step_ + 1), in_bytes, row);
    put(in(rank(), step_ + 1) + row, out_bytes, row);
    const Descriptor mine = descriptor(Call::all_to_all, 0, code);
    open(context, mine);
    int64_t largest = 0;
    for (int r = 0; r < P; r++) {
        const int64_t* sends = r == rank() ? in_bytes : reinterpret_cast<const int64_t*>(in(r, step_));
        for (int q = 0; q < P; q++) {
            const int64_t expected =
                (q == rank() ? out_bytes : reinterpret_cast<const int64_t*>(in(q, step_) + row))[r];
            if (sends[q] != expected)
                throw Mismatch("all_to_all: rank " + name(r) + " sends " + std::to_string(sends[q]) +
                               " bytes to rank " + name(q) + ", which expects " + std::to_string(expected) +
                               " from it. No data was exchanged.");
            if (q != r) largest = std::max(largest, sends[q]);
        }
    }
    if (inputs[rank()] != outputs[rank()] && in_bytes[rank()] != 0)
        std::memmove(outputs[rank()], inputs[rank()], static_cast<size_t>(in_bytes[rank()]));
    const bool stream = is_large(largest * P);
    const Chunks chunks(largest, static_cast<int64_t>(layout_.slice_bytes));
    in_steps(chunks.n, context, mine, [&](int64_t s) {
        for (int k = 1; k < P; k++) {
            const int r = (rank() + k) % P;
            const int64_t gives = s < chunks.n ? std::min(in_bytes[r], chunks.begin(s + 1)) - chunks.begin(s) : 0;
            if (gives > 0) put(in(rank(), r, step_ + 1), inputs[r] + chunks.begin(s), static_cast<size_t>(gives));
            const int64_t takes = s >= 1 ? std::min(out_bytes[r], chunks.begin(s)) - chunks.begin(s - 1) : 0;
            if (takes > 0)
                k_.copy(outputs[r] + chunks.begin(s - 1), in(r, rank(), step_), static_cast<size_t>(takes), stream);
        }
    });
}

}  // namespace dsx
