// Runs CUDA kernels on the host, for tests on machines without a GPU: the same sources, compiled by g++ with
// -DDSX_CUDA_EMULATED.
//
// Every thread of a block is a fiber. __syncthreads and the warp functions are waits: a fiber gives the processor back,
// and goes on when all that must arrive have arrived. Warps and threads run in an order that the test chooses (forward,
// backward, shuffled by a seed), shared memory is filled with NaN before each block, and arriving at different
// barriers, or leaving while others wait, is an error. So a missing barrier, an uninitialised sum or a divergent
// shuffle changes a result or fails. What it cannot show: races between the instructions of one warp, the memory model,
// speed. One-dimensional grids and blocks, static shared memory.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

#include "dsx_native/half.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("dsx_shared")))

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

// The linker knows where the section of all __shared__ variables begins and ends.
extern "C" __attribute__((weak, visibility("hidden"))) char __start_dsx_shared[], __stop_dsx_shared[];

namespace emu {

constexpr size_t STACK = 64 * 1024;
constexpr unsigned WARP = 32;

struct Fiber {
    enum State { READY, AT_BARRIER, AT_WARP, DONE };
    ucontext_t context;  // how it is entered for the first time
    jmp_buf place;       // where it goes on
    bool entered = false;
    std::vector<char> stack = std::vector<char>(STACK);
    State state = DONE;
    unsigned site = 0;   // which warp function it waits in
    uint64_t value = 0;  // what it offers to its warp
};

class Machine {
  public:
    static Machine& get() {
        static Machine machine;
        return machine;
    }
    // 0: forward, 1: backward, else: a new shuffle for every block and turn, from this seed.
    unsigned order = 0;
    uint64_t launches = 0;

    void run(int64_t blocks, unsigned threads, const std::function<void()>& kernel) {
        std::lock_guard<std::mutex> one_at_a_time(mutex);
        if (threads == 0 || threads % WARP || threads > 1024)
            throw std::runtime_error("emulator: blocks must be whole warps, at most 1024 threads");
        if (blocks > 0x7fffffff) throw std::runtime_error("emulator: more blocks than a grid can have");
        ++launches;
        body = &kernel;
        gridDim.x = (unsigned)blocks;
        blockDim.x = threads;
        while (fibers.size() < threads) create(fibers.emplace_back());
        snapshots.resize(threads);
        trace.resize(std::max<size_t>(trace.size(), threads));
        random.seed(order);
        std::vector<unsigned> sequence = permuted((unsigned)blocks);
        for (unsigned block : sequence) {
            run_block(block, threads);
            if (tracing) add_trace(threads);
        }
    }

    // What the launches since start_trace() did to device memory. `sectors`: distinct pieces of 32 bytes, which is what
    // must cross the memory bus at least. `requested`: sectors that the warps' accesses asked for, one access of all
    // lanes at a time; 32 * requested is larger than `bytes` where lanes are apart.
    struct Traffic {
        uint64_t accesses = 0, bytes = 0, requested = 0;
        std::unordered_set<uintptr_t> sectors;
    };
    Traffic reads, writes;
    void start_trace() {
        reads = writes = Traffic();
        tracing = true;
    }
    void stop_trace() { tracing = false; }
    void note_access(const void* at, size_t size, bool write) {
        if (tracing) trace[threadIdx.x].push_back({reinterpret_cast<uintptr_t>(at), (uint32_t)size, write});
    }

    void barrier() { wait(Fiber::AT_BARRIER, 0, 0); }

    // Offers `value` to the warp; returns what all 32 lanes offered.
    const uint64_t* exchange(unsigned mask, unsigned site, uint64_t value) {
        if (mask != 0xffffffffu) fail("a warp function was called with a partial mask");
        const unsigned thread = threadIdx.x;
        wait(Fiber::AT_WARP, site, value);
        return snapshots.data() + thread / WARP * WARP;
    }

  private:
    struct Access {
        uintptr_t at;
        uint32_t size;
        bool write;
    };
    bool tracing = false;
    std::vector<std::vector<Access>> trace;  // per thread of the block, in its own order
    std::mutex mutex;
    std::deque<Fiber> fibers;  // their addresses stay
    std::vector<uint64_t> snapshots;
    jmp_buf scheduler;
    const std::function<void()>* body = nullptr;
    unsigned current = 0;
    std::string error;
    std::mt19937 random;

    std::vector<unsigned> permuted(unsigned count) {
        std::vector<unsigned> found(count);
        for (unsigned i = 0; i < count; ++i) found[i] = order == 1 ? count - 1 - i : i;
        if (order > 1) std::shuffle(found.begin(), found.end(), random);
        return found;
    }

    // Changing fibers costs two jumps; only the first entry asks the system for a context.
    __attribute__((noinline)) void resume(Fiber& fiber) {
        if (_setjmp(scheduler) != 0) return;
        if (fiber.entered) _longjmp(fiber.place, 1);
        fiber.entered = true;
        setcontext(&fiber.context);
    }
    __attribute__((noinline)) void leave(Fiber& fiber) {
        if (_setjmp(fiber.place) == 0) _longjmp(scheduler, 1);
    }

    static void live() {
        Machine& m = get();
        for (;;) {
            Fiber& fiber = m.fibers[m.current];
            (*m.body)();
            fiber.state = Fiber::DONE;
            m.leave(fiber);
        }
    }
    void create(Fiber& fiber) {
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, &Machine::live, 0);
        fiber.entered = false;
    }

