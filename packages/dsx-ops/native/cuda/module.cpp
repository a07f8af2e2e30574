// The CUDA module's face to Python: tables of addresses and numbers in, launches out. Knows neither torch nor CUDA
// headers.
//
// Compiled a second time, with the kernels, for the emulator of the tests (DSX_CUDA_EMULATED).
#include <stdexcept>
#include <string>
#include <vector>

#include "context.h"
#include "dsx_ops/cuda.h"
#include "dsx_ops/tables.h"
#ifdef DSX_CUDA_EMULATED
#include "memory.cuh"
#endif

namespace dsx {
namespace cuda {
namespace {

using Place = std::pair<int, uint64_t>;  // device, stream
Where where_of(const Place& place) { return {place.first, static_cast<uintptr_t>(place.second)}; }

// (value, address or 0, type)
using ScalarArgument = std::tuple<double, int64_t, int>;
Scalar scalar_of(const ScalarArgument& a) {
    return {std::get<0>(a), pointer<const void>(std::get<1>(a)), std::get<2>(a)};
}

// extra: hyper on the device, squares, partials, coefficients; addresses or 0.
void run_step(const Place& place, int algorithm, const py::buffer& table, const std::vector<int>& dtypes,
              const std::vector<double>& hyper, int flags, uint32_t seed, const std::vector<int64_t>& extra) {
    check_count(extra.size(), 4, "addresses");
    const std::vector<Row> rows = step_rows(table);
    const Step s = step_of(algorithm, dtypes, hyper, flags, seed);
    step(where_of(place), s, rows.data(), rows.size(), pointer<const Hyper>(extra[0]), pointer<double>(extra[1]),
         pointer<double>(extra[2]), pointer<const float>(extra[3]));
}

// scalars: lr, grad_scale, found_inf, step. numbers: beta1, beta2, weight decay.
void run_prepare(const Place& place, int algorithm, const std::vector<double>& hyper, int flags, uint32_t seed,
                 const std::vector<ScalarArgument>& scalars, const std::vector<double>& numbers, bool bias_correction,
                 int64_t out) {
    check_count(scalars.size(), 4, "scalars");
    check_count(numbers.size(), 3, "numbers");
    const Recipe recipe{algorithm,
                        hyper_of(hyper, flags, seed),
                        scalar_of(scalars[0]),
                        scalar_of(scalars[1]),
                        scalar_of(scalars[2]),
                        scalar_of(scalars[3]),
                        numbers[0],
                        numbers[1],
                        numbers[2],
                        bias_correction};
    prepare(where_of(place), recipe, pointer<Hyper>(out));
}

void run_squares(const Place& place, const py::buffer& table, int64_t out, int64_t partials) {
    const std::vector<Flat> rows = flat_rows(table);
    squares(where_of(place), rows.data(), rows.size(), pointer<double>(out), pointer<double>(partials));
}
void run_scale(const Place& place, const py::buffer& table, const ScalarArgument& factor) {
    const std::vector<Flat> rows = flat_rows(table);
    scale(where_of(place), rows.data(), rows.size(), scalar_of(factor));
}

// numbers: format, dtype of x, group, offset, nodes, devices, pipeline, slice.
Quant quant_of(const std::vector<int64_t>& n, bool stochastic, uint32_t seed) {
    check_count(n.size(), 8, "numbers");
    const Quant q{static_cast<Format>(n[0]),
                  static_cast<DType>(n[1]),
                  n[2],
                  stochastic,
                  seed,
                  n[3],
                  n[4],
                  n[5],
                  n[6],
                  n[7],
                  false};
    if (q.format < INT8 || q.format > E5M2) throw std::invalid_argument("unknown format");
    const bool halves = q.format == INT4 || q.format == INT4_ASYM;
    if (q.group <= 0 || (halves && q.group % 2 != 0))
        throw std::invalid_argument("expected a positive group size, even for 4 bits");
    return q;
}

// addresses: x, codes, scale, zero (0 when symmetric).
void run_quantize(const Place& place, bool forward, const std::vector<int64_t>& a, const std::vector<int64_t>& numbers,
                  int64_t numel, bool stochastic, uint32_t seed) {
    check_count(a.size(), 4, "addresses");
    const Quant q = quant_of(numbers, stochastic, seed);
    const Where where = where_of(place);
    if (forward)
        quantize(where, q, pointer<const char>(a[0]), numel, pointer<char>(a[1]), pointer<float>(a[2]),
                 pointer<float>(a[3]));
    else
        dequantize(where, q, pointer<const char>(a[1]), pointer<const float>(a[2]), pointer<const float>(a[3]),
                   pointer<char>(a[0]), numel);
}

// from: codes, scale, zero; strides: bytes of codes and number of scales between ranks. to: fp32 (to_numbers empty), or
// codes, scale, zero.
void run_reduce(const Place& place, const std::vector<int64_t>& from, const std::vector<int64_t>& numbers,
                int64_t ranks, const std::vector<int64_t>& strides, double factor, const std::vector<int64_t>& to,
                const std::vector<int64_t>& to_numbers, int64_t numel, bool stochastic, uint32_t seed) {
    check_count(from.size(), 3, "addresses");
    check_count(strides.size(), 2, "strides");
    check_count(to.size(), 3, "addresses");
    const Quant q = quant_of(numbers, false, 0);
    const Codes codes{pointer<const char>(from[0]),
                      pointer<const float>(from[1]),
                      pointer<const float>(from[2]),
                      ranks,
                      strides[0],
                      strides[1],
                      static_cast<float>(factor)};
    if (to_numbers.empty()) return reduce_codes(where_of(place), q, codes, numel, pointer<float>(to[0]));
    requantize(where_of(place), q, codes, numel, quant_of(to_numbers, stochastic, seed), pointer<char>(to[0]),
               pointer<float>(to[1]), pointer<float>(to[2]));
}

void define_signs(py::module_& m) {
    m.def("pack_signs", [](const Place& place, int dtype, int64_t x, int64_t bits, int64_t numel) {
        pack_signs(where_of(place), static_cast<DType>(dtype), pointer<const char>(x), pointer<char>(bits), numel);
    });
    m.def("unpack_signs",
          [](const Place& place, int64_t bits, int64_t scale, int dtype, int64_t out, int64_t rows, int64_t numel) {
              unpack_signs(where_of(place), pointer<const char>(bits), pointer<const float>(scale),
                           static_cast<DType>(dtype), pointer<char>(out), rows, numel);
          });
    m.def("compress_signs", [](const Place& place, int dtype, int64_t x, int64_t error, int64_t bits, int64_t scale,
                               int64_t partials, int64_t numel) {
        compress_signs(where_of(place), static_cast<DType>(dtype), pointer<const char>(x), pointer<float>(error),
                       pointer<char>(bits), pointer<float>(scale), pointer<double>(partials), numel);
    });
    m.def("mean_of_signs",
          [](const Place& place, int64_t bits, int64_t scales, int64_t ranks, int64_t out, int64_t numel) {
              mean_of_signs(where_of(place), pointer<const char>(bits), pointer<const float>(scales), ranks,
                            pointer<float>(out), numel);
          });
}

// table: SignPiece, `count` of them; starts: the first piece of each run and the end. a: x, error, bits, scales,
// partials.
void define_sign_runs(py::module_& m) {
    m.attr("SIGN_PIECE") = SIGN_PIECE;
    m.def("compress_sign_runs", [](const Place& place, int64_t table, int64_t count, int64_t starts, int64_t runs,
                                   const std::vector<int64_t>& a) {
        check_count(a.size(), 5, "addresses");
        compress_sign_runs(where_of(place), {pointer<const SignPiece>(table), count}, pointer<const int64_t>(starts),
                           runs, pointer<const float>(a[0]), pointer<float>(a[1]), pointer<char>(a[2]),
                           pointer<float>(a[3]), pointer<double>(a[4]));
    });
    m.def("unpack_sign_runs",
          [](const Place& place, int64_t table, int64_t count, int64_t bits, int64_t scales, int64_t out) {
              unpack_sign_runs(where_of(place), {pointer<const SignPiece>(table), count}, pointer<const char>(bits),
                               pointer<const float>(scales), pointer<float>(out));
          });
    m.def("mean_of_sign_runs", [](const Place& place, int64_t table, int64_t count, int64_t bits, int64_t scales,
                                  const std::vector<int64_t>& strides, int64_t ranks, int64_t out) {
        check_count(strides.size(), 2, "strides");
        if (ranks < 1) throw std::invalid_argument("expected at least one rank");
        mean_of_sign_runs(where_of(place), {pointer<const SignPiece>(table), count}, pointer<const char>(bits),
                          strides[0], pointer<const float>(scales), strides[1], ranks, pointer<float>(out));
    });
}

// ---- rows: (dtype, rows, cols), and vectors as (address or 0, dtype) --------------------------------

using RowsArgument = std::tuple<int, int64_t, int64_t>;
using VectorArgument = std::pair<int64_t, int>;
using DropArgument = std::tuple<bool, uint32_t, double, uint32_t, int64_t>;
Rows rows_of(const RowsArgument& a) { return {static_cast<DType>(std::get<0>(a)), std::get<1>(a), std::get<2>(a)}; }
Vector vector_of(const VectorArgument& a) { return {pointer<const char>(a.first), static_cast<DType>(a.second)}; }
Drop drop_of(const DropArgument& a) {
    return {std::get<0>(a), std::get<1>(a), static_cast<float>(std::get<2>(a)), std::get<3>(a), std::get<4>(a)};
}
template <class T> T* nth(const std::vector<int64_t>& addresses, size_t i) {
    if (i >= addresses.size()) throw std::invalid_argument("an address is missing");
    return pointer<T>(addresses[i]);
}
using Addresses = std::vector<int64_t>;

// kind, dtype, address, sizes, strides, column stride
using MaskArgument = std::tuple<int, int, int64_t, std::vector<int64_t>, std::vector<int64_t>, int64_t>;
MaskView mask_of(const MaskArgument& a) {
    MaskView m{static_cast<MaskKind>(std::get<0>(a)),
               static_cast<DType>(std::get<1>(a)),
               pointer<const char>(std::get<2>(a)),
               {},
               {},
               std::get<5>(a)};
    const auto &sizes = std::get<3>(a), &strides = std::get<4>(a);
    check_count(sizes.size(), MASK_DIMS, "sizes");
    check_count(strides.size(), MASK_DIMS, "strides");
    for (int d = 0; d < MASK_DIMS; ++d) m.sizes[d] = sizes[d], m.strides[d] = strides[d];
    return m;
}

void define_rows(py::module_& m) {
    m.def("norm_slabs", [](const RowsArgument& r) { return norm_slabs(rows_of(r)); });
    m.def("column_slabs", [](const RowsArgument& r) { return column_slabs(rows_of(r)); });
    // a: full, part, indices. n: batch, kept, sequence, bytes of a row.
    m.def("move_rows",
          [](const Place& place, bool gather, const Addresses& a, const std::vector<int64_t>& n, bool batch_first) {
              check_count(n.size(), 4, "sizes");
              move_rows(where_of(place), Move{gather, batch_first, nth<char>(a, 0), nth<char>(a, 1),
                                              nth<const int64_t>(a, 2), n[0], n[1], n[2], n[3]});
          });
    m.def("layer_norm", [](const Place& place, const RowsArgument& r, const Addresses& a, VectorArgument weight,
                           VectorArgument bias, double eps) {
        layer_norm(where_of(place), rows_of(r), nth<const char>(a, 0), nth<const char>(a, 1), nth<char>(a, 2),
                   vector_of(weight), vector_of(bias), static_cast<float>(eps), nth<char>(a, 3), nth<float>(a, 4),
                   nth<float>(a, 5));
    });
    m.def("layer_norm_backward", [](const Place& place, const RowsArgument& r, const Addresses& a,
                                    VectorArgument weight, VectorArgument bias, bool from_output) {
        layer_norm_backward(where_of(place), rows_of(r), nth<const char>(a, 0), nth<const char>(a, 1),
                            nth<const float>(a, 2), nth<const float>(a, 3), vector_of(weight), vector_of(bias),
                            nth<const char>(a, 4), from_output, nth<char>(a, 5), nth<char>(a, 6), nth<char>(a, 7),
                            nth<float>(a, 8));
    });
    m.def("bias_gelu",
          [](const Place& place, const RowsArgument& r, const Addresses& a, VectorArgument bias, bool tanh) {
              bias_gelu(where_of(place), rows_of(r), nth<const char>(a, 0), vector_of(bias), tanh, nth<char>(a, 1));
          });
    m.def("bias_gelu_backward",
          [](const Place& place, const RowsArgument& r, const Addresses& a, VectorArgument bias, bool tanh) {
              bias_gelu_backward(where_of(place), rows_of(r), nth<const char>(a, 0), nth<const char>(a, 1),
                                 vector_of(bias), tanh, nth<char>(a, 2), nth<char>(a, 3), nth<float>(a, 4));
          });
    m.def("dropout", [](const Place& place, const RowsArgument& r, const Addresses& a, VectorArgument bias,
                        const DropArgument& drop) {
        dropout(where_of(place), rows_of(r), nth<const char>(a, 0), vector_of(bias), nth<const char>(a, 1),
                drop_of(drop), nth<char>(a, 2));
    });
    m.def("bias_grad", [](const Place& place, const RowsArgument& r, const Addresses& a, VectorArgument dbias,
                          const DropArgument& drop) {
        bias_grad(where_of(place), rows_of(r), nth<const char>(a, 0), drop_of(drop), nth<char>(a, 1), vector_of(dbias),
                  nth<float>(a, 2));
    });
    m.def("masked_softmax",
          [](const Place& place, const RowsArgument& r, const Addresses& a, const MaskArgument& mask, double scale) {
              masked_softmax(where_of(place), rows_of(r), nth<const char>(a, 0), mask_of(mask),
                             static_cast<float>(scale), nth<char>(a, 1));
          });
    m.def("softmax_backward", [](const Place& place, const RowsArgument& r, const Addresses& a, double scale) {
        softmax_backward(where_of(place), rows_of(r), nth<const char>(a, 0), nth<const char>(a, 1),
                         static_cast<float>(scale), nth<char>(a, 2));
    });
}

}  // namespace
}  // namespace cuda
}  // namespace dsx

