// Optimizer steps, norms and the choice of the instruction set for Python: checks sizes, cuts the work, releases the
// GIL.
#include "work.h"

namespace dsx {
#define DSX_TABLES(isa) \
    namespace isa { \
    extern const Kernels table; \
    extern const QuantKernels quant_table; \
    extern const SignKernels sign_table; \
    extern const RowKernels row_table; \
    const Tables all{&table, &quant_table, &sign_table, &row_table}; \
    }
DSX_TABLES(base)
#ifdef DSX_X86
DSX_TABLES(avx2)
DSX_TABLES(avx512)
#endif
#undef DSX_TABLES

Chosen& chosen() {
#ifdef DSX_X86
    static Chosen c{{&base::all, &avx2::all, &avx512::all}};
#else
    static Chosen c{{&base::all}};
#endif
    return c;
}

const Tables& tables() { return chosen().isa.current(); }

namespace {

const Kernels& kernels() { return *tables().basic; }

template <class R> std::vector<int64_t> sizes_of(const std::vector<R>& rows) {
    std::vector<int64_t> sizes;
    sizes.reserve(rows.size());
    for (const R& row : rows) sizes.push_back(row.numel);
    return sizes;
}

void step(int algorithm, const py::buffer& table, const std::vector<int>& dtypes, const std::vector<double>& hyper,
          int flags, uint32_t seed, int threads) {
    const std::vector<Row> rows = step_rows(table);
    const std::vector<int64_t> sizes = sizes_of(rows);
    const Step s = step_of(algorithm, dtypes, hyper, flags, seed);
    if (algorithm < ADAM || (algorithm > ADAM8 && algorithm != TOUCH)) throw std::invalid_argument("unknown algorithm");
    const Kernels& k = kernels();
    py::gil_scoped_release release;
    Plan(sizes, algorithm == ADAM8 ? BLOCK8 : ALIGN)
        .parallel(sizes, threads, [&](size_t row, int64_t begin, int64_t end) {
            k.step(s, rows[row], static_cast<int64_t>(row), begin, end);
        });
}

// Phase 1 of Lamb; returns |p|^2 and |u|^2 per row, summed in a fixed order.
std::vector<std::pair<double, double>> lamb_update(const py::buffer& table, const std::vector<int>& dtypes,
                                                   const std::vector<double>& hyper, int flags, int threads) {
    const std::vector<Row> rows = step_rows(table);
    const std::vector<int64_t> sizes = sizes_of(rows);
    Step s = step_of(LAMB_UPDATE, dtypes, hyper, flags, 0);
    const Kernels& k = kernels();
    std::vector<std::pair<double, double>> out(rows.size());
    py::gil_scoped_release release;
    const Plan plan(sizes, CHUNK);
    std::vector<double> partials(2 * static_cast<size_t>(plan.total));
    s.partials = partials.data();
    s.partial_start = plan.start.data();
    plan.parallel(sizes, threads, [&](size_t row, int64_t begin, int64_t end) {
        k.step(s, rows[row], static_cast<int64_t>(row), begin, end);
    });
    for (size_t row = 0; row < rows.size(); ++row)
        for (int64_t c = plan.start[row]; c < plan.start[row + 1]; ++c) {
            out[row].first += partials[2 * static_cast<size_t>(c)];
            out[row].second += partials[2 * static_cast<size_t>(c) + 1];
        }
    return out;
}

void lamb_apply(const py::buffer& table, const std::vector<int>& dtypes, const std::vector<double>& hyper, int flags,
                const std::vector<float>& coefficients, int threads) {
    const std::vector<Row> rows = step_rows(table);
    const std::vector<int64_t> sizes = sizes_of(rows);
    if (coefficients.size() != rows.size()) throw std::invalid_argument("expected one coefficient per row");
    Step s = step_of(LAMB_APPLY, dtypes, hyper, flags, 0);
    s.coefficients = coefficients.data();
    const Kernels& k = kernels();
    py::gil_scoped_release release;
    Plan(sizes, ALIGN).parallel(sizes, threads, [&](size_t row, int64_t begin, int64_t end) {
        k.step(s, rows[row], static_cast<int64_t>(row), begin, end);
    });
}

// Sum of squares per row in fp64, in a fixed order; not finite when any element is
// not.
std::vector<double> squares(const py::buffer& table, int threads) {
    const std::vector<Flat> rows = flat_rows(table);
    const std::vector<int64_t> sizes = sizes_of(rows);
    const Kernels& k = kernels();
    std::vector<double> out(rows.size());
    py::gil_scoped_release release;
    const Plan plan(sizes, CHUNK);
    std::vector<double> partials(static_cast<size_t>(plan.total));
    plan.parallel(sizes, threads, [&](size_t row, int64_t begin, int64_t end) {
        k.squares(rows[row].dtype, rows[row].data, begin, end, partials.data() + plan.start[row]);
    });
    for (size_t row = 0; row < rows.size(); ++row)
        for (int64_t c = plan.start[row]; c < plan.start[row + 1]; ++c) out[row] += partials[static_cast<size_t>(c)];
    return out;
}

void scale(const py::buffer& table, double factor, int threads) {
    const std::vector<Flat> rows = flat_rows(table);
    const std::vector<int64_t> sizes = sizes_of(rows);
    const Kernels& k = kernels();
    const float f = static_cast<float>(factor);
    py::gil_scoped_release release;
    Plan(sizes, ALIGN).parallel(sizes, threads, [&](size_t row, int64_t begin, int64_t end) {
        k.scale(rows[row].dtype, rows[row].data, begin, end, f);
    });
}

void convert(int from, int64_t in, int to, int64_t out, int64_t numel, int threads) {
    const Kernels& k = kernels();
    const std::vector<int64_t> sizes{numel};
    py::gil_scoped_release release;
    Plan(sizes, ALIGN).parallel(sizes, threads, [&](size_t, int64_t begin, int64_t end) {
        k.convert(static_cast<DType>(from), pointer<const char>(in), static_cast<DType>(to), pointer<char>(out), begin,
                  end);
    });
}

}  // namespace
}  // namespace dsx

PYBIND11_MODULE(_C, m) {
    using namespace dsx;
    m.doc() = "CPU kernels of dsx-ops. Takes addresses; dsx_ops.native checks tensors before calling.";
    m.attr("ABI") = 6;
    m.def("isa", [] { return std::string(kernels().name); });
    m.def("isas", [] { return chosen().isa.names(); });
    m.def("set_isa", [](const std::string& name) { chosen().isa.use(name); });
    m.def("set_own_threads", [](bool on) { chosen().own_threads = on; });
    m.def("threads_backend", [] {
        return std::string(dsx_native::Gomp::get().usable() && !chosen().own_threads ? "torch's OpenMP pool"
                                                                                     : "std::thread");
    });
    m.def("sanitizer", [] {
#ifdef __SANITIZE_ADDRESS__
        return std::string("address");
#else
        return std::string();
#endif
    });
    m.def("step", &step);
    m.def("lamb_update", &lamb_update);
    m.def("lamb_apply", &lamb_apply);
    m.def("squares", &squares);
    m.def("scale", &scale);
    m.def("convert", &convert);
    bind_codes(m);
    bind_matvec(m);
    bind_rows(m);
    bind_sign_runs(m);
    bind_tokens(m);
}
