// How a rank writes into memory that other ranks have read last: through the cache, or by non-temporal stores, which go
// past it. (Where ranks take turns with a place, as segment.h says, the question does not come up.)
//
// Where the two cores share a cache, lines that the reader holds come back quickly, and ordinary stores are best. Where
// they do not (chiplets, sockets; a hypervisor may move the cores of a virtual machine at any time), every store first
// has to fetch its line from the other side. Measured on one virtual machine within a minute, 2026-11-21: a line there
// and back takes 50 or 330 ns, an ordinary copy runs at 9 or 2 GB/s, one by non-temporal stores at 12 GB/s in both
// cases. So the first block of a step is a probe: it is written by ordinary stores and timed. Each rank decides for
// itself; the decision changes no result. It may go when a machine is found on which the probe costs more than it
// saves.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>

#include "dsx_comm/kernels.h"

namespace dsx {

class StorePolicy {
  public:
    enum class Way { measured, plain, non_temporal };

    StorePolicy(const Kernels& kernels, Way way)
        : copy_(kernels.copy), way_(way), non_temporal_(way == Way::non_temporal) {}

    // A step begins, of a call that moves `bytes` in all.
    void step(int64_t bytes) {
        large_ = bytes >= LARGE;
        probe_ = large_ && way_ == Way::measured && (!non_temporal_ || ++since_ % AGAIN == 0);
    }

    void copy(void* dst, const void* src, size_t bytes) {
        if (!probe_ || bytes < PROBE) return copy_(dst, src, bytes, non_temporal());
        probe_ = false;
        const auto began = std::chrono::steady_clock::now();
        copy_(dst, src, bytes, false);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
        judge(static_cast<double>(bytes) / took.count() < SLOW);
    }

    bool non_temporal() const { return non_temporal_ && large_; }

  private:
    static constexpr int64_t LARGE = 1 << 20;  // smaller messages stay in the caches whatever they cost
    static constexpr size_t PROBE = 8192;
    static constexpr double SLOW = 4e9;  // bytes per second, between the two speeds above
    static constexpr int AGAIN = 8;      // steps past the cache between two probes
    static constexpr int SURE = 2;       // probes in a row that agree: one may have been interrupted

    void judge(bool slow) {
        agreeing_ = slow == non_temporal_ ? 0 : agreeing_ + 1;
        if (agreeing_ < SURE) return;
        non_temporal_ = slow;
        agreeing_ = 0;
    }

    decltype(Kernels::copy) copy_;
    Way way_;
    bool non_temporal_, large_ = false, probe_ = false;
    int agreeing_ = 0, since_ = 0;
};

}  // namespace dsx
