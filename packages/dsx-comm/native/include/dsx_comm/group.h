// One rank's view of a group in shared memory, and the collectives.
//
// Everything advances in steps. In a step a rank writes into the places that are its in this step (segment.h) and then
// *posts* the step's number; what it wrote in step s its peers read after they saw s, and before they post s + 1. So a
// rank that has seen every rank at s - 1 may write where any rank wrote in s - 2: two parities are enough, and one wait
// per step. All ranks take the same number of steps in a call, which follows from the call's arguments; that these
// agree is checked first (Descriptor).
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "dsx_comm/kernels.h"
#include "dsx_comm/lease.h"
#include "dsx_comm/store_policy.h"
#include "dsx_comm/segment.h"

namespace dsx {

struct PeerLost : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct WaitTimeout : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct Mismatch : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct Aborted : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct Hang : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Settings {
    int rank = 0;
    std::vector<int> names;    // global ranks, for messages
    int lock_fd = -1;          // file whose byte r rank r keeps locked while it lives; -1: liveness is not watched
    double spin_us = 20.0;     // waiting that keeps the core
    double yield_us = 300.0;   // waiting that gives way to others, from the start; then the rank sleeps
    double look_s = 0.1;       // how long it sleeps before it looks whether the others live; a failure wakes it
    int64_t one_shot = 16384;  // messages up to this many bytes are reduced by every rank at once
    StorePolicy::Way stores = StorePolicy::Way::measured;
    std::function<void()> look{};  // called now and then by who waits; what it throws ends the wait
};

// Of a code: kernels.h's Dtype, and beyond that what is only moved (shm/codes.py).
const char* dtype_name(int64_t code);

// A message of symmetric memory: where each rank's copy lies in this process.
struct Symmetric {
    int64_t memory = -1;
    int64_t offset = 0;
    std::vector<char*> bases;
    explicit operator bool() const { return memory >= 0; }
};

struct ReduceSpec {
    Dtype dtype;
    Reduce reduce;
    double premultiply = 1.0;
    bool average = false;
};

class Group {
  public:
    using Clock = std::chrono::steady_clock;

    Group(void* memory, Settings settings);
    static void format(void* memory, const Layout& layout, uint64_t nonce0, uint64_t nonce1);

    int rank() const { return set_.rank; }
    int size() const { return layout_.size; }
    uint64_t steps() const { return step_; }

    // - collectives; each blocks, and throws one of the errors above
    void barrier(double timeout);
    void all_reduce(void* data, int64_t count, const ReduceSpec& spec, const Symmetric& where, double timeout);
    // `code`: what the bytes are (kernels.h's Dtype, or a higher number), only compared; -1: bytes
    void all_gather(const void* source, char* const* outputs, int64_t bytes, int code, const Symmetric& where,
                    double timeout);
    void reduce_scatter(void* output, const char* const* inputs, const int64_t* counts, const ReduceSpec& spec,
                        const Symmetric& where, double timeout);
    void broadcast(void* data, int64_t bytes, int code, int root, double timeout);
    void reduce(void* data, int64_t count, int root, const ReduceSpec& spec, double timeout);
    void gather(const void* source, char* const* outputs, int64_t bytes, int code, int root, double timeout);
    void scatter(const char* const* inputs, void* output, int64_t bytes, int code, int root, double timeout);
    void all_to_all(const char* const* inputs, const int64_t* in_bytes, char* const* outputs, const int64_t* out_bytes,
                    int code, double timeout);

    // While `call` runs the caller's memory must stay where it is: a call that finds it gone fails on all ranks.
    template <class Call> void with_leases(const Leases& leases, Call&& call) {
        struct Reset {
            const Leases*& place;
            ~Reset() { place = nullptr; }
        } reset{leases_};
        leases_ = &leases;
        call(*this);
    }

    // - failure
    bool poisoned() const { return group()->poison.load(std::memory_order_acquire) != 0; }
    void poison(Failure kind, const std::string& text);  // every rank's next or present wait throws this
    void check_poison() const;
    std::vector<int> lost() const;  // ranks whose process has ended
    std::vector<int> behind(uint64_t step) const;

    // - waiting, shared with the mailboxes
    Flag& doorbell(int rank) { return header(rank)->doorbell; }
    static void raise_flag(Flag& flag, uint64_t value);
    static void ring(Flag& flag);
    // Until flag.value >= value, or `timeout_at`; false: a time slice is over and the caller should look around.
    bool slice(Flag& flag, uint64_t value) const;
    void look() const {
        if (set_.look) set_.look();
    }
    const Settings& settings() const { return set_; }
    const Layout& layout() const { return layout_; }
    char* at(size_t offset) const { return base_ + offset; }
    std::string name(int rank) const { return std::to_string(set_.names[static_cast<size_t>(rank)]); }
    std::string names(const std::vector<int>& ranks) const;
    std::string poison_text() const;

