// Moves bytes between memory and files: requests in, blocks to the kernel, every completion's result looked at.
//
// A request is cut into at most three spans: an aligned body that goes past the page cache (O_DIRECT), and an
// unaligned head and tail that go through it. Bodies begin and end on page boundaries, so that no page is ever
// written both ways. Spans are cut into blocks, blocks are handed to workers. A worker owns one ring (or aio context,
// or nothing: then it calls pread and pwrite itself) and keeps it full. Memory that the device cannot reach goes
// through a worker's own bounce buffers. What the kernel moved only in part is submitted again; the first error of a
// request ends it, once everything the kernel still holds of it has come back.
//
// A request never finishes while the kernel may still work on its memory. One exception: a worker whose ring failed
// waits a limited time for its blocks and then reports the rest as lost (`Outcome::lost`); that memory must never be
// freed.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace dsx_nvme {

enum class Kind { uring, libaio, threads };

struct Options {
    Kind kind = Kind::threads;
    uint64_t block_size = 1u << 20;  // bytes per submission
    unsigned queue_depth = 32;       // submissions in flight per worker
    unsigned workers = 1;
    bool single_submit = false;  // one system call per submission
    bool overlap = true;         // false: a full queue is reaped a quarter at a time
    double drain_seconds = 10;   // how long a worker whose ring failed waits for what the kernel holds
};

struct Transfer {
    bool write = false;
    int direct_fd = -1;  // opened with O_DIRECT; -1: everything goes through the page cache
    int plain_fd = -1;
    int file_slot = -1;  // of direct_fd, from Engine::add_file; -1: none
    char* memory = nullptr;
    uint64_t nbytes = 0;
    uint64_t offset = 0;        // in the file
    uint32_t memory_align = 1;  // what direct I/O asks of addresses
    uint32_t offset_align = 1;  // and of offsets and lengths
};

struct Outcome {
    bool finished = false;
    uint64_t moved = 0;
    int error = 0;  // errno of the first failure; kEndOfFile when the file ended early
    uint64_t error_offset = 0;
    bool lost = false;  // the engine failed and the kernel may still work on the memory: keep it for ever
};
constexpr int kEndOfFile = -1;

struct Span {
    uint64_t begin = 0, end = 0;  // offsets in the file
    bool direct = false;
};

constexpr uint64_t kPage = 4096;

inline uint64_t round_down(uint64_t value, uint64_t unit) { return value / unit * unit; }
inline uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// Head, body and tail of a transfer; returns how many of them there are.
inline unsigned plan_spans(const Transfer& t, Span* out) {
    const uint64_t end = t.offset + t.nbytes;
    if (t.nbytes == 0) return 0;
    const uint64_t unit = t.offset_align > kPage ? t.offset_align : kPage;
    const uint64_t first = round_up(t.offset, unit), last = round_down(end, unit);
    if (t.direct_fd < 0 || last <= first) {
        out[0] = Span{t.offset, end, false};
        return 1;
    }
    unsigned count = 0;
    if (t.offset < first) out[count++] = Span{t.offset, first, false};
    out[count++] = Span{first, last, true};
    if (last < end) out[count++] = Span{last, end, false};
    return count;
}

struct Request {
    Transfer transfer;
    Span spans[3];
    unsigned span_count = 0, span = 0;
    uint64_t cursor = 0;       // next offset to hand out
    unsigned outstanding = 0;  // blocks with the workers
    Outcome outcome;
};

enum class Stage : uint8_t { idle, claimed, with_backend };

// A block on its way. Belongs to one worker.
struct Chunk {
    Request* request = nullptr;
    Stage stage = Stage::idle;
    char* user = nullptr;
    char* io = nullptr;  // what the kernel sees: `user`, or a bounce buffer
    uint64_t offset = 0;
    uint32_t length = 0, done = 0;
    int fd = -1, file_slot = -1, buffer_slot = -1, bounce = -1;
    bool write = false, direct = false;
    unsigned retries = 0;
};

struct Statistics {
    std::atomic<uint64_t> bytes_read{0}, bytes_written{0}, direct_bytes{0}, bounced_bytes{0};
    std::atomic<uint64_t> requests{0}, submissions{0}, retries{0}, partial{0}, direct_refused{0};
    std::atomic<uint64_t> registered_buffers{0}, registered_files{0}, fixed_submissions{0};
};

// Memory or a file announced in advance. Workers notice a changed version and tell their ring.
struct Region {
    char* memory = nullptr;
    uint64_t nbytes = 0;
    int fd = -1;
    uint64_t generation = 0;  // 0: free
};
constexpr unsigned kRegions = 63, kBounceSlot = 63, kFiles = 64;

class Worker;

class Engine {
  public:
    explicit Engine(const Options& options);  // throws std::system_error when the kernel refuses
    ~Engine();                                // waits for everything in flight
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    uint64_t submit(const Transfer& transfer);
    // Waits at most `seconds` (negative: for ever). A finished request is forgotten.
    Outcome wait(uint64_t id, double seconds);
    bool poll(uint64_t id);  // finished? does not forget

    int add_buffer(char* memory, uint64_t nbytes);  // slot, or -1 when there is none left
    void drop_buffer(int slot);
    int add_file(int fd);
    void drop_file(int slot);

    // For tests: the results of the next completions. 0 leaves one alone, a negative errno replaces it, a positive
    // number cuts it short.
    void inject_results(const std::vector<int64_t>& results);
    // For tests: the next worker that comes back from the kernel fails with this errno.
    void inject_failure(int error, double drain_seconds);

    const Options& options() const { return options_; }
    const Statistics& statistics() const { return statistics_; }
    std::string refused_registration();  // why buffers are not registered; empty when nothing was refused

  private:
    friend class Worker;
    bool claim(Chunk& chunk, bool may_bounce);  // under the lock
    void finish(std::vector<Chunk*>& chunks);
    void stop_handing_out(int error);
    void fail_block(const Chunk& chunk, int error);  // under the lock
    void lose(const std::vector<Chunk*>& chunks, int error);
    int64_t injected(int64_t result);
    int occupy(std::vector<Region>& table, const Region& region);
    void vacate(std::vector<Region>& table, int slot);
    void wake_all();
    void settle(Request& request);

    Options options_;
    Statistics statistics_;
    std::mutex mutex_;
    std::condition_variable work_, done_;
    std::deque<Request*> queue_;  // with blocks left to hand out
    std::map<uint64_t, std::unique_ptr<Request>> requests_;
    uint64_t next_id_ = 1;
    bool stopping_ = false;
    int broken_ = 0;  // errno that ended the workers
    std::vector<Region> buffers_, files_;
    uint64_t version_ = 1;  // of the two tables
    std::string refused_;
    std::deque<int64_t> injected_;
    std::atomic<bool> has_injected_{false};
    std::atomic<int> injected_failure_{0};
    std::vector<std::unique_ptr<Worker>> workers_;
};

// Why `kind` cannot run here; empty when it can.
std::string probe(Kind kind);

}  // namespace dsx_nvme
