// Chooses the instruction set once.
#include "dsx_comm/kernels.h"

#include "dsx_native/isa.h"

namespace dsx {
namespace base {
extern const Kernels table;
}
#ifdef DSX_X86
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
#endif

namespace {
dsx_native::IsaChoice<Kernels>& choice() {
#ifdef DSX_X86
    static dsx_native::IsaChoice<Kernels> c{&base::table, &avx2::table, &avx512::table};
#else
    static dsx_native::IsaChoice<Kernels> c{&base::table};
#endif
    return c;
}
}  // namespace

const Kernels& kernels() {
    static const Kernels& chosen = choice().current();
    return chosen;
}

const Kernels& kernels_named(const std::string& name) { return choice().named(name); }

std::vector<std::string> runnable_isas() { return choice().names(); }

}  // namespace dsx