  private:
    // Non-temporal stores into the caller's memory are in order with its own loads and stores when the call is over.
    struct StoreFenceGuard {
        ~StoreFenceGuard() { fence_stores(); }
    };
    struct CallContext {
        const char* what;
        Clock::time_point until;
        double timeout;
        StoreFenceGuard fence;
    };
    // Of a reduce-scatter: where the parts lie, and how many elements of `width` bytes each has.
    struct Scattered {
        char* output;
        const char* const* inputs;
        const int64_t* counts;
        int64_t width;
        int64_t bytes(int r) const { return counts[r] * width; }
    };

    GroupHeader* group() const { return reinterpret_cast<GroupHeader*>(base_); }
    RankHeader* header(int r) const { return reinterpret_cast<RankHeader*>(base_ + layout_.header(r)); }
    // Where rank r puts in a step: what only rank q reads; what all read; what all read of a result.
    char* in(int r, int q, uint64_t step) const {
        const bool turn = layout_.swapped(step);
        return base_ + layout_.in(turn ? q : r, step) + static_cast<size_t>(turn ? r : q) * layout_.slice_bytes;
    }
    char* in(int r, uint64_t step) const { return base_ + layout_.in(layout_.area_of(r, step), step); }
    char* out(int r, uint64_t step) const { return base_ + layout_.out(layout_.area_of(r, step), step); }

    CallContext begin(const char* what, double timeout);
    void describe(const Descriptor& mine);   // writes this rank's line for the coming step
    void post();                             // the coming step is done
    void await(const CallContext& context);  // returns when every rank has posted what this rank posted last
    void await_one(int peer, const CallContext& context);
    void check_leases(const CallContext& context);  // throws, and tells the others, if the caller's memory is gone
    void check_interrupts(const CallContext& context);
    // After await: throws unless all lines of the last step are alike; true if all name the same symmetric memory (or
    // none).
    bool agree(const Descriptor& mine) const;
    [[noreturn]] void disagree(const Descriptor& mine) const;
    bool open(const CallContext& context, const Descriptor& mine);  // one step: describe, post, await, agree
    Descriptor descriptor(Call call, int64_t bytes, int code = -1) const;
    void copy_to_shared(char* place, const char* from, size_t bytes);  // from is private, place is read by all ranks
    std::vector<const char*> peers(const Symmetric& where) const;
    // body(s) for s = 0 .. n, and a step between each two. The first one shows `mine`, and the ranks agree on it.
    // Symmetric memory helps only where all ranks' data lies in it, which the first step of a call tells; if some have
    // it and some do not, those without forget what they shared in that step, and all begin again as if no rank had
    // any.
    template <class Body> void in_steps(int64_t n, const CallContext& context, const Descriptor& mine, Body body) {
        for (int64_t s = 0; s <= n; s++) {
            if (s == 0) describe(mine);
            if (s == 1 && !agree(mine)) {
                s = -1;
                continue;
            }
            body(s);
            if (s < n) {
                post();
                await(context);
            }
        }
    }

    void symmetric_all_reduce(const ReduceSpec& spec, const Symmetric& where, const CallContext& context,
                              const Descriptor& mine);
    void staged_all_reduce(char* data, const ReduceSpec& spec, const CallContext& context, const Descriptor& mine);
    void one_shot_all_reduce(void* data, const ReduceSpec& spec, const CallContext& context, const Descriptor& mine);
    bool past_cache(const Scattered& parts) const;
    void symmetric_reduce_scatter(const Scattered& parts, const ReduceSpec& spec, const Symmetric& where,
                                  const CallContext& context);
    void staged_reduce_scatter(const Scattered& parts, const ReduceSpec& spec, const CallContext& context,
                               const Descriptor& mine);
    void symmetric_all_gather(char* const* outputs, const Symmetric& where, const CallContext& context,
                              const Descriptor& mine);
    void staged_all_gather(const char* from, char* const* outputs, const CallContext& context, const Descriptor& mine);

    char* base_;
    Layout layout_;
    Settings set_;
    const Kernels& k_;
    StorePolicy stores_;
    uint64_t step_ = 0;  // last step this rank posted
    uint64_t calls_ = 0;
    const Leases* leases_ = nullptr;  // of the call that runs
};

}  // namespace dsx
