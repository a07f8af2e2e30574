#include "dsx_nvme/worker.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <system_error>

namespace dsx_nvme {
namespace {

constexpr uint64_t kBounceBudget = 32u << 20;  // per worker
constexpr unsigned kMaxRetries = 256;          // of one block, without progress

unsigned bounce_count(const Options& o) {
    const uint64_t fit = kBounceBudget / o.block_size;
    return static_cast<unsigned>(std::clamp<uint64_t>(fit, 2, std::max(2u, o.queue_depth)));
}

}  // namespace

Worker::Worker(Engine& engine)
    : engine_(engine), bounce_count_(bounce_count(engine.options_)), buffers_(kRegions), files_(kFiles) {
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    // The backend belongs to the thread that uses it, so the thread makes it and reports.
    std::atomic<int> started{-1};
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are Python's; the new thread inherits the mask
    try {
        thread_ = std::thread([this, &started] { run(started); });
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        close(wake_);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    while (started.load(std::memory_order_acquire) < 0) std::this_thread::yield();
    if (const int error = started.load(std::memory_order_acquire)) {
        thread_.join();
        close(wake_);
        throw std::system_error(error, std::generic_category(), "starting an I/O worker");
    }
}

Worker::~Worker() {
    if (thread_.joinable()) thread_.join();
    close(wake_);
}

void Worker::poke() {
    if (!listening_) return;
    listening_ = false;
    const uint64_t one = 1;
    // EAGAIN means the counter is full of wake-ups already.
    if (write(wake_, &one, sizeof(one)) < 0 && errno != EAGAIN) std::terminate();
}

void Worker::run(std::atomic<int>& started) {
    try {
        const Options& o = engine_.options_;
        if (o.kind == Kind::uring) backend_ = make_uring(o.queue_depth, wake_);
        if (o.kind == Kind::libaio) backend_ = make_libaio(o.queue_depth, wake_);
        if (o.kind == Kind::threads) backend_ = make_sync();
        depth_ = backend_->depth();
        chunks_.resize(depth_);
        for (Chunk& c : chunks_) free_.push_back(&c);
    } catch (const std::system_error& e) {
        started.store(e.code().value() ? e.code().value() : EIO, std::memory_order_release);
        return;
    }
    started.store(0, std::memory_order_release);
    bool kernel_holds_memory = false;
    try {
        while (gather()) issue();
    } catch (const std::system_error& e) {
        kernel_holds_memory = wind_up(e.code().value());
    }
    backend_.reset();  // the ring goes before the memory it may know
    // Closing a ring does not wait for its requests: bounce buffers that the kernel still has are never unmapped.
    if (bounce_ != nullptr && !kernel_holds_memory) munmap(bounce_, bounce_bytes_);
}

// The backend failed. What the kernel gives back within the engine's time limit is taken in as usual; requests of the
// other blocks end as lost. True: there are such blocks.
bool Worker::wind_up(int error) {
    engine_.stop_handing_out(error);
    double seconds;
    {
        std::lock_guard<std::mutex> lock(engine_.mutex_);
        seconds = engine_.options_.drain_seconds;
    }
    backend_->drain(seconds, done_);
    for (const Completion& completion : done_) {
        Chunk& c = *completion.chunk;
        c.stage = Stage::claimed;
        if (completion.result > 0) c.done += static_cast<uint32_t>(completion.result);
    }
    std::vector<Chunk*> lost;
    for (Chunk& c : chunks_) {
        if (c.stage == Stage::with_backend) lost.push_back(&c);
        if (c.stage != Stage::claimed) continue;
        if (c.done < c.length) {
            std::lock_guard<std::mutex> lock(engine_.mutex_);
            engine_.fail_block(c, error);
        }
        retire(c);
    }
    engine_.finish(finished_);
    engine_.lose(lost, error);
    return !lost.empty();
}

// Claims what there is room for; sleeps when there is nothing to do. False: the engine stops and all is done.
bool Worker::gather() {
    std::unique_lock<std::mutex> lock(engine_.mutex_);
    listening_ = false;
    while (true) {
        if (version_ != engine_.version_) {
            const std::vector<Region> buffers = engine_.buffers_, files = engine_.files_;
            version_ = engine_.version_;
            lock.unlock();
            update_tables(buffers, files);
            lock.lock();
            continue;
        }
        size_t bounces = bounce_ == nullptr ? bounce_count_ : bounce_free_.size();
        while (!free_.empty() && engine_.claim(*free_.back(), bounces > 0)) {
            Chunk* c = free_.back();
            free_.pop_back();
            ready_.push_back(c);
            if (c->io == nullptr) --bounces;
        }
        if (!ready_.empty() || in_flight_ > 0) break;
        if (engine_.stopping_) return false;
        engine_.work_.wait(lock);
    }
    listening_ = !free_.empty();
    return true;
}

// Prepares what was claimed, lets the kernel work, and deals with what comes back.
void Worker::issue() {
    const bool one_by_one = engine_.options_.single_submit;
    for (Chunk* c : ready_) {
        const bool bounced = c->io == nullptr;
        if (bounced) {
            if (bounce_ == nullptr) make_bounces();
            c->bounce = bounce_free_.back();
            bounce_free_.pop_back();
            c->io = bounce_ + static_cast<size_t>(c->bounce) * engine_.options_.block_size;
            c->buffer_slot = bounce_slot_;
            if (c->write) std::memcpy(c->io, c->user, c->length);
            engine_.statistics_.bounced_bytes += c->length;
        } else {
            c->buffer_slot = slot_of(*c);
        }
        if (c->file_slot >= 0 && files_[static_cast<size_t>(c->file_slot)].generation == 0) c->file_slot = -1;
        if (c->direct && (c->buffer_slot >= 0 || c->file_slot >= 0)) ++engine_.statistics_.fixed_submissions;
        backend_->prepare(*c);
        c->stage = Stage::with_backend;
        ++in_flight_;
        ++engine_.statistics_.submissions;
        // A copied block goes out at once, so that the device works while the next one is copied.
        if (one_by_one || (bounced && c->write)) backend_->submit(0, done_);
    }
    ready_.clear();
    const bool batch = !engine_.options_.overlap && free_.empty();
    backend_->submit(batch ? std::max(1u, std::min(depth_ / 4, in_flight_)) : 1, done_);
    if (const int error = engine_.injected_failure_.exchange(0, std::memory_order_acq_rel))
        throw std::system_error(error, std::generic_category(), "injected by a test");
    // A chunk that is prepared again is with the backend again: completions are dealt with one list at a time.
    std::vector<Completion> done;
    done.swap(done_);
    for (const Completion& completion : done) complete(completion);
    done.clear();
    if (done_.empty()) done_.swap(done);
    if (!finished_.empty()) {
        engine_.finish(finished_);
        finished_.clear();
    }
}

void Worker::complete(const Completion& completion) {
    Chunk& c = *completion.chunk;
    int64_t result = completion.result;
    if (engine_.has_injected_.load(std::memory_order_acquire)) result = engine_.injected(result);
    if (needs_resubmit(c, result)) {
        backend_->prepare(c);
        ++engine_.statistics_.submissions;
        return;
    }
    --in_flight_;
    retire(c);
}

// Takes a result in. True: there is more to do for this chunk, and it is ready to be prepared again.
bool Worker::needs_resubmit(Chunk& c, int64_t result) {
    Statistics& stats = engine_.statistics_;
    auto give_up = [&](int error) {
        std::lock_guard<std::mutex> lock(engine_.mutex_);
        engine_.fail_block(c, error);
        return false;
    };
    if (result == -EINTR || result == -EAGAIN) {
        ++stats.retries;
        if (++c.retries > kMaxRetries) return give_up(static_cast<int>(-result));
        if (result == -EAGAIN) std::this_thread::yield();
        return true;
    }
    if ((result == -EINVAL || result == -EOPNOTSUPP) && c.direct) {
        ++stats.direct_refused;  // the file system promised direct I/O and does not do it
        fall_back_to_buffered(c);
        return true;
    }
    if (result < 0) return give_up(static_cast<int>(-result));
    if (result == 0) return give_up(c.write ? ENOSPC : kEndOfFile);
    c.retries = 0;
    c.done += static_cast<uint32_t>(result);
    (c.write ? stats.bytes_written : stats.bytes_read) += static_cast<uint64_t>(result);
    if (c.direct) stats.direct_bytes += static_cast<uint64_t>(result);
    if (c.done >= c.length) return false;
    ++stats.partial;
    // What is left no longer begins on a boundary: it goes through the page cache.
    if (c.direct && c.done % c.request->transfer.offset_align != 0) fall_back_to_buffered(c);
    return true;
}

void Worker::fall_back_to_buffered(Chunk& c) {
    c.direct = false;
    c.fd = c.request->transfer.plain_fd;
    c.file_slot = -1;
}

void Worker::retire(Chunk& c) {
    if (c.bounce >= 0) {
        if (!c.write) std::memcpy(c.user, c.io, c.done);
        bounce_free_.push_back(c.bounce);
        c.bounce = -1;
    }
    c.stage = Stage::idle;
    finished_.push_back(&c);
    free_.push_back(&c);
}

void Worker::make_bounces() {
    bounce_bytes_ = bounce_count_ * engine_.options_.block_size;
    void* memory = mmap(nullptr, bounce_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "bounce buffers");
    madvise(memory, bounce_bytes_, MADV_HUGEPAGE);  // fewer pages to pin; a refusal costs speed only
    bounce_ = static_cast<char*>(memory);
    for (unsigned i = 0; i < bounce_count_; ++i) bounce_free_.push_back(static_cast<int>(i));
    if (backend_->set_buffer(kBounceSlot, bounce_, bounce_bytes_) == 0) bounce_slot_ = static_cast<int>(kBounceSlot);
}

// Tells the ring what was announced and withdrawn since the last look.
void Worker::update_tables(const std::vector<Region>& buffers, const std::vector<Region>& files) {
    for (unsigned i = 0; i < kRegions; ++i) {
        if (buffers[i].generation == buffers_[i].generation) continue;
        if (buffers_[i].generation != 0) backend_->set_buffer(i, nullptr, 0);
        buffers_[i] = Region{};
        if (buffers[i].generation == 0) continue;
        const int error = backend_->set_buffer(i, buffers[i].memory, buffers[i].nbytes);
        if (error == 0) {
            buffers_[i] = buffers[i];
            ++engine_.statistics_.registered_buffers;
        } else {
            std::lock_guard<std::mutex> lock(engine_.mutex_);
            engine_.refused_ = std::string("registering a buffer: ") + std::strerror(error);
        }
    }
    for (unsigned i = 0; i < kFiles; ++i) {
        if (files[i].generation == files_[i].generation) continue;
        if (files_[i].generation != 0) backend_->set_file(i, -1);
        files_[i] = Region{};
        if (files[i].generation != 0 && backend_->set_file(i, files[i].fd) == 0) {
            files_[i] = files[i];
            ++engine_.statistics_.registered_files;
        }
    }
}

// The registered buffer that a chunk lies in, or -1.
int Worker::slot_of(const Chunk& c) const {
    for (unsigned i = 0; i < kRegions; ++i) {
        const Region& r = buffers_[i];
        if (r.generation != 0 && c.io >= r.memory && c.io + c.length <= r.memory + r.nbytes) return static_cast<int>(i);
    }
    return -1;
}

}  // namespace dsx_nvme
