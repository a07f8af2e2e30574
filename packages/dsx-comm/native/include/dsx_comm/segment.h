// The memory that the ranks of a group share: layout only.
//
//   page 0            GroupHeader: nonce, sizes, the poison flag
//   page 1 .. P       RankHeader of each rank
//   then per rank     in[2] (in_bytes each), out[2] (slice_bytes each)
//   then per (src, dst) a ring of two mailbox slots; untouched pages cost nothing
//
// In a mailbox the sender writes the slots and the receiver the tail counter. Areas change hands: what rank r shows
// rank q alone and what q shows r lie in two places that the two swap whenever both have been read, so that a rank
// writes where it has read last. Such lines are in its cache already, and its alone: reading them has taken them from
// the writer. Lines that the other core read last have to be taken back one by one first. Measured on two cores: 40
// GB/s against 6 where these share a cache, against 2 (9 past the cache) where they do not.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace dsx {

constexpr size_t LINE = 64, PAGE = 4096;
constexpr uint64_t MAGIC = 0x336d6f6378736400ull;  // layout version in the top byte
constexpr size_t POISON_TEXT = 2048;

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "atomics in shared memory must not hide a lock of one process");

// A counter others wait for. The futex word is the low half of the counter.
struct alignas(LINE) Flag {
    std::atomic<uint64_t> value{0};
    std::atomic<uint32_t> sleepers{0};
};

// Why a group is unusable.
enum class Failure : int32_t { lost, timeout, mismatch, aborted, hang };

enum class Call : int32_t {
    none,
    all_reduce,
    all_gather,
    reduce_scatter,
    broadcast,
    reduce,
    gather,
    scatter,
    all_to_all,
    barrier
};

// What a rank says it is context, compared by all before data is used.
struct alignas(LINE) Descriptor {
    int32_t call = 0, dtype = 0, reduce = 0, root = -1;
    int64_t bytes = 0;
    int64_t shape = 0;      // hash of what else must agree (sizes of uneven parts)
    int64_t memory = -1;    // symmetric memory: its number, else -1
    int64_t offset = 0;     // of this rank's data in it
    uint64_t sequence = 0;  // number of the call
};
static_assert(sizeof(Descriptor) == LINE, "one cache line");

struct alignas(PAGE) RankHeader {
    Flag progress;        // steps posted
    Flag doorbell;        // rung by anybody who changed a mailbox of this rank
    Descriptor calls[2];  // by parity of the step
};

struct alignas(PAGE) GroupHeader {
    uint64_t magic;
    uint64_t nonce[2];
    int64_t total, in_bytes, slice_bytes, mailbox_bytes;
    int32_t size;
    std::atomic<uint32_t> poison;  // 0 fine, 1 being written, 2 kind and text hold
    int32_t kind;
    char text[POISON_TEXT];
};

struct alignas(LINE) Mailbox {
    struct Slot {
        int64_t tag, total;  // of the message this piece belongs to
        int64_t bytes;       // of this piece
        int64_t code;        // what the bytes are: kernels.h's Dtype, or a higher number
    };
    alignas(LINE) std::atomic<uint64_t> head;  // pieces written
    alignas(LINE) std::atomic<uint64_t> tail;  // pieces taken
    alignas(LINE) Slot slots[2];
};

inline size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Offsets from the start of the segment.
struct Layout {
    int size = 0;
    size_t in_bytes = 0, slice_bytes = 0, mailbox_bytes = 0;

    size_t rank_area() const { return up(2 * in_bytes + 2 * slice_bytes, PAGE); }
    size_t mailbox_area() const { return up(sizeof(Mailbox) + 2 * mailbox_bytes, PAGE); }
    size_t header(int rank) const { return PAGE * (1 + static_cast<size_t>(rank)); }
    size_t area(int rank) const {
        return PAGE * (1 + static_cast<size_t>(size)) + rank_area() * static_cast<size_t>(rank);
    }
    size_t in(int rank, uint64_t step) const { return area(rank) + (step & 1) * in_bytes; }
    size_t out(int rank, uint64_t step) const { return area(rank) + 2 * in_bytes + (step & 1) * slice_bytes; }
    // steps of one parity alternate
    bool swapped(uint64_t step) const { return (step >> 1) & 1; }
    // the rank in whose area lies what `rank` shares with all; with several readers there is no pair to swap
    int area_of(int rank, uint64_t step) const { return size == 2 && swapped(step) ? 1 - rank : rank; }
    size_t mailbox(int src, int dst) const {
        return area(size) +
               mailbox_area() * (static_cast<size_t>(src) * static_cast<size_t>(size) + static_cast<size_t>(dst));
    }
    size_t eager() const { return area(size); }  // up to here memory is taken at start
    size_t total() const { return mailbox(size - 1, size - 1) + mailbox_area(); }
};

}  // namespace dsx
