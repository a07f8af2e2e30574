// Products of a few vectors with a matrix of 8- or 4-bit codes for Python: checks sizes, cuts rows, releases the GIL.
#include "dsx_ops/matvec.h"

#include <cstring>

#include "work.h"

namespace dsx {
namespace base {
extern const MatvecKernels matvec_table;
}
#ifdef DSX_X86
namespace avx2 {
extern const MatvecKernels matvec_table;
}
namespace avx512 {
extern const MatvecKernels matvec_table;
}
#endif
namespace {

const MatvecKernels& matvec_kernels() {
#ifdef DSX_X86
    const char* name = tables().basic->name;
    if (std::strcmp(name, "avx512") == 0) return avx512::matvec_table;
    if (std::strcmp(name, "avx2") == 0) return avx2::matvec_table;
#endif
    return base::matvec_table;
}

// In each block of 32 columns the even ones first, then the odd ones; what is left of a row stays in order.
std::vector<float> split_pairs(const float* x, int64_t vectors, int64_t columns) {
    std::vector<float> split(x, x + vectors * columns);
    for (int64_t v = 0; v < vectors; ++v)
        for (int64_t block = 0; block + MATVEC_BLOCK <= columns; block += MATVEC_BLOCK)
            for (int64_t k = 0; k < MATVEC_BLOCK; ++k)
                split[v * columns + block + k / 2 + (k % 2) * (MATVEC_BLOCK / 2)] = x[v * columns + block + k];
    return split;
}

// addresses: codes, scales, x, out. numbers: rows, columns, groups of a row, vectors.
void quantized_matvec(int bits, const std::vector<int64_t>& addresses, const std::vector<int64_t>& numbers,
                      int threads) {
    if (addresses.size() != 4 || numbers.size() != 4) throw std::invalid_argument("expected 4 addresses and 4 numbers");
    const int64_t rows = numbers[0], columns = numbers[1], groups = numbers[2], vectors = numbers[3];
    if (bits != 8 && bits != 4) throw std::invalid_argument("expected 8 or 4 bits");
    if (rows < 0 || columns <= 0 || groups <= 0 || vectors < 0 || columns % groups != 0)
        throw std::invalid_argument("expected groups that divide the columns");
    if (groups > 1 && (columns / groups) % MATVEC_BLOCK != 0)
        throw std::invalid_argument("expected groups of a multiple of 32 codes");
    const PackedMatrix matrix{pointer<const uint8_t>(addresses[0]), pointer<const float>(addresses[1]), columns,
                              groups};
    const MatvecKernels& kernels = matvec_kernels();
    const auto kernel = bits == 8 ? kernels.int8 : kernels.int4;
    const float* x = pointer<const float>(addresses[2]);
    float* out = pointer<float>(addresses[3]);
    py::gil_scoped_release release;
    std::vector<float> split;
    if (bits == 4) {
        split = split_pairs(x, vectors, columns);
        x = split.data();
    }
    const int parts_wanted = rows * columns < SERIAL_BELOW ? 1 : threads;
    on_threads(parts_wanted, chosen().own_threads, [&](int part, int parts) {
        kernel(matrix, x, vectors, out, rows, rows * part / parts, rows * (part + 1) / parts);
    });
}

}  // namespace

void bind_matvec(py::module_& m) { m.def("quantized_matvec", &quantized_matvec); }

}  // namespace dsx