    void wait(Fiber::State state, unsigned site, uint64_t value) {
        Fiber& fiber = fibers[current];
        fiber.state = state;
        fiber.site = site;
        fiber.value = value;
        leave(fiber);
    }

    void fail(const char* text) {
        error = text;
        leave(fibers[current]);  // never resumed
    }

    // The fibers of a failed block hang in the middle of a kernel: new ones take their place.
    [[noreturn]] void give_up(const std::string& text) {
        for (Fiber& f : fibers) create(f);
        throw std::runtime_error("emulator: " + text);
    }

    void run_block(unsigned block, unsigned threads) {
        blockIdx.x = block;
        error.clear();
        if (__start_dsx_shared) memset(__start_dsx_shared, 0xff, (size_t)(__stop_dsx_shared - __start_dsx_shared));
        for (unsigned t = 0; t < threads; ++t) fibers[t].state = Fiber::READY;
        do {
            // One warp after another, each as far as it comes without the others: the most unequal pace that barriers
            // allow.
            for (unsigned warp : permuted(threads / WARP)) run_warp(warp * WARP);
        } while (release_block(threads));
    }

    void run_warp(unsigned first) {
        do {
            for (unsigned lane : permuted(WARP)) {
                if (fibers[first + lane].state != Fiber::READY) continue;
                current = first + lane;
                threadIdx.x = current;
                resume(fibers[current]);
                if (!error.empty()) give_up(error);
            }
        } while (release_warp(first));
    }

    // Lets go a block of which every thread is at the barrier; false when all have finished.
    bool release_block(unsigned threads) {
        unsigned done = 0, at_barrier = 0;
        for (unsigned t = 0; t < threads; ++t) {
            done += fibers[t].state == Fiber::DONE;
            at_barrier += fibers[t].state == Fiber::AT_BARRIER;
        }
        if (done == threads) return false;
        if (at_barrier != threads) give_up("divergence: some threads wait at a barrier that others never reach");
        for (unsigned t = 0; t < threads; ++t) fibers[t].state = Fiber::READY;
        return true;
    }

    // The n-th access of every lane counts as one request of the warp: right as long as lanes take the same path, which
    // is all but the end of a tensor.
    void add_trace(unsigned threads) {
        for (unsigned first = 0; first < threads; first += WARP) {
            for (size_t n = 0;; ++n) {
                std::set<std::pair<uintptr_t, bool>> sectors;
                for (unsigned t = first; t < first + WARP; ++t) {
                    if (n >= trace[t].size()) continue;
                    const Access& a = trace[t][n];
                    Traffic& to = a.write ? writes : reads;
                    ++to.accesses;
                    to.bytes += a.size;
                    for (uintptr_t s = a.at / 32; s <= (a.at + a.size - 1) / 32; ++s) {
                        sectors.insert({s, a.write});
                        to.sectors.insert(s);
                    }
                }
                if (sectors.empty()) break;
                for (const auto& s : sectors) ++(s.second ? writes : reads).requested;
            }
        }
        for (unsigned t = 0; t < threads; ++t) trace[t].clear();
    }

    bool release_warp(unsigned first) {
        for (unsigned t = first; t < first + WARP; ++t)
            if (fibers[t].state != Fiber::AT_WARP || fibers[t].site != fibers[first].site) return false;
        for (unsigned t = first; t < first + WARP; ++t) {
            snapshots[t] = fibers[t].value;
            fibers[t].state = Fiber::READY;
        }
        return true;
    }
};

template <class T> uint64_t pack(T value) {
    static_assert(sizeof(T) <= 8, "warp functions move at most eight bytes");
    uint64_t raw = 0;
    memcpy(&raw, &value, sizeof(T));
    return raw;
}
template <class T> T unpack(uint64_t raw) {
    T value;
    memcpy(&value, &raw, sizeof(T));
    return value;
}

}  // namespace emu

inline void __syncthreads() { emu::Machine::get().barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emu::Machine::get().exchange(mask, 1, 0); }
template <class T> T __shfl_xor_sync(unsigned mask, T value, int lanes) {
    const unsigned lane = threadIdx.x % emu::WARP;
    return emu::unpack<T>(emu::Machine::get().exchange(mask, 2, emu::pack(value))[lane ^ (unsigned)lanes]);
}
template <class T> T __shfl_sync(unsigned mask, T value, int from) {
    return emu::unpack<T>(emu::Machine::get().exchange(mask, 3, emu::pack(value))[(unsigned)from % emu::WARP]);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const uint64_t* all = emu::Machine::get().exchange(mask, 4, predicate != 0);
    unsigned bits = 0;
    for (unsigned lane = 0; lane < emu::WARP; ++lane) bits |= (unsigned)all[lane] << lane;
    return bits;
}
inline uint32_t __float_as_uint(float f) { return emu::unpack<uint32_t>(emu::pack(f)); }
inline float __uint_as_float(uint32_t u) { return emu::unpack<float>(emu::pack(u)); }

// The hardware's conversions; its NaN is 0x7fff.
inline float emu_half_to_float(uint16_t h) { return dsx_native::f16_to_float(h); }
inline uint16_t emu_float_to_half(float f) { return f != f ? (uint16_t)0x7fff : dsx_native::float_to_f16(f); }
