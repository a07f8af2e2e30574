// Signs and scales of many runs of one flat buffer in one call, over the kernels of one instruction set.
#include <cmath>

#include "work.h"

namespace dsx {
namespace {

constexpr int64_t PARTIALS = SIGN_PIECE / CHUNK;  // sums per piece, the last ones unused in a shorter piece
constexpr int64_t TOGETHER = 1 << 18;             // elements of neighbouring runs that are read twice while in a cache

const SignPiece* pieces_at(int64_t address) { return pointer<const SignPiece>(address); }

const char* bytes_at(const float* values) { return reinterpret_cast<const char*>(values); }
char* bytes_at(float* values) { return reinterpret_cast<char*>(values); }

std::vector<int64_t> sizes_of(const SignPiece* pieces, int64_t from, int64_t to) {
    std::vector<int64_t> sizes;
    sizes.reserve(static_cast<size_t>(to - from));
    for (int64_t p = from; p < to; ++p) sizes.push_back(pieces[p].end - pieces[p].begin);
    return sizes;
}

// What compress does with the pieces [from, to), which are the whole runs [run, runs).
void compress_group(const SignKernels& k, const SignPiece* pieces, const int64_t* first, int64_t run, int64_t runs,
                    const float* x, float* error, char* bits, float* scales, int threads) {
    const int64_t from = first[run], to = first[runs];
    const std::vector<int64_t> sizes = sizes_of(pieces, from, to);
    std::vector<double> partials(static_cast<size_t>((to - from) * PARTIALS));
    Plan(sizes, CHUNK).parallel(sizes, threads, [&](size_t i, int64_t begin, int64_t end) {
        const SignPiece& piece = pieces[from + static_cast<int64_t>(i)];
        k.squares(F32, bytes_at(x + piece.begin), bytes_at(error + piece.begin), begin, end,
                  partials.data() + static_cast<int64_t>(i) * PARTIALS);
    });
    for (int64_t r = run; r < runs; ++r) {
        double sum = 0;
        int64_t count = 0;
        for (int64_t p = first[r]; p < first[r + 1]; ++p) {
            const int64_t length = pieces[p].end - pieces[p].begin;
            const double* own = partials.data() + (p - from) * PARTIALS;
            for (int64_t c = 0; c * CHUNK < length; ++c) sum += own[c];
            count += length;
        }
        scales[r] = static_cast<float>(std::sqrt(sum / static_cast<double>(count)));
    }
    // Backwards: what the first pass read last is still in a cache.
    std::vector<int64_t> reversed(sizes.rbegin(), sizes.rend());
    Plan(reversed, ALIGN).parallel(reversed, threads, [&](size_t i, int64_t begin, int64_t end) {
        const SignPiece& piece = pieces[to - 1 - static_cast<int64_t>(i)];
        k.compress(F32, bytes_at(x + piece.begin), bytes_at(error + piece.begin), scales[piece.scale],
                   bits + piece.byte, begin, end);
    });
}

void compress_sign_runs(int64_t table, int64_t count, int64_t starts, int64_t runs,
                        const std::vector<int64_t>& addresses, int threads) {
    if (addresses.size() != 4 || count < 0 || runs < 0) throw std::invalid_argument("expected 4 addresses");
    const SignKernels& k = *tables().sign;
    const SignPiece* pieces = pieces_at(table);
    const int64_t* first = pointer<const int64_t>(starts);
    const float* x = pointer<const float>(addresses[0]);
    float *error = pointer<float>(addresses[1]), *scales = pointer<float>(addresses[3]);
    char* bits = pointer<char>(addresses[2]);
    py::gil_scoped_release release;
    for (int64_t run = 0; run < runs;) {
        int64_t next = run, elements = 0;
        while (next < runs) {
            int64_t more = 0;
            for (int64_t p = first[next]; p < first[next + 1]; ++p) more += pieces[p].end - pieces[p].begin;
            if (next > run && elements + more > TOGETHER) break;
            elements += more;
            ++next;
        }
        compress_group(k, pieces, first, run, next, x, error, bits, scales, threads);
        run = next;
    }
}

void unpack_sign_runs(int64_t table, int64_t count, int64_t bits, int64_t scales, int64_t out, int threads) {
    const SignKernels& k = *tables().sign;
    const SignPiece* pieces = pieces_at(table);
    const std::vector<int64_t> sizes = sizes_of(pieces, 0, count);
    int64_t elements = 0;
    for (int64_t n : sizes) elements += n;
    const bool stream = elements * 4 >= STREAM_ABOVE;
    py::gil_scoped_release release;
    Plan(sizes, ALIGN).parallel(sizes, threads, [&](size_t i, int64_t begin, int64_t end) {
        const SignPiece& piece = pieces[i];
        k.unpack(pointer<const char>(bits) + piece.byte, pointer<const float>(scales)[piece.scale], F32,
                 bytes_at(pointer<float>(out) + piece.begin), begin, end, stream);
    });
}

// strides: bytes of bits and number of scales between ranks.
void mean_of_sign_runs(int64_t table, int64_t count, int64_t bits, int64_t scales, const std::vector<int64_t>& strides,
                       int64_t ranks, int64_t out, int threads) {
    if (strides.size() != 2 || ranks < 1) throw std::invalid_argument("expected 2 strides and at least one rank");
    const SignKernels& k = *tables().sign;
    const SignPiece* pieces = pieces_at(table);
    const std::vector<int64_t> sizes = sizes_of(pieces, 0, count);
    const float factor = static_cast<float>(1.0 / static_cast<double>(ranks));
    py::gil_scoped_release release;
    Plan(sizes, ALIGN).parallel(sizes, threads, [&](size_t i, int64_t begin, int64_t end) {
        const SignPiece& piece = pieces[i];
        std::vector<float> of_ranks(static_cast<size_t>(ranks));
        const float* first = pointer<const float>(scales) + piece.scale;
        for (int64_t r = 0; r < ranks; ++r) of_ranks[static_cast<size_t>(r)] = first[r * strides[1]];
        k.mean(pointer<const char>(bits) + piece.byte, strides[0], of_ranks.data(), ranks, factor,
               bytes_at(pointer<float>(out) + piece.begin), begin, end);
    });
}

}  // namespace

void bind_sign_runs(py::module_& m) {
    m.attr("SIGN_PIECE") = SIGN_PIECE;
    m.def("compress_sign_runs", &compress_sign_runs);
    m.def("unpack_sign_runs", &unpack_sign_runs);
    m.def("mean_of_sign_runs", &mean_of_sign_runs);
}

}  // namespace dsx
