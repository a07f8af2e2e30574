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

constexpr size_t HYPER_COUNT = 11;

std::vector<Row> rows_of(const Table& table, std::vector<int64_t>& sizes) {
    std::vector<Row> rows(table.rows);
    sizes.resize(table.rows);
    for (size_t i = 0; i < table.rows; ++i) {
        const int64_t* c = table.data + i * STEP_COLUMNS;
        rows[i] = Row{pointer<char>(c[0]),
                      pointer<const char>(c[1]),
                      pointer<char>(c[2]),
                      pointer<char>(c[3]),
                      pointer<char>(c[4]),
                      pointer<char>(c[5]),
                      pointer<float>(c[6]),
                      pointer<float>(c[7]),
                      c[8],
                      c[9]};
        if (c[8] < 0) throw std::invalid_argument("negative size in row " + std::to_string(i));
        sizes[i] = c[8];
    }
    return rows;
}

Step step_of(int algorithm, const std::vector<int>& dtypes, const std::vector<double>& hyper, int flags,
             uint32_t seed) {
    if (dtypes.size() != 4) throw std::invalid_argument("expected 4 dtypes: param, grad, state, copy");
    if (hyper.size() != HYPER_COUNT) throw std::invalid_argument("expected 11 hyperparameters");
    Step step{};
    step.algorithm = algorithm;
    step.param = static_cast<DType>(dtypes[0]);
    step.grad = static_cast<DType>(dtypes[1]);
    step.state = static_cast<DType>(dtypes[2]);
    step.copy = static_cast<DType>(dtypes[3]);
    float f[HYPER_COUNT];
    for (size_t i = 0; i < HYPER_COUNT; ++i) f[i] = static_cast<float>(hyper[i]);
    step.hyper = Hyper{f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10], flags, seed};
    return step;
}

void step(int algorithm, const py::buffer& table_buffer, const std::vector<int>& dtypes,
          const std::vector<double>& hyper, int flags, uint32_t seed, int threads) {
    Table table(table_buffer, STEP_COLUMNS);
    std::vector<int64_t> sizes;
    const std::vector<Row> rows = rows_of(table, sizes);
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
std::vector<std::pair<double, double>> lamb_update(const py::buffer& table_buffer, const std::vector<int>& dtypes,
                                                   const std::vector<double>& hyper, int flags, int threads) {
    Table table(table_buffer, STEP_COLUMNS);
    std::vector<int64_t> sizes;
    const std::vector<Row> rows = rows_of(table, sizes);
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

void lamb_apply(const py::buffer& table_buffer, const std::vector<int>& dtypes, const std::vector<double>& hyper,
                int flags, const std::vector<float>& coefficients, int threads) {
    Table table(table_buffer, STEP_COLUMNS);
    std::vector<int64_t> sizes;
    const std::vector<Row> rows = rows_of(table, sizes);
    if (coefficients.size() != rows.size()) throw std::invalid_argument("expected one coefficient per row");
    Step s = step_of(LAMB_APPLY, dtypes, hyper, flags, 0);
    s.coefficients = coefficients.data();
    const Kernels& k = kernels();
    py::gil_scoped_release release;
    Plan(sizes, ALIGN).parallel(sizes, threads, [&](size_t row, int64_t begin, int64_t end) {
        k.step(s, rows[row], static_cast<int64_t>(row), begin, end);
    });
}

// Rows of (address, numel, dtype). Sum of squares per row in fp64, in a fixed order; not finite when any element is
// not.
std::vector<double> squares(const py::buffer& table_buffer, int threads) {
    Table table(table_buffer, 3);
    std::vector<int64_t> sizes(table.rows);
    for (size_t i = 0; i < table.rows; ++i) sizes[i] = table.data[3 * i + 1];
    const Kernels& k = kernels();
    std::vector<double> out(table.rows);
    py::gil_scoped_release release;
    const Plan plan(sizes, CHUNK);
    std::vector<double> partials(static_cast<size_t>(plan.total));
    plan.parallel(sizes, threads, [&](size_t row, int64_t begin, int64_t end) {
        k.squares(static_cast<DType>(table.data[3 * row + 2]), pointer<const char>(table.data[3 * row]), begin, end,
                  partials.data() + plan.start[row]);
    });
    for (size_t row = 0; row < table.rows; ++row)
        for (int64_t c = plan.start[row]; c < plan.start[row + 1]; ++c) out[row] += partials[static_cast<size_t>(c)];
    return out;
}

void scale(const py::buffer& table_buffer, double factor, int threads) {
    Table table(table_buffer, 3);
    std::vector<int64_t> sizes(table.rows);
    for (size_t i = 0; i < table.rows; ++i) sizes[i] = table.data[3 * i + 1];
    const Kernels& k = kernels();
    const float f = static_cast<float>(factor);
    py::gil_scoped_release release;
    Plan(sizes, ALIGN).parallel(sizes, threads, [&](size_t row, int64_t begin, int64_t end) {
        k.scale(static_cast<DType>(table.data[3 * row + 2]), pointer<char>(table.data[3 * row]), begin, end, f);
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
    bind_ledger(m);
    bind_matvec(m);
    bind_rows(m);
    bind_sign_runs(m);
    bind_tokens(m);
}
