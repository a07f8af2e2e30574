// Rows of a sequence picked out (gather) or put back (scatter) by index; bytes of any dtype. A warp moves one row.
#include "memory.cuh"

namespace dsx {
namespace cuda {
namespace {

constexpr int MOVE_THREADS = 256, PER_BLOCK = MOVE_THREADS / 32;
constexpr int TURNS = 4;  // a lane's loads of four turns are in flight together

// Copies `count` words of type T, or zeros.
template <class T>
__device__ __forceinline__ void move_words(const char* from, char* to, int64_t count, bool inside, int lane) {
    for (int64_t i = lane; i < count; i += TURNS * 32) {
        T words[TURNS];
#pragma unroll
        for (int t = 0; t < TURNS; ++t) {
            const int64_t at = i + t * 32;
            words[t] = inside && at < count ? fetch(reinterpret_cast<const T*>(from) + at) : T{};
        }
#pragma unroll
        for (int t = 0; t < TURNS; ++t)
            if (i + t * 32 < count) put(reinterpret_cast<T*>(to) + i + t * 32, words[t]);
    }
}

// An index outside of the sequence reads and writes nothing there: its gathered row is zero.
__global__ void __launch_bounds__(MOVE_THREADS) move(const Move m, const Divisor kept, bool wide) {
    const int lane = (int)threadIdx.x % 32;
    const int64_t item = (int64_t)blockIdx.x * PER_BLOCK + threadIdx.x / 32;
    if (item >= m.batch * m.kept) return;
    const int64_t sample = kept.quotient(item), k = item - sample * m.kept, position = fetch(m.indices + item);
    const bool inside = position >= 0 && position < m.sequence;
    const int64_t full_row = m.batch_first ? sample * m.sequence + position : position * m.batch + sample;
    const int64_t part_row = m.batch_first ? item : k * m.batch + sample;
    char *full = m.full + full_row * m.row_bytes, *part = m.part + part_row * m.row_bytes;
    if (!m.gather && !inside) return;
    const char* from = m.gather ? full : part;
    char* to = m.gather ? part : full;
    if (wide) move_words<Words4>(from, to, m.row_bytes / 16, inside, lane);
    else move_words<char>(from, to, m.row_bytes, inside, lane);
}

}  // namespace

void move_rows(const Where& where, const Move& m) {
    OnDevice on(where);
    const bool wide = m.row_bytes % 16 == 0 && fits(m.full, 16) && fits(m.part, 16);
    launch(where, move, (m.batch * m.kept + PER_BLOCK - 1) / PER_BLOCK, MOVE_THREADS, m, Divisor(m.kept), wide);
}

}  // namespace cuda
}  // namespace dsx
