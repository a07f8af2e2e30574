// Writing into memory that other ranks have read last (segment.h: where ranks take turns with a place, it does not come
// to that): through the cache, or past it.
//
// Where the two cores share a cache, lines that the reader holds come back quickly and plain stores are best. Where
// they do not (chiplets, sockets; a hypervisor may move the cores of a virtual machine at any time), every store first
// has to fetch its line from the other side: measured on one machine within a minute, 50 or 330 ns for a line there and
// back, 9 or 2 GB/s for a plain copy, 12 GB/s for one past the cache in either case. So the first block of a step is a
// probe: it is written plainly and timed. A decision of this rank alone; it changes no result.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>

#include "dsx_comm/kernels.h"

namespace dsx {

class Outlet {
  public:
    enum class Way { measured, plain, past };

    Outlet(const Kernels& kernels, Way way) : copy_(kernels.copy), way_(way), past_(way == Way::past) {}

    // A step begins, of a call that moves `bytes` in all.
    void step(int64_t bytes) {
        large_ = bytes >= LARGE;
        probe_ = large_ && way_ == Way::measured && (!past_ || ++since_ % AGAIN == 0);
    }

    void copy(void* dst, const void* src, size_t bytes) {
        if (!probe_ || bytes < PROBE) return copy_(dst, src, bytes, past());
        probe_ = false;
        const auto began = std::chrono::steady_clock::now();
        copy_(dst, src, bytes, false);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
        judge(static_cast<double>(bytes) / took.count() < SLOW);
    }

    bool past() const { return past_ && large_; }

  private:
    static constexpr int64_t LARGE = 1 << 20;  // smaller messages stay in the caches whatever they cost
    static constexpr size_t PROBE = 8192;
    static constexpr double SLOW = 4e9;  // bytes per second, between the two speeds above
    static constexpr int AGAIN = 8;      // steps past the cache between two probes
    static constexpr int SURE = 2;       // probes in a row that agree: one may have been interrupted

    void judge(bool slow) {
        agreeing_ = slow == past_ ? 0 : agreeing_ + 1;
        if (agreeing_ < SURE) return;
        past_ = slow;
        agreeing_ = 0;
    }

    decltype(Kernels::copy) copy_;
    Way way_;
    bool past_, large_ = false, probe_ = false;
    int agreeing_ = 0, since_ = 0;
};

}  // namespace dsx
