#include "dsx_nvme/engine.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>

#include "dsx_nvme/worker.h"

namespace dsx_nvme {
namespace {

constexpr uint64_t kMaxBlock = 1u << 30;  // the kernel moves at most 2 GiB - 4 KiB per call

bool misaligned(const char* memory, uint32_t unit) { return reinterpret_cast<uintptr_t>(memory) % unit != 0; }

}  // namespace

Engine::Engine(const Options& options) : options_(options), buffers_(kRegions), files_(kFiles) {
    options_.block_size = std::min(round_up(std::max<uint64_t>(options.block_size, 1), kPage), kMaxBlock);
    options_.queue_depth = std::clamp(options.queue_depth, 1u, 4096u);
    options_.workers = std::clamp(options.workers, 1u, 256u);
    try {
        for (unsigned i = 0; i < options_.workers; ++i) workers_.push_back(std::make_unique<Worker>(*this));
    } catch (...) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
            wake_all();
        }
        workers_.clear();
        throw;
    }
}

Engine::~Engine() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
        wake_all();
    }
    workers_.clear();
}

void Engine::wake_all() {
    work_.notify_all();
    for (auto& worker : workers_) worker->poke();
}

uint64_t Engine::submit(const Transfer& transfer) {
    auto request = std::make_unique<Request>();
    request->transfer = transfer;
    request->transfer.memory_align = std::max(1u, transfer.memory_align);
    request->transfer.offset_align = std::max(1u, transfer.offset_align);
    // Direct I/O in units of more than a block is nothing to cut blocks from.
    if (options_.block_size % request->transfer.offset_align != 0) request->transfer.direct_fd = -1;
    request->span_count = plan_spans(request->transfer, request->spans);
    request->cursor = request->span_count ? request->spans[0].begin : 0;
    request->outcome.finished = request->span_count == 0;
    std::lock_guard<std::mutex> lock(mutex_);
    if (broken_ != 0) throw std::system_error(broken_, std::generic_category(), "the I/O engine failed earlier");
    const uint64_t id = next_id_++;
    ++statistics_.requests;
    if (!request->outcome.finished) {
        queue_.push_back(request.get());
        wake_all();
    }
    requests_.emplace(id, std::move(request));
    return id;
}

// Takes the next block of the oldest request; `io` stays empty when the block needs a bounce buffer.
bool Engine::claim(Chunk& c, bool may_bounce) {
    while (!queue_.empty() && queue_.front()->outcome.error != 0) {
        Request* r = queue_.front();
        queue_.pop_front();
        r->span = r->span_count;
        settle(*r);
    }
    if (queue_.empty()) return false;
    Request& r = *queue_.front();
    const Transfer& t = r.transfer;
    const Span& span = r.spans[r.span];
    char* user = t.memory + (r.cursor - t.offset);
    const bool bounced = span.direct && misaligned(user, t.memory_align);
    if (bounced && !may_bounce) return false;
    c = Chunk{};
    c.request = &r;
    c.stage = Stage::claimed;
    c.user = user;
    c.io = bounced ? nullptr : user;
    c.offset = r.cursor;
    c.length = static_cast<uint32_t>(std::min(options_.block_size, span.end - r.cursor));
    c.write = t.write;
    c.direct = span.direct;
    c.fd = span.direct ? t.direct_fd : t.plain_fd;
    c.file_slot = span.direct ? t.file_slot : -1;
    ++r.outstanding;
    r.cursor += c.length;
    if (r.cursor == span.end) {
        if (++r.span == r.span_count) queue_.pop_front();
        else r.cursor = r.spans[r.span].begin;
    }
    return true;
}

void Engine::finish(std::vector<Chunk*>& chunks) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Chunk* c : chunks) {
        Request& r = *c->request;
        r.outcome.moved += c->done;
        --r.outstanding;
        settle(r);
    }
}

// Under the lock: a request is finished when nothing is left to hand out and nothing is out. A failed one hands out
// no more.
void Engine::settle(Request& r) {
    if (r.outcome.error != 0 && r.span != r.span_count) {
        queue_.erase(std::remove(queue_.begin(), queue_.end(), &r), queue_.end());
        r.span = r.span_count;
    }
    if (r.span == r.span_count && r.outstanding == 0 && !r.outcome.finished) {
        r.outcome.finished = true;
        done_.notify_all();
    }
}

