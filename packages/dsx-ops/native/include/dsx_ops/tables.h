// What both Python modules, of the CPU and of CUDA, are given: tables of addresses and numbers, read in one place.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "dsx_ops/kernels.h"

namespace dsx {
namespace py = pybind11;

template <class T> T* pointer(int64_t address) { return reinterpret_cast<T*>(static_cast<intptr_t>(address)); }

inline void check_count(size_t got, size_t expected, const char* what) {
    if (got != expected)
        throw std::invalid_argument("expected " + std::to_string(expected) + " " + what + ", got " +
                                    std::to_string(got));
}

// A table of int64 numbers, `columns` per row, as array('q') or anything with that buffer.
struct Int64Table {
    py::buffer_info info;
    const int64_t* data;
    size_t rows;

    Int64Table(const py::buffer& buffer, size_t columns) : info(buffer.request()) {
        if (info.itemsize != 8 || info.ndim != 1)
            throw std::invalid_argument("expected a one-dimensional table of int64");
        if (info.size % static_cast<py::ssize_t>(columns) != 0)
            throw std::invalid_argument("expected " + std::to_string(columns) + " numbers per row, got " +
                                        std::to_string(info.size) + " in all");
        data = static_cast<const int64_t*>(info.ptr);
        rows = static_cast<size_t>(info.size) / columns;
    }
};

inline void check_size(int64_t numel, size_t row) {
    if (numel < 0) throw std::invalid_argument("negative size in row " + std::to_string(row));
}

// The tensors of a step: param, grad, state0, state1, low_bits, copy, scale0, scale1, numel, offset.
constexpr size_t STEP_COLUMNS = 10;
inline std::vector<Row> step_rows(const py::buffer& buffer) {
    const Int64Table table(buffer, STEP_COLUMNS);
    std::vector<Row> rows(table.rows);
    for (size_t i = 0; i < table.rows; ++i) {
        const int64_t* c = table.data + i * STEP_COLUMNS;
        check_size(c[8], i);
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
    }
    return rows;
}

// Flat buffers: address, numel, dtype.
constexpr size_t FLAT_COLUMNS = 3;
inline std::vector<Flat> flat_rows(const py::buffer& buffer) {
    const Int64Table table(buffer, FLAT_COLUMNS);
    std::vector<Flat> rows(table.rows);
    for (size_t i = 0; i < table.rows; ++i) {
        const int64_t* c = table.data + i * FLAT_COLUMNS;
        check_size(c[1], i);
        rows[i] = Flat{pointer<char>(c[0]), c[1], static_cast<DType>(c[2])};
    }
    return rows;
}

// The numbers in the order of `Hyper`, without flags and seed.
constexpr size_t HYPER_COUNT = 11;
inline Hyper hyper_of(const std::vector<double>& numbers, int flags, uint32_t seed) {
    check_count(numbers.size(), HYPER_COUNT, "hyperparameters");
    float f[HYPER_COUNT];
    for (size_t i = 0; i < HYPER_COUNT; ++i) f[i] = static_cast<float>(numbers[i]);
    return {f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10], flags, seed};
}

// dtypes: param, grad, state, copy.
inline Step step_of(int algorithm, const std::vector<int>& dtypes, const std::vector<double>& numbers, int flags,
                    uint32_t seed) {
    check_count(dtypes.size(), 4, "dtypes");
    Step step{};
    step.algorithm = algorithm;
    step.param = static_cast<DType>(dtypes[0]);
    step.grad = static_cast<DType>(dtypes[1]);
    step.state = static_cast<DType>(dtypes[2]);
    step.copy = static_cast<DType>(dtypes[3]);
    step.hyper = hyper_of(numbers, flags, seed);
    return step;
}

}  // namespace dsx
