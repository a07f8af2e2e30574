// Native Linux aio by system calls (what libaio wraps), and the backend that does without: pread and pwrite in the
// worker.
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <ctime>
#include <system_error>

#include "dsx_nvme/abi.h"
#include "dsx_nvme/backend.h"

namespace dsx_nvme {
namespace {

using namespace abi;

// One pread or pwrite of what is left of a chunk: bytes, or a negative errno.
int64_t transfer_now(const Chunk& c) {
    const auto offset = static_cast<off_t>(c.offset + c.done);
    ssize_t count;
    do {
        count = c.write ? pwrite(c.fd, c.io + c.done, c.length - c.done, offset)
                        : pread(c.fd, c.io + c.done, c.length - c.done, offset);
    } while (count < 0 && errno == EINTR);
    return count < 0 ? -errno : count;
}

class Libaio final : public Backend {
  public:
    Libaio(unsigned depth, int wake) : depth_(depth), wake_(wake), blocks_(depth + 1), events_(depth + 1) {
        if (io_setup(depth + 1, &context_) < 0) throw std::system_error(errno, std::generic_category(), "io_setup");
        for (Iocb& block : blocks_) free_.push_back(&block);
    }
    ~Libaio() override { io_destroy(context_); }

    unsigned depth() const override { return depth_; }

    void prepare(Chunk& c) override {
        Iocb& b = *free_.back();
        free_.pop_back();
        b = Iocb{};
        b.data = reinterpret_cast<uint64_t>(&c);
        b.opcode = c.write ? kAioPwrite : kAioPread;
        b.fd = static_cast<uint32_t>(c.fd);
        b.buffer = reinterpret_cast<uint64_t>(c.io + c.done);
        b.nbytes = c.length - c.done;
        b.offset = static_cast<int64_t>(c.offset + c.done);
        pending_.push_back(&b);
    }

    void submit(unsigned least, std::vector<Completion>& done) override {
        if (least > 0 && !armed_ && poll_works_) arm();
        while (!pending_.empty()) {
            const int taken = io_submit(context_, static_cast<long>(pending_.size()), pending_.data());
            if (taken > 0) {
                pending_.erase(pending_.begin(), pending_.begin() + taken);
                with_kernel_ += static_cast<unsigned>(taken);
            } else if (taken < 0 && errno == EAGAIN) {  // the kernel's table is full: make room first
                if (with_kernel_ == 0) refuse(done, EAGAIN);
                else reap(1, done);
            } else if (taken < 0 && errno != EINTR) {
                refuse(done, errno);
            }
        }
        if (least > 0 && done.size() < least && with_kernel_ > 0)
            reap(least - static_cast<unsigned>(done.size()), done);
    }

    void drain(double seconds, std::vector<Completion>& done) override {
        for (Iocb* b : pending_) {
            if (b->data != 0) done.push_back({reinterpret_cast<Chunk*>(b->data), -ECANCELED});
            else armed_ = false;
        }
        pending_.clear();
        const auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
        while (with_kernel_ > (armed_ ? 1u : 0u)) {
            timespec slice{0, 1000000};
            const int count = io_getevents(context_, 1, static_cast<long>(events_.size()), events_.data(), &slice);
            if (count < 0 && errno != EINTR) return;
            for (int i = 0; i < count; ++i) {
                --with_kernel_;
                const IoEvent& e = events_[static_cast<size_t>(i)];
                if (e.data == 0) armed_ = false;
                else done.push_back({reinterpret_cast<Chunk*>(e.data), e.result});
            }
            if (std::chrono::steady_clock::now() >= limit) return;
        }
    }

    int set_buffer(unsigned, char*, uint64_t) override { return EOPNOTSUPP; }
    int set_file(unsigned, int) override { return EOPNOTSUPP; }

  private:
    void arm() {
        Iocb& b = *free_.back();
        free_.pop_back();
        b = Iocb{};
        b.opcode = kAioPoll;
        b.fd = static_cast<uint32_t>(wake_);
        b.buffer = POLLIN;
        pending_.push_back(&b);
        armed_ = true;
    }

    // The kernel refused the first queued control block. It may still take the others.
    void refuse(std::vector<Completion>& done, int error) {
        Iocb* b = pending_.front();
        pending_.erase(pending_.begin());
        free_.push_back(b);
        if (b->data == 0) {
            poll_works_ = armed_ = false;  // before Linux 4.19: a time limit serves instead
            return;
        }
        Chunk* c = reinterpret_cast<Chunk*>(b->data);
        // Files without asynchronous operations (devices, /proc) answer EINVAL: they are served at once.
        const bool at_once = error == EINVAL && !c->direct;
        done.push_back({c, at_once ? transfer_now(*c) : -error});
    }

    void reap(unsigned least, std::vector<Completion>& done) {
        timespec limit{0, 1000000};
        int count;
        do {
            count = io_getevents(context_, least, static_cast<long>(events_.size()), events_.data(),
                                 poll_works_ ? nullptr : &limit);
        } while (count < 0 && errno == EINTR);
        if (count < 0) throw std::system_error(errno, std::generic_category(), "io_getevents");
        with_kernel_ -= static_cast<unsigned>(count);
        for (int i = 0; i < count; ++i) {
            const IoEvent& e = events_[static_cast<size_t>(i)];
            free_.push_back(reinterpret_cast<Iocb*>(e.object));
            if (e.data != 0) {
                done.push_back({reinterpret_cast<Chunk*>(e.data), e.result});
                continue;
            }
            uint64_t ignored;
            if (read(wake_, &ignored, sizeof(ignored)) < 0 && errno != EAGAIN)
                throw std::system_error(errno, std::generic_category(), "reading the wake-up");
            armed_ = false;
        }
    }

    unsigned depth_;
    int wake_;
    AioContext context_ = 0;
    std::vector<Iocb> blocks_;
    std::vector<IoEvent> events_;
    std::vector<Iocb*> free_, pending_;
    unsigned with_kernel_ = 0;
    bool armed_ = false, poll_works_ = true;
};

class Sync final : public Backend {
  public:
    unsigned depth() const override { return 1; }
    void prepare(Chunk& c) override { chunk_ = &c; }
    void submit(unsigned, std::vector<Completion>& done) override {
        if (chunk_ == nullptr) return;
        done.push_back({chunk_, transfer_now(*chunk_)});
        chunk_ = nullptr;
    }
    void drain(double, std::vector<Completion>& done) override {
        if (chunk_ != nullptr) done.push_back({chunk_, -ECANCELED});
        chunk_ = nullptr;
    }
    int set_buffer(unsigned, char*, uint64_t) override { return EOPNOTSUPP; }
    int set_file(unsigned, int) override { return EOPNOTSUPP; }

  private:
    Chunk* chunk_ = nullptr;
};

}  // namespace

std::unique_ptr<Backend> make_libaio(unsigned depth, int wake) { return std::make_unique<Libaio>(depth, wake); }
std::unique_ptr<Backend> make_sync() { return std::make_unique<Sync>(); }

}  // namespace dsx_nvme