#ifdef DSX_CUDA_EMULATED
// For tests: the driver calls of a ContextGuard on a thread whose contexts are `stack` (devices, the last one current),
// and what is left of it. Devices with a primary context at the beginning: those of the stack, and `device`.
struct RecordingDriver {
    std::vector<int> stack;
    std::vector<std::string> calls;
};
RecordingDriver& recording() {
    static RecordingDriver recorder;
    return recorder;
}
void* context_of(int device) { return reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1); }

std::pair<std::vector<std::string>, std::vector<int>> guarded_calls(const std::vector<int>& stack, int device) {
    recording() = {stack, {}};
    const dsx::cuda::Driver driver{
        [](void** context) {
            *context = recording().stack.empty() ? nullptr : context_of(recording().stack.back());
            return 0;
        },
        [](int* where) {
            *where = recording().stack.back();
            return 0;
        },
        [](void** context, int which) {
            recording().calls.push_back("retain " + std::to_string(which));
            *context = context_of(which);
            return which > 7 ? 101 : 0;
        },
        [](void* context) {
            const int which = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
            recording().calls.push_back("push " + std::to_string(which));
            recording().stack.push_back(which);
            return 0;
        },
        [](void**) {
            recording().calls.push_back("pop");
            recording().stack.pop_back();
            return 0;
        },
    };
    dsx::cuda::PrimaryContexts contexts;
    {
        const dsx::cuda::ContextGuard on(driver, contexts, device);
        recording().calls.push_back("work on " + std::to_string(recording().stack.back()));
    }
    { const dsx::cuda::ContextGuard again(driver, contexts, device); }
    return {recording().calls, recording().stack};
}
#endif

