// The only file that knows Python: checks sizes, chooses the instruction set, cuts the work into ranges, releases the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "dsx_ops/kernels.h"
#include "dsx_ops/parallel.h"

namespace py = pybind11;

namespace dsx {
namespace base { extern const Kernels table; extern const QuantKernels quant_table; }
#ifdef DSX_X86
namespace avx2 { extern const Kernels table; extern const QuantKernels quant_table; }
namespace avx512 { extern const Kernels table; extern const QuantKernels quant_table; }
#endif

namespace {

std::vector<const Kernels*> available() {
    std::vector<const Kernels*> found{&base::table};
#ifdef DSX_X86
    // These also ask the operating system whether it keeps the wide registers.
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (has_avx2) found.push_back(&avx2::table);
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        found.push_back(&avx512::table);
#endif
    return found;
}

const Kernels* named(const std::string& name) {
    std::string names;
    for (const Kernels* k : available()) {
        if (name == k->name) return k;
        names += (names.empty() ? "" : ", ") + std::string(k->name);
    }
    throw std::invalid_argument("instruction set '" + name + "' cannot run here; this CPU has: " + names);
}

struct Chosen {
    const Kernels* kernels = nullptr;
    bool own_threads = false;
};
Chosen& chosen() {
    static Chosen c;
    return c;
}
const Kernels& kernels() {
    Chosen& c = chosen();
    if (c.kernels == nullptr) {
        const char* wanted = std::getenv("DSX_ISA");
        c.kernels = wanted && *wanted ? named(wanted) : available().back();
    }
    return *c.kernels;
}

const QuantKernels& quant_kernels() {
#ifdef DSX_X86
    if (&kernels() == &avx512::table) return avx512::quant_table;
    if (&kernels() == &avx2::table) return avx2::quant_table;
#endif
    return base::quant_table;
}

constexpr int64_t SERIAL_BELOW = 32768;

// Rows laid end to end, each padded to `grain`; thread borders fall on multiples of `grain` from a row's start.
struct Plan {
    std::vector<int64_t> start;  // in grains
    int64_t grain, total = 0;

    Plan(const std::vector<int64_t>& sizes, int64_t grain_) : grain(grain_) {
        start.reserve(sizes.size() + 1);
        for (int64_t n : sizes) {
            start.push_back(total);
            total += (n + grain - 1) / grain;
        }
        start.push_back(total);
    }
    // f(row, begin, end) for everything in this part.
    template <class F> void run(const std::vector<int64_t>& sizes, int part, int parts, const F& f) const {
        const int64_t from = total * part / parts, to = total * (part + 1) / parts;
        if (from >= to) return;
        size_t row = std::upper_bound(start.begin(), start.end(), from) - start.begin() - 1;
        for (int64_t at = from; at < to; ++row) {
            const int64_t stop = std::min(to, start[row + 1]);
            if (stop > at) f(row, (at - start[row]) * grain, std::min(sizes[row], (stop - start[row]) * grain));
            at = std::max(at, stop);
        }
    }
    template <class F> void parallel(const std::vector<int64_t>& sizes, int threads, const F& f) const {
        if (total * grain < SERIAL_BELOW) threads = 1;
        on_threads(threads, chosen().own_threads, [&](int part, int parts) { run(sizes, part, parts, f); });
    }
};

// A table of int64 numbers, `columns` per row, as array('q') or anything with that buffer.
struct Table {
    py::buffer_info info;
    const int64_t* data;
    size_t rows;