// A worker's ring has failed. Requests with blocks left to hand out fail; blocks that are out come back first,
// because the kernel may be writing to their memory (test_nvme_engine_failure.py).
void Engine::stop_handing_out(int error) {
    std::lock_guard<std::mutex> lock(mutex_);
    broken_ = error ? error : EIO;
    queue_.clear();
    for (auto& [id, r] : requests_) {
        if (r->span == r->span_count) continue;
        if (r->outcome.error == 0) {
            r->outcome.error = broken_;
            r->outcome.error_offset = r->cursor;
        }
        r->span = r->span_count;
        settle(*r);
    }
}

// Under the lock: a block did not arrive whole. The error nearest to the beginning of the file is the one that is told.
void Engine::fail_block(const Chunk& c, int error) {
    Outcome& outcome = c.request->outcome;
    if (outcome.error != 0 && c.offset + c.done >= outcome.error_offset) return;
    outcome.error = error;
    outcome.error_offset = c.offset + c.done;
}

// Blocks that the kernel did not give back in time. Their requests end, and say that their memory may still be
// written to.
void Engine::lose(const std::vector<Chunk*>& chunks, int error) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Chunk* c : chunks) {
        Request& r = *c->request;
        fail_block(*c, error);
        r.outcome.lost = true;
        --r.outstanding;
        settle(r);
    }
}

Outcome Engine::wait(uint64_t id, double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = requests_.find(id);
    if (found == requests_.end()) throw std::invalid_argument("no such request");
    Request& r = *found->second;
    auto finished = [&r] { return r.outcome.finished; };
    if (seconds < 0) done_.wait(lock, finished);
    else done_.wait_for(lock, std::chrono::duration<double>(seconds), finished);
    const Outcome outcome = r.outcome;
    if (outcome.finished) requests_.erase(id);
    return outcome;
}

bool Engine::poll(uint64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = requests_.find(id);
    return found == requests_.end() || found->second->outcome.finished;
}

int Engine::occupy(std::vector<Region>& table, const Region& region) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < table.size(); ++i) {
        if (table[i].generation != 0) continue;
        table[i] = region;
        table[i].generation = ++version_;
        wake_all();
        return static_cast<int>(i);
    }
    return -1;
}

void Engine::vacate(std::vector<Region>& table, int slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    table.at(static_cast<size_t>(slot)) = Region{};
    ++version_;
    wake_all();
}

int Engine::add_buffer(char* memory, uint64_t nbytes) {
    if (options_.kind != Kind::uring || nbytes == 0 || nbytes > kMaxBlock) return -1;
    return occupy(buffers_, Region{memory, nbytes, -1, 0});
}
void Engine::drop_buffer(int slot) { vacate(buffers_, slot); }
int Engine::add_file(int fd) { return options_.kind == Kind::uring ? occupy(files_, Region{nullptr, 0, fd, 0}) : -1; }
void Engine::drop_file(int slot) { vacate(files_, slot); }

void Engine::inject_results(const std::vector<int64_t>& results) {
    std::lock_guard<std::mutex> lock(mutex_);
    injected_.assign(results.begin(), results.end());
    has_injected_.store(!injected_.empty(), std::memory_order_release);
}

void Engine::inject_failure(int error, double drain_seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    options_.drain_seconds = drain_seconds;
    injected_failure_.store(error, std::memory_order_release);
    wake_all();
}

int64_t Engine::injected(int64_t result) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (injected_.empty()) return result;
    const int64_t plan = injected_.front();
    injected_.pop_front();
    has_injected_.store(!injected_.empty(), std::memory_order_release);
    return plan == 0 ? result : plan < 0 ? plan : std::min(plan, result);
}

std::string Engine::refused_registration() {
    std::lock_guard<std::mutex> lock(mutex_);
    return refused_;
}

std::string probe(Kind kind) {
    const int wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake < 0) return std::strerror(errno);
    std::string reason;
    try {
        if (kind == Kind::uring) make_uring(2, wake);
        if (kind == Kind::libaio) make_libaio(2, wake);
    } catch (const std::system_error& e) {
        reason = e.what();
        if (e.code().value() == EPERM)
            reason += " (forbidden by the container's seccomp profile or kernel.io_uring_disabled)";
        if (e.code().value() == EAGAIN) reason += " (fs.aio-max-nr is used up)";
    }
    close(wake);
    return reason;
}

}  // namespace dsx_nvme
