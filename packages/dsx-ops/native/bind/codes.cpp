// Codes of few bits for Python: groupwise integers, one-bit signs.
#include <cmath>

#include "work.h"

namespace dsx {
namespace {

// addresses: x, codes, scale, zero (0 when symmetric). numbers: numel, group, bits, offset.
void quantize(bool forward, const std::vector<int64_t>& addresses, int dtype, const std::vector<int64_t>& numbers, bool symmetric,
              bool stochastic, uint32_t seed, int threads) {
    if (addresses.size() != 4 || numbers.size() != 4) throw std::invalid_argument("expected 4 addresses and 4 numbers");
    const Quant q{static_cast<DType>(dtype), numbers[1], static_cast<int32_t>(numbers[2]), symmetric, stochastic, seed, numbers[3]};
    if (q.group <= 0 || q.group % LANES != 0 || (q.bits != 4 && q.bits != 8) || numbers[0] < 0)
        throw std::invalid_argument("expected a group that is a multiple of 16, and 4 or 8 bits");
    const QuantKernels& k = *tables().quant;
    const std::vector<int64_t> sizes{numbers[0]};
    char *x = pointer<char>(addresses[0]), *codes = pointer<char>(addresses[1]);
    float *scale = pointer<float>(addresses[2]), *zero = pointer<float>(addresses[3]);
    py::gil_scoped_release release;
    Plan(sizes, q.group).parallel(sizes, threads, [&](size_t, int64_t begin, int64_t end) {
        if (forward) k.quantize(q, x, codes, scale, zero, begin, end);
        else k.dequantize(q, codes, scale, zero, x, begin, end);
    });
}


// ---- signs --------------------------------------------------------------------------------------------------------------

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
    Plan(sizes, ALIGN).parallel(sizes, threads, [&](size_t, int64_t begin, int64_t end) {
        k.compress(type, pointer<const char>(x), pointer<char>(error), scale, pointer<char>(bits), begin, end);
    });
    return scale;
}

void mean_of_signs(int64_t bits, int64_t scales, int64_t ranks, int64_t out, int64_t numel, int threads) {
    const SignKernels& k = *tables().sign;
    const std::vector<int64_t> sizes{numel};
    const float factor = static_cast<float>(1.0 / static_cast<double>(ranks));
    py::gil_scoped_release release;
    Plan(sizes, ALIGN).parallel(sizes, threads, [&](size_t, int64_t begin, int64_t end) {
        k.mean(pointer<const char>(bits), (numel + 7) / 8, pointer<const float>(scales), ranks, factor, pointer<char>(out), begin, end);
    });
}

}  // namespace

void bind_codes(py::module_& m) {
    m.def("quantize", &quantize);
    m.def("pack_signs", &pack_signs);
    m.def("unpack_signs", &unpack_signs);
    m.def("compress_signs", &compress_signs);
    m.def("mean_of_signs", &mean_of_signs);
}

}  // namespace dsx
