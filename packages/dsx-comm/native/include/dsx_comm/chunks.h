// How a message is cut up: into chunks, one a step, and these into blocks, so that what comes from memory and what lies
// in the cache is handled in turn and neither waits for the other.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "dsx_comm/segment.h"

namespace dsx {

constexpr int64_t BLOCK = 16384;  // bytes that are handled in one go inside a chunk

// Outputs of this many bytes do not fit the caches beside their inputs: write past them.
inline bool is_large(int64_t bytes) { return bytes >= 2 << 20; }

// memcpy that may be given nothing: the pointers of empty tensors are null
inline void put(void* dst, const void* src, size_t bytes) {
    if (bytes != 0) std::memcpy(dst, src, bytes);
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

// The same, each piece cut again into one slice a rank. Rank r's slice of chunk c is the bytes [begin, begin + length).
struct Slices {
    struct Span {
        int64_t begin, length;
    };

    Slices(int64_t total, int ranks, int64_t limit_) : chunks(total, limit_ * ranks), n(ranks), limit(limit_) {}
    Span of(int64_t c, int r) const {
        const int64_t all = chunks.size(c);
        const int64_t each = std::min(limit, static_cast<int64_t>(up(static_cast<size_t>((all + n - 1) / n), LINE)));
        const int64_t from = std::min(all, each * r), to = std::min(all, each * (r + 1));
        return {chunks.begin(c) + from, to - from};
    }

    Chunks chunks;
    int n;
    int64_t limit;
};

}  // namespace dsx
