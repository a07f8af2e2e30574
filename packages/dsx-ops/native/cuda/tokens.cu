// Rows of a sequence picked out (gather) or put back (scatter) by index; bytes of any dtype. A warp moves one row.
#include "memory.cuh"

namespace dsx {
namespace cuda {
namespace {

constexpr int PER_BLOCK = THREADS / 32;

// An index outside of the sequence reads and writes nothing there: its gathered row is zero.
__global__ void __launch_bounds__(THREADS) move(const Move m, bool wide) {
    const int lane = (int)threadIdx.x % 32;
    const int64_t item = (int64_t)blockIdx.x * PER_BLOCK + threadIdx.x / 32;
    if (item >= m.batch * m.kept) return;
    const int64_t sample = item / m.kept, k = item % m.kept, position = m.indices[item];
    const bool inside = position >= 0 && position < m.sequence;
    const int64_t full_row = m.batch_first ? sample * m.sequence + position : position * m.batch + sample;
    const int64_t part_row = m.batch_first ? item : k * m.batch + sample;
    char *full = m.full + full_row * m.row_bytes, *part = m.part + part_row * m.row_bytes;
    if (!m.gather && !inside) return;
    const char* from = m.gather ? full : part;
    char* to = m.gather ? part : full;
    if (wide) {
        for (int64_t i = 16 * lane; i < m.row_bytes; i += 16 * 32)
            *reinterpret_cast<Words4*>(to + i) = inside ? *reinterpret_cast<const Words4*>(from + i) : Words4{};
    } else {
        for (int64_t i = lane; i < m.row_bytes; i += 32) to[i] = inside ? from[i] : 0;
    }
}

}  // namespace

void move_rows(const Where& where, const Move& m) {
    OnDevice on(where);
    const bool wide = m.row_bytes % 16 == 0 && fits(m.full, 16) && fits(m.part, 16);
    launch(where, move, (m.batch * m.kept + PER_BLOCK - 1) / PER_BLOCK, THREADS, m, wide);
}

}  // namespace cuda
}  // namespace dsx
