// softmax(scale x + mask) over the last dimension, and its backward. The threads of a row hold it in registers
// (rows.cuh): input and output cross memory once, in backward gradient, result and output.
#include "rows.cuh"

namespace dsx {
namespace cuda {
namespace {

// Where the mask's row for this row of scores begins.
__device__ __forceinline__ int64_t mask_row(const MaskView& m, const Divisor* sizes, int64_t row) {
    int64_t at = 0;
    for (int d = MASK_DIMS - 1; d >= 0; --d) {
        if (m.sizes[d] == 1) continue;
        const int64_t quotient = sizes[d].quotient(row);
        at += (row - quotient * m.sizes[d]) * m.strides[d];
        row = quotient;
    }
    return at;
}

struct Scores {
    const char* x;
    float scale;
    MaskView mask;
    Divisor sizes[MASK_DIMS];
    bool whole_rows, whole_mask;  // whole_mask: groups of the mask's elements can be read as words
};

// scale v + mask, for the elements c to c + n of a row whose mask begins at `at`.
template <int WIDTH>
__device__ __forceinline__ void mask_scores(const Scores& s, int64_t at, int64_t c, int n, Floats<WIDTH>& v) {
    for (int k = 0; k < WIDTH; ++k) v.x[k] = v.x[k] * s.scale;
    const MaskView& m = s.mask;
    if (m.kind == ADDED) {
        if (s.whole_mask && n == WIDTH) {
            const Floats<WIDTH> added = load<WIDTH>(m.dtype, m.at, at + c, n, true);
            for (int k = 0; k < WIDTH; ++k) v.x[k] = v.x[k] + added.x[k];
            return;
        }
        for (int k = 0; k < WIDTH; ++k)
            if (k < n) v.x[k] = v.x[k] + load1(m.dtype, m.at, at + (c + k) * m.column_stride);
    } else if (m.kind == TAKES_PART) {
        uint32_t words[WIDTH / 4];
        if (s.whole_mask && n == WIDTH) {
            for (int j = 0; j < WIDTH / 4; ++j) words[j] = fetch(reinterpret_cast<const uint32_t*>(m.at + at + c) + j);
        } else {
            for (int j = 0; j < WIDTH / 4; ++j) words[j] = 0;
            for (int k = 0; k < WIDTH; ++k)
                if (k < n)
                    words[k / 4] |= (uint32_t)(uint8_t)fetch(m.at + at + (c + k) * m.column_stride) << 8 * (k % 4);
        }
        for (int k = 0; k < WIDTH; ++k)
            if ((words[k / 4] >> 8 * (k % 4) & 0xffu) == 0) v.x[k] = -INFINITY;
    }
}

template <class Team, int HELD, int WIDTH>
__global__ void __launch_bounds__(row_threads<Team>(), row_blocks<Team, HELD>())
    softmax_rows(const Rows r, const Scores s, char* y) {
    __shared__ float scratch[LONG_ROW_THREADS / WARP];
    const DType dtype = narrowed<WIDTH>(r.dtype);
    const int64_t row = Team::first(), base = row * r.cols;
    if (row >= r.rows) return;
    const int64_t mask_at = s.mask.kind == NO_MASK ? 0 : mask_row(s.mask, s.sizes, row);
    const auto scores = [&](int64_t c, int n, bool) {
        Floats<WIDTH> v = load<WIDTH>(dtype, s.x, base + c, n, n == WIDTH && s.whole_rows);
        mask_scores<WIDTH>(s, mask_at, c, n, v);
        return v;
    };
    auto values = row_values<Team, HELD, WIDTH>(scores, r.cols);
    float top = -INFINITY;
    values.each([&](int64_t, int n, const Floats<WIDTH>& v) {
        for (int k = 0; k < WIDTH; ++k)
            if (k < n) top = Largest()(top, v.x[k]);
    });
    top = Team::all(top, Largest(), scratch);
    if (top == -INFINITY) top = 0.0f;  // nothing takes part: every weight is zero
    float total = 0;
    values.each([&](int64_t, int n, Floats<WIDTH>& v) {
        for (int k = 0; k < WIDTH; ++k) {
            v.x[k] = expf(v.x[k] - top);  // kept, when the row is held
            if (k < n) total = total + v.x[k];
        }
    });
    total = Team::all(total, Sum(), scratch);
    if (total == 0.0f) total = 1.0f;
    values.each([&](int64_t c, int n, const Floats<WIDTH>& v) {
        Floats<WIDTH> out;
        for (int k = 0; k < WIDTH; ++k) out.x[k] = (HELD > 0 ? v.x[k] : expf(v.x[k] - top)) / total;
        store(dtype, y, base + c, n, n == WIDTH && s.whole_rows, out);
    });
}

template <int WIDTH> struct GradientAndWeight {
    Raw<WIDTH> gradient, weight;
};

template <class Team, int HELD, int WIDTH>
__global__ void __launch_bounds__(row_threads<Team>(), row_blocks<Team, HELD>())
    softmax_rows_backward(const Rows r, const char* grad, const char* y, float scale, char* dx, bool whole_rows) {
    __shared__ float scratch[LONG_ROW_THREADS / WARP];
    typedef GradientAndWeight<WIDTH> Both;
    const DType dtype = narrowed<WIDTH>(r.dtype);
    const int64_t row = Team::first(), base = row * r.cols;
    if (row >= r.rows) return;
    const auto read = [&](int64_t c, int n, bool) {
        const bool whole = n == WIDTH && whole_rows;
        return Both{load_raw<WIDTH>(dtype, grad, base + c, n, whole), load_raw<WIDTH>(dtype, y, base + c, n, whole)};
    };
    auto values = row_values<Team, HELD, WIDTH>(read, r.cols);
    float dot = 0;
    values.each([&](int64_t, int, const Both& both) {
        const Floats<WIDTH> g = decode(dtype, both.gradient), w = decode(dtype, both.weight);
        for (int k = 0; k < WIDTH; ++k) dot = dot + g.x[k] * w.x[k];  // what is missing is zero
    });
    dot = Team::all(dot, Sum(), scratch);
    values.each([&](int64_t c, int n, const Both& both) {
        const Floats<WIDTH> g = decode(dtype, both.gradient), w = decode(dtype, both.weight);
        Floats<WIDTH> out;
        for (int k = 0; k < WIDTH; ++k) out.x[k] = scale * w.x[k] * (g.x[k] - dot);
        store(dtype, dx, base + c, n, n == WIDTH && whole_rows, out);
    });
}

// Whether every row of the mask begins at an address where WIDTH of its elements can be read as words.
template <int WIDTH> bool whole_mask(const MaskView& m) {
    if (m.kind == NO_MASK || m.column_stride != 1) return false;
    for (int d = 0; d < MASK_DIMS; ++d)
        if (m.sizes[d] != 1 && m.strides[d] % WIDTH != 0) return false;
    return m.kind == ADDED ? fits_words<WIDTH>(m.at, m.dtype) : fits(m.at, WIDTH);
}

}  // namespace

void masked_softmax(const Where& where, const Rows& r, const char* x, const MaskView& mask, float scale, char* y) {
    OnDevice on(where);
    by_width(r.dtype, [&](auto width) {
        constexpr int WIDTH = decltype(width)::value;
        Scores s{x, scale, mask, {}, whole_rows<WIDTH>(r, {x, y}), whole_mask<WIDTH>(mask)};
        for (int d = 0; d < MASK_DIMS; ++d) s.sizes[d] = Divisor(mask.sizes[d]);
        for_rows(r.rows, r.cols, [&](auto team, auto held, int64_t blocks, int threads) {
            launch(where, softmax_rows<decltype(team), decltype(held)::value, WIDTH>, blocks, threads, r, s, y);
        });
    });
}

void softmax_backward(const Where& where, const Rows& r, const char* grad, const char* y, float scale, char* dx) {
    OnDevice on(where);
    by_width(r.dtype, [&](auto width) {
        constexpr int WIDTH = decltype(width)::value;
        const bool whole = whole_rows<WIDTH>(r, {grad, y, dx});
        for_rows(r.rows, r.cols, [&](auto team, auto held, int64_t blocks, int threads) {
            launch(where, softmax_rows_backward<decltype(team), decltype(held)::value, WIDTH>, blocks, threads, r, grad,
                   y, scale, dx, whole);
        });
    });
}

}  // namespace cuda
}  // namespace dsx
