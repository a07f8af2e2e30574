// Rows gathered and scattered by index, for Python: memory is copied, nothing is computed, so there is no instruction
// set to choose.
#include <cstring>
#ifdef DSX_X86
#include <emmintrin.h>
#endif

#include "work.h"

namespace dsx {
namespace {

// A row that is only written, past the caches; both addresses and the size are multiples of 16.
void copy_past_caches(char* to, const char* from, int64_t bytes) {
#ifdef DSX_X86
    for (int64_t i = 0; i < bytes; i += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
#else
    std::memcpy(to, from, static_cast<size_t>(bytes));
#endif
}

// addresses: full [batch, sequence] rows (or [sequence, batch]), part [batch, kept] rows (or [kept, batch]), indices
// int64 [batch, kept]. sizes: batch, kept, sequence, bytes per row. The indices are in range.
void move_rows(bool gather, const std::vector<int64_t>& a, const std::vector<int64_t>& sizes, bool batch_first,
               int threads) {
    if (a.size() != 3 || sizes.size() != 4) throw std::invalid_argument("expected 3 addresses and 4 sizes");
    const int64_t batch = sizes[0], kept = sizes[1], sequence = sizes[2], bytes = sizes[3], rows = batch * kept;
    char *full = pointer<char>(a[0]), *part = pointer<char>(a[1]);
    const int64_t* indices = pointer<int64_t>(a[2]);
    py::gil_scoped_release release;
    if (rows * bytes < 4 * SERIAL_BELOW) threads = 1;
    const bool stream = rows * bytes >= STREAM_ABOVE && (a[0] | a[1] | bytes) % 16 == 0;
    on_threads(threads, chosen().own_threads, [&](int index, int count) {
        for (int64_t r = rows * index / count; r < rows * (index + 1) / count; ++r) {
            // Row r of part, in the order in which part lies.
            const int64_t b = batch_first ? r / kept : r % batch, k = batch_first ? r % kept : r / batch;
            const int64_t token = indices[b * kept + k];
            char* there = full + (batch_first ? b * sequence + token : token * batch + b) * bytes;
            char *to = gather ? part + r * bytes : there, *from = gather ? there : part + r * bytes;
            if (stream) copy_past_caches(to, from, bytes);
            else std::memcpy(to, from, static_cast<size_t>(bytes));
        }
#ifdef DSX_X86
        if (stream) _mm_sfence();
#endif
    });
}

}  // namespace

void bind_tokens(py::module_& m) { m.def("move_rows", &move_rows); }

}  // namespace dsx
