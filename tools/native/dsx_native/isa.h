// The instruction set in use, out of those that dsx_build.py compiled one after the other into one module.
//
// A package hands in its tables of kernels, narrowest set first; what this CPU cannot run is left out. DSX_ISA names
// one, else the widest runs.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

namespace dsx_native {

// The names that X86_ISAS of dsx_build.py gives, in its order.
constexpr const char* ISAS[] = {"base", "avx2", "avx512"};

// How many of ISAS this CPU runs. The questions also ask the operating system whether it keeps the wide registers.
inline size_t runnable_isas() {
#ifdef DSX_X86
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return avx2 ? (avx512 ? 3 : 2) : 1;
#else
    return 1;
#endif
}

template <class Table> class IsaChoice {
  public:
    IsaChoice(std::initializer_list<const Table*> narrowest_first) : tables_(narrowest_first) {
        tables_.resize(std::min(tables_.size(), runnable_isas()));
    }
    std::vector<std::string> names() const { return {ISAS, ISAS + tables_.size()}; }

    const Table& named(const std::string& name) const {
        std::string known;
        for (size_t i = 0; i < tables_.size(); ++i) {
            if (name == ISAS[i]) return *tables_[i];
            known += (i ? ", " : "") + std::string(ISAS[i]);
        }
        throw std::invalid_argument("instruction set '" + name + "' cannot run here; this CPU has: " + known);
    }
    void use(const std::string& name) { current_ = &named(name); }

    // Chosen at the first call, so that a wrong DSX_ISA is an error of that call and not of the import.
    const Table& current() {
        if (current_ == nullptr) {
            const char* wanted = std::getenv("DSX_ISA");
            current_ = wanted && *wanted ? &named(wanted) : tables_.back();
        }
        return *current_;
    }

  private:
    std::vector<const Table*> tables_;
    const Table* current_ = nullptr;
};

}  // namespace dsx_native
