// Sums and maxima over a warp and a block, always in the same order.
#pragma once
#include "launch.cuh"

namespace dsx {
namespace cuda {

constexpr int WARP = 32;
constexpr unsigned ALL = 0xffffffffu;

struct Sum {
    template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return a + b; }
};
// A NaN wins, as in the CPU kernels and in torch.
struct Largest {
    __device__ __forceinline__ float operator()(float a, float b) const { return a < b || b != b ? b : a; }
};
struct Smallest {
    __device__ __forceinline__ float operator()(float a, float b) const { return b < a || b != b ? b : a; }
};

// Every lane gets the result.
template <class Op, class T> __device__ __forceinline__ T over_warp(T value, Op op) {
#pragma unroll
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) value = op(value, __shfl_xor_sync(ALL, value, lanes));
    return value;
}

// Every thread gets the result. `scratch`: shared, one per warp; may be used again at once.
template <class Op, class T> __device__ __forceinline__ T over_block(T value, Op op, T* scratch) {
    const int warps = (int)blockDim.x / WARP, warp = (int)threadIdx.x / WARP;
    value = over_warp(value, op);
    if (threadIdx.x % WARP == 0) scratch[warp] = value;
    __syncthreads();
    value = scratch[0];
    for (int w = 1; w < warps; ++w) value = op(value, scratch[w]);
    __syncthreads();
    return value;
}

// Two sums over the threads of a block, again and again, at one barrier per pair: consecutive pairs use different
// halves of the scratch memory, and no thread writes a half again before all have passed the barrier of the pair
// between.
struct PairOfSums {
    float* scratch;  // shared, 4 per warp
    int turn = 0;
    __device__ __forceinline__ void operator()(float& a, float& b) {
        const int warps = (int)blockDim.x / WARP, warp = (int)threadIdx.x / WARP;
        a = over_warp(a, Sum());
        b = over_warp(b, Sum());
        float* half = scratch + turn * 2 * warps;
        turn = 1 - turn;
        if (threadIdx.x % WARP == 0) {
            half[2 * warp] = a;
            half[2 * warp + 1] = b;
        }
        __syncthreads();
        a = half[0];
        b = half[1];
        for (int w = 1; w < warps; ++w) {
            a = a + half[2 * w];
            b = b + half[2 * w + 1];
        }
    }
};

// The threads that share a row (or a group): a warp, or the block. first(): the number of the row.
struct WarpTeam {
    static __device__ __forceinline__ int rank() { return (int)threadIdx.x % WARP; }
    static __device__ __forceinline__ int size() { return WARP; }
    static __device__ __forceinline__ int64_t first() {
        return (int64_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    }
    template <class Op> static __device__ __forceinline__ float all(float x, Op op, float*) { return over_warp(x, op); }
};
struct BlockTeam {
    static __device__ __forceinline__ int rank() { return (int)threadIdx.x; }
    static __device__ __forceinline__ int size() { return (int)blockDim.x; }
    static __device__ __forceinline__ int64_t first() { return blockIdx.x; }
    template <class Op> static __device__ __forceinline__ float all(float x, Op op, float* scratch) {
        return over_block(x, op, scratch);
    }
};

}  // namespace cuda
}  // namespace dsx
