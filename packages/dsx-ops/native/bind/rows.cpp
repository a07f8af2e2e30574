// The functions of a transformer layer for Python.
#include "work.h"

namespace dsx {
namespace {

constexpr int64_t MOST_BLOCKS = 128;

// Rows cut into blocks for sums over rows; depends on the number of rows alone, so that no thread count changes a sum.
struct Blocks {
    int64_t rows, size, count;
    explicit Blocks(int64_t rows_) : rows(rows_), size(std::max<int64_t>(32, (rows + MOST_BLOCKS - 1) / MOST_BLOCKS)) {
        count = (rows + size - 1) / size;
    }
    // f(block, first row, end row)
    template <class F> void parallel(int threads, int64_t elements, const F& f) const {
        if (elements < SERIAL_BELOW) threads = 1;
        on_threads(threads, chosen().own_threads, [&](int part, int parts) {
            for (int64_t b = count * part / parts; b < count * (part + 1) / parts; ++b)
                f(b, b * size, std::min(rows, (b + 1) * size));
        });
    }
};

template <class F> void over_rows(int64_t rows, int64_t cols, int threads, const F& f) {
    if (rows * cols < SERIAL_BELOW) threads = 1;
    on_threads(threads, chosen().own_threads,
               [&](int part, int parts) { f(rows * part / parts, rows * (part + 1) / parts); });
}

void add_blocks(const std::vector<float>& parts, int64_t blocks, int64_t cols, int64_t out, int threads) {
    const RowKernels& k = *tables().row;
    const std::vector<int64_t> sizes{cols};
    if (blocks * cols < SERIAL_BELOW) threads = 1;
    const Plan plan(sizes, ALIGN);
    on_threads(threads, chosen().own_threads, [&](int part, int n) {
        plan.run(sizes, part, n, [&](size_t, int64_t begin, int64_t end) {
            k.add_rows(parts.data(), blocks, cols, pointer<float>(out), begin, end);
        });
    });
}

bool past_caches(int64_t elements, int dtype) { return elements * (dtype == F32 ? 4 : 2) >= STREAM_ABOVE; }

// addresses: x, residual, total, weight, bias, y, mean, rstd.
void layer_norm(const std::vector<int64_t>& a, int dtype, int64_t rows, int64_t cols, double eps, int threads) {
    if (a.size() != 8) throw std::invalid_argument("expected 8 addresses");
    const NormRows n{static_cast<DType>(dtype), cols,
                     static_cast<float>(eps),   pointer<float>(a[3]),
                     pointer<float>(a[4]),      pointer<char>(a[0]),
                     pointer<char>(a[1]),       pointer<char>(a[2]),
                     pointer<char>(a[5]),       pointer<float>(a[6]),
                     pointer<float>(a[7]),      past_caches(rows * cols, dtype)};
    const RowKernels& k = *tables().row;
    py::gil_scoped_release release;
    over_rows(rows, cols, threads, [&](int64_t begin, int64_t end) { k.layer_norm(n, begin, end); });
}

// addresses: grad, saved, mean, rstd, weight, bias, inverse, extra, dx, dweight, dbias (the last two fp32).
void layer_norm_backward(const std::vector<int64_t>& a, int dtype, int64_t rows, int64_t cols, int threads) {
    if (a.size() != 11) throw std::invalid_argument("expected 11 addresses");
    const NormBackRows n{static_cast<DType>(dtype), cols,
                         pointer<float>(a[4]),      pointer<float>(a[5]),
                         pointer<float>(a[6]),      pointer<char>(a[0]),
                         pointer<char>(a[1]),       pointer<char>(a[7]),
                         pointer<float>(a[2]),      pointer<float>(a[3]),
                         pointer<char>(a[8]),       past_caches(rows * cols, dtype)};
    const RowKernels& k = *tables().row;
    py::gil_scoped_release release;
    const Blocks blocks(rows);
    std::vector<float> dweight(static_cast<size_t>(blocks.count * cols)),
        dbias(static_cast<size_t>(blocks.count * cols));
    blocks.parallel(threads, rows * cols, [&](int64_t b, int64_t begin, int64_t end) {
        k.layer_norm_backward(n, begin, end, dweight.data() + b * cols, dbias.data() + b * cols);
    });
    add_blocks(dweight, blocks.count, cols, a[9], threads);
    add_blocks(dbias, blocks.count, cols, a[10], threads);
}

// addresses: x, out, mask, and int64 [rows] with the index of the mask's element for each row's first column (0 without
// a mask).
void softmax(const std::vector<int64_t>& a, int dtype, int64_t rows, int64_t cols, double scale, int mask_kind,
             int64_t column_step, int threads) {
    if (a.size() != 4) throw std::invalid_argument("expected 4 addresses");
    const SoftmaxRows s{static_cast<DType>(dtype),
                        cols,
                        static_cast<float>(scale),
                        pointer<char>(a[0]),
                        nullptr,
                        pointer<char>(a[1]),
                        static_cast<MaskKind>(mask_kind),
                        pointer<char>(a[2]),
                        pointer<int64_t>(a[3]),
                        column_step,
                        past_caches(rows * cols, dtype)};
    const RowKernels& k = *tables().row;
    py::gil_scoped_release release;
    over_rows(rows, cols, threads, [&](int64_t begin, int64_t end) {
        std::vector<float> scratch(static_cast<size_t>((cols + LANES - 1) / LANES * LANES));
        k.softmax(s, begin, end, scratch.data());
    });
}

void softmax_backward(int64_t grad, int64_t y, int64_t out, int dtype, int64_t rows, int64_t cols, double scale,
                      int threads) {
    const SoftmaxRows s{static_cast<DType>(dtype),
                        cols,
                        static_cast<float>(scale),
                        pointer<char>(y),
                        pointer<char>(grad),
                        pointer<char>(out),
                        MASK_NONE,
                        nullptr,
                        nullptr,
                        0,
                        past_caches(rows * cols, dtype)};
    const RowKernels& k = *tables().row;
    py::gil_scoped_release release;
    over_rows(rows, cols, threads, [&](int64_t begin, int64_t end) { k.softmax_backward(s, begin, end); });
}

// addresses: x, other, bias, out, sums (fp32 [cols] or 0). dropout: threshold, seed, offset.
void bias_function(int form, const std::vector<int64_t>& a, int dtype, int64_t rows, int64_t cols, double keep_scale,
                   const std::vector<int64_t>& dropout, int threads) {
    if (a.size() != 5 || dropout.size() != 3)
        throw std::invalid_argument("expected 5 addresses and 3 numbers of dropout");
    if (form < GELU_TANH || form > DROPOUT_RESIDUAL) throw std::invalid_argument("unknown form");
    const int64_t numel = rows * cols;
    const bool by_row = a[2] != 0 || a[4] != 0;
    const BiasRows b{static_cast<BiasForm>(form),
                     static_cast<DType>(dtype),
                     by_row ? cols : std::max<int64_t>(numel, 1),
                     pointer<char>(a[0]),
                     pointer<char>(a[1]),
                     pointer<float>(a[2]),
                     pointer<char>(a[3]),
                     static_cast<uint32_t>(dropout[0]),
                     static_cast<uint32_t>(dropout[1]),
                     static_cast<float>(keep_scale),
                     dropout[2],
                     past_caches(numel, dtype)};
    const RowKernels& k = *tables().row;
    py::gil_scoped_release release;
    if (a[4] == 0) {
        const std::vector<int64_t> sizes{numel};
        Plan(sizes, ALIGN).parallel(sizes, threads, [&](size_t, int64_t begin, int64_t end) {
            k.bias_function(b, begin, end, nullptr);
        });
        return;
    }
    const Blocks blocks(rows);
    std::vector<float> sums(static_cast<size_t>(blocks.count * cols));
    blocks.parallel(threads, numel, [&](int64_t block, int64_t begin, int64_t end) {
        k.bias_function(b, begin * cols, end * cols, sums.data() + block * cols);
    });
    add_blocks(sums, blocks.count, cols, a[4], threads);
}

}  // namespace

void bind_rows(py::module_& m) {
    m.def("layer_norm", &layer_norm);
    m.def("layer_norm_backward", &layer_norm_backward);
    m.def("softmax", &softmax);
    m.def("softmax_backward", &softmax_backward);
    m.def("bias_function", &bias_function);
}

}  // namespace dsx
