// Shared by the binding's files: the chosen instruction set, and work cut into ranges for threads.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "dsx_native/isa.h"
#include "dsx_native/parallel.h"
#include "dsx_ops/kernels.h"
#include "dsx_ops/tables.h"

namespace dsx {
using dsx_native::on_threads;

struct Chosen {
    dsx_native::IsaChoice<Tables> isa;
    bool own_threads = false;
};
Chosen& chosen();        // process-wide: what set_isa and set_own_threads chose
const Tables& tables();  // the instruction set in use; throws when DSX_ISA names one that cannot run here

void bind_codes(py::module_& m);
void bind_matvec(py::module_& m);
void bind_rows(py::module_& m);
void bind_sign_runs(py::module_& m);
void bind_tokens(py::module_& m);

constexpr int64_t SERIAL_BELOW = 32768;
constexpr int64_t STREAM_ABOVE = 8 << 20;  // bytes of a buffer that is only written: past the caches

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

}  // namespace dsx
