// How kernels are started: on a stream that the caller names, with errors as exceptions. The <<<>>> syntax is not used,
// so that the same sources compile for the GPU by nvcc and for the emulator by g++.
#pragma once
#ifdef DSX_CUDA_EMULATED
#include "emulator/cuda_emu.h"
#else
#include <cuda_runtime.h>
#endif
#include <stdint.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>

#include "context.h"
#include "dsx_ops/cuda.h"

namespace dsx {
namespace cuda {

#ifdef DSX_CUDA_EMULATED
// "Device" memory is host memory; every launch runs to its end.
struct OnDevice {
    explicit OnDevice(const Where&) {}
};
template <class... P, class... A>
void launch(const Where&, void (*kernel)(P...), int64_t blocks, int threads, A&&... arguments) {
    if (blocks == 0) return;
    std::tuple<std::decay_t<P>...> held(std::forward<A>(arguments)...);
    emu::Machine::get().run(blocks, (unsigned)threads, [&] { std::apply(kernel, held); });
}
#else
inline void check(cudaError_t code, const char* what) {
    if (code == cudaSuccess) return;
    std::string text = std::string(what) + ": " + cudaGetErrorName(code) + ": " + cudaGetErrorString(code);
    if (code == cudaErrorUnsupportedPtxVersion || code == cudaErrorNoKernelImageForDevice)
        text +=
            "; this GPU's architecture is not among those that dsx-ops was built for (DSX_CUDA_ARCHS), and the driver "
            "cannot compile for it: "
            "rebuild with that architecture, or update the driver";
    throw std::runtime_error(text);
}

// The driver's functions; the library is in the process already, since torch has tensors on its devices.
const Driver& driver();
PrimaryContexts& primary_contexts();

// A call's device; see context.h.
struct OnDevice {
    ContextGuard guard;
    explicit OnDevice(const Where& where) : guard(driver(), primary_contexts(), where.device) {}
};

template <class... P, class... A>
void launch(const Where& where, void (*kernel)(P...), int64_t blocks, int threads, A&&... arguments) {
    if (blocks == 0) return;
    if (blocks > 0x7fffffff) throw std::runtime_error("more blocks than a grid can have");
    std::tuple<std::decay_t<P>...> held(std::forward<A>(arguments)...);
    const auto start = [&](auto&... value) {
        void* pointers[] = {const_cast<void*>(static_cast<const void*>(&value))...};
        check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3((unsigned)blocks), dim3((unsigned)threads),
                               pointers, 0, reinterpret_cast<cudaStream_t>(where.stream)),
              "launching a kernel of dsx-ops");
    };
    std::apply(start, held);
}
#endif

// ---- lists of tensors -------------------------------------------------------------------------------
//
// A launch goes over many tensors at once. Their descriptions travel as a kernel argument (no copy to the device, fit
// for graph capture); each block takes one chunk of one tensor and finds it by binary search.

#if defined(DSX_CUDA_EMULATED) || (defined(CUDART_VERSION) && CUDART_VERSION >= 12010)
constexpr bool LARGE_ARGUMENTS = true;  // up to 32 KB of them; before CUDA 12.1 there were 4 KB
#else
constexpr bool LARGE_ARGUMENTS = false;
#endif
constexpr int64_t CUDA_CHUNK = 16384;  // elements per block; a multiple of BLOCK8
constexpr int THREADS = 512;

template <class RowType> struct Table {
    static constexpr int CAPACITY = LARGE_ARGUMENTS ? 128 : 40;
    RowType rows[CAPACITY];
    int32_t index[CAPACITY];      // the row's place in the caller's list
    int32_t start[CAPACITY + 1];  // the first chunk of each row
    bool aligned[CAPACITY];       // every stream may be read four elements at a time
    int32_t count = 0;

    int64_t chunks() const { return start[count]; }
};

struct Piece {
    int row;
    int64_t begin, end;
};

// The part of a table that is this block's.
template <class RowType>
__device__ __forceinline__ Piece piece_of(const Table<RowType>& table, int32_t block, int64_t chunk = CUDA_CHUNK) {
    int low = 0, high = table.count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (table.start[middle] <= block) low = middle;
        else high = middle;
    }
    const int64_t begin = (int64_t)(block - table.start[low]) * chunk, left = table.rows[low].numel - begin;
    return {low, begin, begin + (left < chunk ? left : chunk)};
}

// Calls f(table) for every full table of the rows; rows without elements are left out.
template <class RowType, class Aligned, class F>
void for_tables(const RowType* rows, size_t count, Aligned aligned, F f, int64_t chunk = CUDA_CHUNK) {
    Table<RowType> table;
    table.start[0] = 0;
    for (size_t i = 0; i < count; ++i) {
        if (rows[i].numel == 0) continue;
        const int64_t chunks = (rows[i].numel + chunk - 1) / chunk;
        if (table.count == Table<RowType>::CAPACITY || table.chunks() + chunks > 0x7fffffff) {
            f(table);
            table.count = 0;
        }
        const int at = table.count++;
        table.rows[at] = rows[i];
        table.index[at] = (int32_t)i;
        table.aligned[at] = aligned(rows[i]);
        table.start[at + 1] = table.start[at] + (int32_t)chunks;
    }
    if (table.count > 0) f(table);
}

}  // namespace cuda
}  // namespace dsx
