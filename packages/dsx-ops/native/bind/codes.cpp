// Codes of few bits for Python: groupwise integers, one-bit signs.
#include <cmath>

#include "work.h"

namespace dsx {
namespace {

// numbers: format, dtype of x, group, offset, nodes, devices, pipeline, slice.
Quant quant_of(const std::vector<int64_t>& n, bool stochastic, uint32_t seed, int64_t written) {
    if (n.size() != 8) throw std::invalid_argument("expected 8 numbers");
    const Quant q{
        static_cast<Format>(n[0]), static_cast<DType>(n[1]), n[2], stochastic, seed, n[3], n[4], n[5], n[6], n[7],
        written >= STREAM_ABOVE};
    if (q.format < INT8 || q.format > E5M2) throw std::invalid_argument("unknown format");
    const bool halves = q.format == INT4 || q.format == INT4_ASYM;
    if (q.group <= 0 || (halves && q.group % 2 != 0))
        throw std::invalid_argument("expected a positive group size, even for 4 bits");
    return q;
}

// addresses: x, codes, scale, zero (0 when symmetric).
void quantize(bool forward, const std::vector<int64_t>& addresses, const std::vector<int64_t>& numbers, int64_t numel,
              bool stochastic, uint32_t seed, int threads) {
    if (addresses.size() != 4 || numel < 0) throw std::invalid_argument("expected 4 addresses");
    const Quant q = quant_of(numbers, stochastic, seed, numel * (numbers.size() > 1 && numbers[1] == F32 ? 4 : 2));
    const QuantKernels& k = *tables().quant;
    const std::vector<int64_t> sizes{numel};
    char *x = pointer<char>(addresses[0]), *codes = pointer<char>(addresses[1]);
    float *scale = pointer<float>(addresses[2]), *zero = pointer<float>(addresses[3]);
    py::gil_scoped_release release;
    Plan(sizes, q.group).parallel(sizes, threads, [&](size_t, int64_t begin, int64_t end) {
        if (forward) k.quantize(q, x, codes, scale, zero, begin, end);
        else k.dequantize(q, codes, scale, zero, x, begin, end);
    });
}

// Sum of what several ranks' codes stand for, times factor: as fp32 (out_numbers empty; to[0]) or as codes again (to:
// codes, scale, zero). from: codes, scale, zero. strides: bytes of codes and number of scales between ranks.
void reduce_codes(const std::vector<int64_t>& from, const std::vector<int64_t>& numbers, int64_t ranks,
                  const std::vector<int64_t>& strides, double factor, const std::vector<int64_t>& to,
                  const std::vector<int64_t>& out_numbers, int64_t numel, bool stochastic, uint32_t seed, int threads) {
    if (from.size() != 3 || to.size() != 3 || strides.size() != 2)
        throw std::invalid_argument("expected 3 addresses on both sides and 2 strides");
    const Quant q = quant_of(numbers, false, 0, 0);
    const bool again = !out_numbers.empty();
    Quant o = again ? quant_of(out_numbers, stochastic, seed, 0) : q;
    const QuantKernels& k = *tables().quant;
    const std::vector<int64_t> sizes{numel};
    const float f = static_cast<float>(factor);
    const bool halves = o.format == INT4 || o.format == INT4_ASYM;
    py::gil_scoped_release release;
    // Without codes again: pieces that stay in the first-level cache while the ranks are added up.
    const int64_t grain = again ? o.group : 2048;
    Plan(sizes, grain).parallel(sizes, threads, [&](size_t, int64_t begin, int64_t end) {
        std::vector<float> sum(again ? static_cast<size_t>(grain) : 0);
        for (int64_t at = begin; at < end; at += grain) {
            const int64_t stop = std::min(end, at + grain);
            float* out = again ? sum.data() : pointer<float>(to[0]) + at;
            k.reduce(q, pointer<const char>(from[0]), pointer<const float>(from[1]), pointer<const float>(from[2]),
                     ranks, strides[0], strides[1], f, out, at, stop);
            if (!again) continue;
            Quant part = o;
            part.dtype = F32;
            part.offset += at;
            const int64_t g = at / o.group;
            float* zero = pointer<float>(to[2]);
            k.quantize(part, reinterpret_cast<const char*>(out), pointer<char>(to[0]) + (halves ? at / 2 : at),
                       pointer<float>(to[1]) + g, zero ? zero + g : nullptr, 0, stop - at);
        }
    });
}

// ---- signs ------------------------------------------------------------------------------------------

void pack_signs(int dtype, int64_t x, int64_t bits, int64_t numel, int threads) {
    const SignKernels& k = *tables().sign;
    const std::vector<int64_t> sizes{numel};
    py::gil_scoped_release release;
    Plan(sizes, ALIGN).parallel(sizes, threads, [&](size_t, int64_t begin, int64_t end) {
        k.pack(static_cast<DType>(dtype), pointer<const char>(x), pointer<char>(bits), begin, end);
    });
}

// Rows of `numel` elements, each with its bytes and its scale.
void unpack_signs(int64_t bits, int64_t scales, int dtype, int64_t out, int64_t rows, int64_t numel, int threads) {
    const SignKernels& k = *tables().sign;
    const std::vector<int64_t> sizes(static_cast<size_t>(rows), numel);
    const int64_t bytes = (numel + 7) / 8, width = numel * (dtype == F32 ? 4 : 2);
    const bool stream = rows * width >= STREAM_ABOVE;
    py::gil_scoped_release release;
    Plan(sizes, ALIGN).parallel(sizes, threads, [&](size_t row, int64_t begin, int64_t end) {
        const int64_t r = static_cast<int64_t>(row);
        k.unpack(pointer<const char>(bits) + r * bytes, pointer<const float>(scales)[r], static_cast<DType>(dtype),
                 pointer<char>(out) + r * width, begin, end, stream);
    });
}

constexpr int64_t STRETCH =
    1 << 18;  // elements read forwards at a time: the processor's own prefetching has to see a stream

// Returns the scale |x + error| / sqrt(numel).
float compress_signs(int dtype, int64_t x, int64_t error, int64_t bits, int64_t numel, int threads) {
    const SignKernels& k = *tables().sign;
    const std::vector<int64_t> sizes{numel};
    const DType type = static_cast<DType>(dtype);
    py::gil_scoped_release release;
    const Plan chunks(sizes, CHUNK);
    std::vector<double> partials(static_cast<size_t>(chunks.total));
    chunks.parallel(sizes, threads, [&](size_t, int64_t begin, int64_t end) {
        k.squares(type, pointer<const char>(x), pointer<const char>(error), begin, end, partials.data());
    });
    double sum = 0;
    for (double p : partials) sum += p;
    const float scale = numel ? static_cast<float>(std::sqrt(sum / static_cast<double>(numel))) : 0.0f;
    // Backwards: what the first pass read last is still in a cache.
    Plan(sizes, ALIGN).parallel(sizes, threads, [&](size_t, int64_t begin, int64_t end) {
        for (int64_t stop = end; stop > begin;) {
            const int64_t at = begin + (stop - begin - 1) / STRETCH * STRETCH;
            k.compress(type, pointer<const char>(x), pointer<char>(error), scale, pointer<char>(bits), at, stop);
            stop = at;
        }
    });
    return scale;
}

void mean_of_signs(int64_t bits, int64_t scales, int64_t ranks, int64_t out, int64_t numel, int threads) {
    const SignKernels& k = *tables().sign;
    const std::vector<int64_t> sizes{numel};
    const float factor = static_cast<float>(1.0 / static_cast<double>(ranks));
    py::gil_scoped_release release;
    Plan(sizes, ALIGN).parallel(sizes, threads, [&](size_t, int64_t begin, int64_t end) {
        k.mean(pointer<const char>(bits), (numel + 7) / 8, pointer<const float>(scales), ranks, factor,
               pointer<char>(out), begin, end);
    });
}

}  // namespace

void bind_codes(py::module_& m) {
    m.def("quantize", &quantize);
    m.def("reduce_codes", &reduce_codes);
    m.def("pack_signs", &pack_signs);
    m.def("unpack_signs", &unpack_signs);
    m.def("compress_signs", &compress_signs);
    m.def("mean_of_signs", &mean_of_signs);
}

}  // namespace dsx
