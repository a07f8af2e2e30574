// Posting a step, waiting for the other ranks, and noticing that one of them has ended.
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "dsx_comm/group.h"

namespace dsx {
namespace {

uint32_t* futex_word(Flag& flag) {
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half of the counter comes first");
    return reinterpret_cast<uint32_t*>(&flag.value);
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void wake(Flag& flag) { syscall(SYS_futex, futex_word(flag), FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0); }

}  // namespace

// The store of the value and the load of the sleepers are both seq_cst, and so are the sleeper's increment and its load
// of the value: one of the two sees the other.
void Group::raise_flag(Flag& flag, uint64_t value) {
    flag.value.store(value, std::memory_order_seq_cst);
    if (flag.sleepers.load(std::memory_order_seq_cst) != 0) wake(flag);
}

void Group::ring(Flag& flag) {
    flag.value.fetch_add(1, std::memory_order_seq_cst);
    if (flag.sleepers.load(std::memory_order_seq_cst) != 0) wake(flag);
}

bool Group::slice(Flag& flag, uint64_t value) const {
    if (flag.value.load(std::memory_order_acquire) >= value) return true;
    // Sleeping and being woken costs a virtual machine 50 to 100 us, in which the others would fall asleep in turn:
    // busy waiting must last longer than that. After a moment it yields to other threads that want the core.
    const auto start = Clock::now();
    const auto pure = start + std::chrono::nanoseconds(static_cast<int64_t>(set_.spin_us * 1e3));
    const auto until = start + std::chrono::nanoseconds(static_cast<int64_t>(set_.yield_us * 1e3));
    for (auto now = start; now < until; now = Clock::now()) {
        if (now < pure)
            for (int i = 0; i < 32 && flag.value.load(std::memory_order_acquire) < value; i++) relax();
        else sched_yield();
        if (flag.value.load(std::memory_order_acquire) >= value) return true;
    }
    flag.sleepers.fetch_add(1, std::memory_order_seq_cst);
    timespec wait{};
    wait.tv_sec = static_cast<time_t>(set_.look_s);
    wait.tv_nsec = static_cast<long>((set_.look_s - static_cast<double>(wait.tv_sec)) * 1e9);
    bool there = false;
    for (;;) {
        uint64_t seen = flag.value.load(std::memory_order_seq_cst);
        if ((there = seen >= value) || poisoned()) break;  // `poison` wakes all sleepers after it has set its flag
        long rc = syscall(SYS_futex, futex_word(flag), FUTEX_WAIT, static_cast<uint32_t>(seen), &wait, nullptr, 0);
        if (rc != 0 && errno != EAGAIN) {  // time over, or a signal: let the caller look around
            there = flag.value.load(std::memory_order_seq_cst) >= value;
            break;
        }
    }
    flag.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return there;
}

void Group::post() {
    fence_stores();
    raise_flag(header(rank())->progress, ++step_);
}

void Group::await(const CallContext& context) {
    for (int r = 0; r < size(); r++)
        if (r != rank()) await_one(r, context);
    check_leases(context);
}

void Group::check_leases(const CallContext& context) {
    if (!leases_ || leases_->hold()) return;
    std::string text =
        std::string(context.what) + " #" + std::to_string(calls_) + ": on rank " + name(rank()) +
        " the memory of a tensor was freed or moved (its storage was resized) while the call used it; wait "
        "for the call first";
    poison(Failure::aborted, text);
    throw Aborted(text);
}

// Runs the caller's check for interrupts (signals). A rank that leaves a call half way leaves the others waiting, so it
// tells them first.
void Group::check_interrupts(const CallContext& context) {
    try {
        look();
    } catch (...) {
        poison(Failure::aborted, std::string(context.what) + " #" + std::to_string(calls_) + ": rank " + name(rank()) +
                                     " was interrupted while it waited for the others");
        throw;
    }
}

void Group::await_one(int peer, const CallContext& context) {
    Flag& flag = header(peer)->progress;
    while (!slice(flag, step_)) {
        check_poison();
        check_interrupts(context);
        const auto gone = lost(),
                   late = behind(
                       step_);  // in this order: while one rank is behind, no rank has left this step in good order
        if (!gone.empty() && !late.empty()) {
            std::string text = std::string(context.what) + " #" + std::to_string(calls_) + ": rank(s) " + names(gone) +
                               " ended while rank " + name(rank()) + " waited (killed, or left without taking part)";
            poison(Failure::lost, text);
            throw PeerLost(text);
        }
        if (Clock::now() >= context.until) {
            char seconds[32];
            std::snprintf(seconds, sizeof seconds, "%g", context.timeout);
            std::string text = std::string(context.what) + " #" + std::to_string(calls_) + ": rank(s) " + names(late) +
                               " did not come within " + seconds + " s; they are alive: look for what they do instead";
            poison(Failure::timeout, text);
            throw WaitTimeout(text);
        }
    }
}

std::vector<int> Group::behind(uint64_t step) const {
    std::vector<int> found;
    for (int r = 0; r < size(); r++)
        if (r != rank() && header(r)->progress.value.load(std::memory_order_acquire) < step) found.push_back(r);
    return found;
}

// Each rank holds a lock on its byte of the file; the kernel drops it when the process is gone, however it went.
std::vector<int> Group::lost() const {
    std::vector<int> found;
    if (set_.lock_fd < 0) return found;
    for (int r = 0; r < size(); r++) {
        if (r == rank()) continue;
        struct flock probe{};
        probe.l_type = F_WRLCK;
        probe.l_whence = SEEK_SET;
        probe.l_start = r;
        probe.l_len = 1;
        if (fcntl(set_.lock_fd, F_GETLK, &probe) == 0 && probe.l_type == F_UNLCK) found.push_back(r);
    }
    return found;
}

void Group::poison(Failure kind, const std::string& text) {
    uint32_t fine = 0;
    if (!group()->poison.compare_exchange_strong(fine, 1)) return;  // another rank was first
    size_t n = std::min(text.size(), POISON_TEXT - 1);
    std::memcpy(group()->text, text.data(), n);
    group()->text[n] = 0;
    group()->kind = static_cast<int32_t>(kind);
    group()->poison.store(2, std::memory_order_release);
    for (int r = 0; r < size(); r++) {
        wake(header(r)->progress);
        wake(header(r)->doorbell);
    }
}

std::string Group::poison_text() const {
    uint32_t state = group()->poison.load(std::memory_order_acquire);
    if (state == 0) return "";
    return state == 2 ? std::string(group()->text) : "another rank failed";
}

void Group::check_poison() const {
    uint32_t state = group()->poison.load(std::memory_order_acquire);
    if (state == 0) return;
    const auto kind = state == 2 ? static_cast<Failure>(group()->kind) : Failure::aborted;
    if (kind == Failure::lost) throw PeerLost(poison_text());
    if (kind == Failure::timeout) throw WaitTimeout(poison_text());
    if (kind == Failure::mismatch) throw Mismatch(poison_text());
    if (kind == Failure::hang) throw Hang(poison_text());
    throw Aborted(poison_text());
}

std::string Group::names(const std::vector<int>& ranks) const {
    std::string text;
    for (int r : ranks) text += (text.empty() ? "" : ", ") + name(r);
    return text;
}

}  // namespace dsx
