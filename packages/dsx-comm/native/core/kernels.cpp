// Chooses the instruction set once.
#include "dsx_comm/kernels.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace dsx {
namespace base { extern const Kernels table; }
#ifdef DSX_X86
namespace avx2 { extern const Kernels table; }
namespace avx512 { extern const Kernels table; }
#endif

const Kernels* kernels_named(const char* name) {
    if (!std::strcmp(name, "base")) return &base::table;
#ifdef DSX_X86
    __builtin_cpu_init();
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (has_avx2 && !std::strcmp(name, "avx2")) return &avx2::table;
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && !std::strcmp(name, "avx512"))
        return &avx512::table;
#endif
    return nullptr;
}

namespace {
const Kernels* choose() {
    const char* wanted = std::getenv("DSX_ISA");
    if (wanted && *wanted) {
        if (const Kernels* found = kernels_named(wanted)) return found;
        throw std::invalid_argument(std::string("DSX_ISA=") + wanted + ": this CPU cannot run it, or it is no instruction set");
    }
    for (const char* name : {"avx512", "avx2"})
        if (const Kernels* found = kernels_named(name)) return found;
    return &base::table;
}
}  // namespace

const Kernels& kernels() {
    static const Kernels* chosen = choose();
    return *chosen;
}

}  // namespace dsx
