// The device of a call, by the driver's stack of contexts: pushed before the launch, popped after it. No CUDA headers,
// so that tests run it against a recording driver on machines without one.
//
// Why not cudaSetDevice and back: a thread that has used no device yet is said to be on device 0, and setting that
// "back" makes a context on GPU 0, which costs hundreds of MB there for every rank of a node, and is an error where GPU
// 0 belongs to another process.
#pragma once
#include <atomic>
#include <stdexcept>
#include <string>

namespace dsx {
namespace cuda {

// The driver's functions that are needed; 0 is success. Contexts are opaque.
struct Driver {
    int (*current_context)(void** context);
    int (*device_of_current)(int* device);
    int (*retain_primary)(void** context, int device);
    int (*push)(void* context);
    int (*pop)(void** context);
};

// Primary contexts by device, kept to the end of the process as torch keeps them.
class PrimaryContexts {
  public:
    void* of(const Driver& driver, int device) {
        if (device < 0 || device >= MOST) throw std::runtime_error("no such CUDA device: " + std::to_string(device));
        void* context = known[device].load();
        if (context == nullptr) {
            const int code = driver.retain_primary(&context, device);
            if (code != 0)
                throw std::runtime_error("cuDevicePrimaryCtxRetain of device " + std::to_string(device) + ": error " +
                                         std::to_string(code));
            known[device].store(context);  // twice at the same time gives the same context
        }
        return context;
    }

  private:
    static constexpr int MOST = 256;
    std::atomic<void*> known[MOST] = {};
};

// Makes `device` the thread's current one; the thread is left as it was, be it on another device or on none.
class ContextGuard {
  public:
    ContextGuard(const Driver& driver_, PrimaryContexts& contexts, int device) : driver(driver_) {
        void* before = nullptr;
        int where = -1;
        if (driver.current_context(&before) == 0 && before != nullptr && driver.device_of_current(&where) == 0 &&
            where == device)
            return;
        const int code = driver.push(contexts.of(driver, device));
        if (code != 0)
            throw std::runtime_error("cuCtxPushCurrent of device " + std::to_string(device) + ": error " +
                                     std::to_string(code));
        pushed = true;
    }
    ~ContextGuard() {
        void* popped = nullptr;
        if (pushed) driver.pop(&popped);
    }
    ContextGuard(const ContextGuard&) = delete;
    ContextGuard& operator=(const ContextGuard&) = delete;

  private:
    const Driver& driver;
    bool pushed = false;
};

// Why a driver cannot run kernels of this runtime; empty when it can. Versions as 12080 for 12.8. `large_arguments`:
// kernels have more than 4 KB of arguments, which drivers take from 12.1 on. Else a driver of the same major version is
// enough.
inline std::string driver_problem(int driver, int runtime, bool large_arguments) {
    const auto text = [](int version) {
        return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
    };
    if (driver == 0)
        return "no CUDA driver is loaded; install the NVIDIA driver, or hide the GPU by CUDA_VISIBLE_DEVICES=";
    const int same_major = runtime / 1000 * 1000, needed = large_arguments && same_major < 12010 ? 12010 : same_major;
    if (driver >= needed) return "";
    return "the CUDA driver supports CUDA " + text(driver) + ", this module was built with CUDA " + text(runtime) +
           " and needs a driver for CUDA " + text(needed) +
           " or later: update the driver, or rebuild dsx-ops with an older nvcc";
}

}  // namespace cuda
}  // namespace dsx
