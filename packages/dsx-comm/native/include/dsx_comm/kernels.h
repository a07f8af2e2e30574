// The arithmetic of the collectives: sums (and the like) of several buffers in a fixed order, and copies past the
// cache.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace dsx {

enum class Dtype : int { f32, f64, bf16, f16, i8, u8, i16, i32, i64, count };
enum class Reduce : int { sum, product, min, max, band, bor, bxor, count };

inline size_t size_of(Dtype d) {
    switch (d) {
        case Dtype::f64:
        case Dtype::i64: return 8;
        case Dtype::f32:
        case Dtype::i32: return 4;
        case Dtype::bf16:
        case Dtype::f16:
        case Dtype::i16: return 2;
        default: return 1;
    }
}

// dst = sources[0] op sources[1] op ..., in this order; 16-bit floats accumulate in float32 and are rounded once.
// Each source is multiplied by `premultiply` first, the result divided by `divide` last (both 1: not done).
// dst may be one of the sources. `stream`: write past the cache.
struct ReduceArgs {
    void* dst;
    const void* const* sources;
    int nsources;
    int64_t count;
    double premultiply = 1.0;
    double divide = 1.0;
    bool stream = false;
};
using ReduceFn = void (*)(const ReduceArgs&);

struct Kernels {
    const char* name;
    ReduceFn reduce[static_cast<int>(Dtype::count)]
                   [static_cast<int>(Reduce::count)];  // null: no meaning (bits of floats)
    void (*copy)(void* dst, const void* src, size_t bytes, bool stream);
    // What was written past the cache is in order with other stores only after `fence_stores`.
};

inline void fence_stores() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_sfence();
#endif
}

const Kernels& kernels();                          // chosen once: DSX_ISA, else the widest this CPU has
const Kernels& kernels_named(const std::string&);  // throws: unknown, or this CPU cannot run it
std::vector<std::string> runnable_isas();

}  // namespace dsx
