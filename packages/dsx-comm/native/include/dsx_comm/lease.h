// The caller's memory that an asynchronous operation uses, and whether it is still there.
//
// Python keeps the storages of the tensors, but a storage may give its memory back while it lives (resize_). The
// operation would then read and write memory that belongs to something else by now, or to nothing. So it looks at the
// word in which each storage keeps the address of its memory, after each wait for another rank: that is where the time
// goes in which a program can do such a thing.
#pragma once
#include <cstdint>
#include <vector>

namespace dsx {

struct Lease {
    const uintptr_t* word;  // in the storage
    uintptr_t address;      // what stood there when the operation was issued
    bool holds() const { return __atomic_load_n(word, __ATOMIC_RELAXED) == address; }
};

class Leases {
  public:
    Leases() = default;
    explicit Leases(const std::vector<uintptr_t>& words) {
        for (uintptr_t w : words) {
            const auto* word = reinterpret_cast<const uintptr_t*>(w);
            all_.push_back({word, *word});
        }
    }
    bool hold() const {
        for (const Lease& lease : all_)
            if (!lease.holds()) return false;
        return true;
    }

  private:
    std::vector<Lease> all_;
};

}  // namespace dsx
