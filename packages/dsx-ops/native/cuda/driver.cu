// The driver: whether it can run this module, and its functions for contexts. They are looked up in the library that
// torch has loaded, so that the module loads on machines that have none.
#include "launch.cuh"
#ifndef DSX_CUDA_EMULATED
#include <dlfcn.h>
#endif

namespace dsx {
namespace cuda {

#ifdef DSX_CUDA_EMULATED
int check_driver() { return 0; }
#else
namespace {

template <class F> void find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (function == nullptr) throw std::runtime_error(std::string("the CUDA driver has no ") + name + "; update it");
}

Driver found_driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) throw std::runtime_error("libcuda.so.1 cannot be loaded; install the NVIDIA driver");
    Driver d{};
    find(library, "cuCtxGetCurrent", d.current_context);
    find(library, "cuCtxGetDevice", d.device_of_current);
    find(library, "cuDevicePrimaryCtxRetain", d.retain_primary);
    find(library, "cuCtxPushCurrent_v2", d.push);
    find(library, "cuCtxPopCurrent_v2", d.pop);
    return d;
}

}  // namespace

const Driver& driver() {
    static const Driver found = found_driver();
    return found;
}

PrimaryContexts& primary_contexts() {
    static PrimaryContexts contexts;
    return contexts;
}

int check_driver() {
    int version = 0;
    check(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
    const std::string problem = driver_problem(version, CUDART_VERSION, LARGE_ARGUMENTS);
    if (!problem.empty()) throw std::runtime_error(problem);
    driver();
    return version;
}
#endif

}  // namespace cuda
}  // namespace dsx