    Table(const py::buffer& buffer, size_t columns) : info(buffer.request()) {
        if (info.itemsize != 8 || info.ndim != 1) throw std::invalid_argument("expected a one-dimensional table of int64");
        if (info.size % static_cast<py::ssize_t>(columns) != 0)
            throw std::invalid_argument("expected " + std::to_string(columns) + " numbers per row, got " + std::to_string(info.size) + " in all");
        data = static_cast<const int64_t*>(info.ptr);
        rows = static_cast<size_t>(info.size) / columns;
    }
};

template <class T> T* pointer(int64_t address) { return reinterpret_cast<T*>(static_cast<intptr_t>(address)); }

constexpr size_t STEP_COLUMNS = 10;
constexpr size_t HYPER_COUNT = 11;

std::vector<Row> rows_of(const Table& table, std::vector<int64_t>& sizes) {
    std::vector<Row> rows(table.rows);
    sizes.resize(table.rows);
    for (size_t i = 0; i < table.rows; ++i) {
        const int64_t* c = table.data + i * STEP_COLUMNS;
        rows[i] = Row{pointer<char>(c[0]), pointer<const char>(c[1]), pointer<char>(c[2]), pointer<char>(c[3]),
                      pointer<char>(c[4]), pointer<char>(c[5]), pointer<float>(c[6]), pointer<float>(c[7]), c[8], c[9]};
        if (c[8] < 0) throw std::invalid_argument("negative size in row " + std::to_string(i));
        sizes[i] = c[8];
    }
    return rows;
}

Step step_of(int algorithm, const std::vector<int>& dtypes, const std::vector<double>& hyper, int flags, uint32_t seed) {
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

void step(int algorithm, const py::buffer& table_buffer, const std::vector<int>& dtypes, const std::vector<double>& hyper,
          int flags, uint32_t seed, int threads) {
    Table table(table_buffer, STEP_COLUMNS);
    std::vector<int64_t> sizes;
    const std::vector<Row> rows = rows_of(table, sizes);
    const Step s = step_of(algorithm, dtypes, hyper, flags, seed);
    if (algorithm < ADAM || (algorithm > ADAM8 && algorithm != TOUCH)) throw std::invalid_argument("unknown algorithm");
    const Kernels& k = kernels();
    py::gil_scoped_release release;
    Plan(sizes, algorithm == ADAM8 ? BLOCK8 : ALIGN).parallel(sizes, threads, [&](size_t row, int64_t begin, int64_t end) {
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

void lamb_apply(const py::buffer& table_buffer, const std::vector<int>& dtypes, const std::vector<double>& hyper, int flags,
                const std::vector<float>& coefficients, int threads) {
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

// Rows of (address, numel, dtype). Sum of squares per row in fp64, in a fixed order; not finite when any element is not.
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
        k.convert(static_cast<DType>(from), pointer<const char>(in), static_cast<DType>(to), pointer<char>(out), begin, end);
    });
}

// addresses: x, codes, scale, zero (0 when symmetric). numbers: numel, group, bits, offset.
void quantize(bool forward, const std::vector<int64_t>& addresses, int dtype, const std::vector<int64_t>& numbers, bool symmetric,
              bool stochastic, uint32_t seed, int threads) {
    if (addresses.size() != 4 || numbers.size() != 4) throw std::invalid_argument("expected 4 addresses and 4 numbers");
    const Quant q{static_cast<DType>(dtype), numbers[1], static_cast<int32_t>(numbers[2]), symmetric, stochastic, seed, numbers[3]};
    if (q.group <= 0 || q.group % LANES != 0 || (q.bits != 4 && q.bits != 8) || numbers[0] < 0)
        throw std::invalid_argument("expected a group that is a multiple of 16, and 4 or 8 bits");
    const QuantKernels& k = quant_kernels();
    const std::vector<int64_t> sizes{numbers[0]};
    char *x = pointer<char>(addresses[0]), *codes = pointer<char>(addresses[1]);
    float *scale = pointer<float>(addresses[2]), *zero = pointer<float>(addresses[3]);
    py::gil_scoped_release release;
    Plan(sizes, q.group).parallel(sizes, threads, [&](size_t, int64_t begin, int64_t end) {
        if (forward) k.quantize(q, x, codes, scale, zero, begin, end);
        else k.dequantize(q, codes, scale, zero, x, begin, end);
    });
}

}  // namespace
}  // namespace dsx

PYBIND11_MODULE(_C, m) {
    using namespace dsx;
    m.doc() = "CPU kernels of dsx-ops. Takes addresses; dsx_ops.native checks tensors before calling.";
    m.attr("ABI") = 2;
    m.def("isa", [] { return std::string(kernels().name); });
    m.def("isas", [] {
        std::vector<std::string> names;
        for (const Kernels* k : available()) names.emplace_back(k->name);
        return names;
    });
    m.def("set_isa", [](const std::string& name) { chosen().kernels = named(name); });
    m.def("set_own_threads", [](bool on) { chosen().own_threads = on; });
    m.def("threads_backend", [] {
        return std::string(Gomp::get().usable() && !chosen().own_threads ? "torch's OpenMP pool" : "std::thread");
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
    m.def("quantize", &quantize);
}