PYBIND11_MODULE(_cuda, m) {
    using namespace dsx::cuda;
    m.doc() =
        "CUDA kernels of dsx-ops. Takes device addresses and a stream; dsx_ops.cuda checks tensors before calling.";
    m.attr("ABI") = 4;
    m.attr("MASK_DIMS") = MASK_DIMS;
    m.attr("HYPER_BYTES") = sizeof(dsx::Hyper);
    m.def("check_driver", &check_driver);
    m.def("driver_problem", &driver_problem);
    m.def("chunks_of", &chunks_of);
    m.def("prepare", &run_prepare);
    m.def("step", &run_step);
    m.def("squares", &run_squares);
    m.def("scale", &run_scale);
    m.def("quantize", &run_quantize);
    m.def("reduce_codes", &run_reduce);
    define_signs(m);
    define_sign_runs(m);
    define_rows(m);
#ifdef DSX_CUDA_EMULATED
    m.attr("EMULATED") = true;
    m.def("guarded_calls", &guarded_calls);
    m.def("set_order", [](unsigned order) { emu::Machine::get().order = order; });
    m.def("launches", [] { return emu::Machine::get().launches; });
    m.def("quotient", [](int64_t n, int64_t by) { return Divisor(by).quotient(n); });
    m.def("start_trace", [] { emu::Machine::get().start_trace(); });
    // Per direction (read, written): accesses, bytes, sectors asked for by warps, distinct sectors.
    m.def("stop_trace", [] {
        emu::Machine& machine = emu::Machine::get();
        machine.stop_trace();
        std::vector<std::vector<uint64_t>> found;
        for (const auto* t : {&machine.reads, &machine.writes})
            found.push_back({t->accesses, t->bytes, t->requested, (uint64_t)t->sectors.size()});
        return found;
    });
#else
    m.attr("EMULATED") = false;
#endif
}
