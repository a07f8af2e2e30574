// io_uring by system calls. Each ring belongs to one thread; with new kernels completions are gathered only when it
// asks.
#include <poll.h>
#include <sys/mman.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>

#include "dsx_nvme/abi.h"
#include "dsx_nvme/backend.h"

namespace dsx_nvme {
namespace {

using namespace abi;

[[noreturn]] void fail(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

uint32_t load(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
void store(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }

class Uring final : public Backend {
  public:
    Uring(unsigned depth, int wake) : depth_(depth), wake_(wake) {
        setup();
        map();
        prepare_tables();
    }

    ~Uring() override {
        if (sqes_ != MAP_FAILED) munmap(sqes_, sqes_bytes_);
        if (ring_ != MAP_FAILED) munmap(ring_, ring_bytes_);
        if (fd_ >= 0) close(fd_);
    }

    unsigned depth() const override { return depth_; }

    void prepare(Chunk& c) override {
        const bool fixed = c.buffer_slot >= 0 && buffers_ok_;
        Sqe& sqe = next();
        ++chunks_;
        sqe.opcode = c.write ? (fixed ? kOpWriteFixed : kOpWrite) : (fixed ? kOpReadFixed : kOpRead);
        sqe.address = reinterpret_cast<uint64_t>(c.io + c.done);
        sqe.length = c.length - c.done;
        sqe.offset = c.offset + c.done;
        sqe.user_data = reinterpret_cast<uint64_t>(&c);
        sqe.buffer_index = fixed ? static_cast<uint16_t>(c.buffer_slot) : 0;
        const bool slot = c.file_slot >= 0 && files_ok_ && c.direct;
        sqe.fd = slot ? c.file_slot : c.fd;
        sqe.flags = slot ? kSqeFixedFile : 0;
    }

    void submit(unsigned least, std::vector<Completion>& done) override {
        if (least > 0 && !armed_) arm();
        while (true) {
            // Completions that an earlier call gathered count: waiting for more than there will be would never end.
            const unsigned missing = done.size() < least ? least - static_cast<unsigned>(done.size()) : 0;
            const int taken = uring_enter(fd_, pending_, missing, least > 0 ? uint32_t{kEnterGetEvents} : 0u);
            if (taken >= 0) pending_ -= static_cast<unsigned>(taken);
            const int error = taken < 0 ? errno : 0;
            reap(done);
            if (error == EAGAIN || error == EBUSY) {  // out of memory or completions for the moment
                if (pending_ == 0 || !done.empty()) return;
                continue;
            }
            if (error != 0 && error != EINTR) fail(error, "io_uring_enter");
            if (error == EINTR && done.empty() && !woken_) continue;
            if (pending_ == 0 && (least == 0 || !done.empty() || woken_)) break;
        }
        woken_ = false;
    }

    void drain(double seconds, std::vector<Completion>& done) override {
        draining_ = true;
        for (; pending_ > 0; --pending_) {  // the kernel takes entries in order: the last ones are still ours
            const Sqe& sqe = static_cast<Sqe*>(sqes_)[(*sq_tail_ - pending_) & sq_mask_];
            if (sqe.user_data == 0) continue;
            done.push_back({reinterpret_cast<Chunk*>(sqe.user_data), -ECANCELED});
            --chunks_;
        }
        const auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
        while (true) {
            // The call gathers completions (with DEFER_TASKRUN none appears without it). It may fail as the one did
            // that brought us here; the entries that the kernel posts by itself are seen all the same.
            uring_enter(fd_, 0, 0, kEnterGetEvents);
            reap(done);
            if (chunks_ == 0 || std::chrono::steady_clock::now() >= limit) return;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }

    int set_buffer(unsigned slot, char* memory, uint64_t nbytes) override {
        if (!buffers_ok_) return EOPNOTSUPP;
        const iovec piece{nbytes ? memory : nullptr, nbytes};
        const ResourceUpdate update{slot, 0, reinterpret_cast<uint64_t>(&piece), 0, 1, 0};
        return uring_register(fd_, kRegisterBuffersUpdate, &update, sizeof(update)) < 0 ? errno : 0;
    }

    int set_file(unsigned slot, int fd) override {
        if (!files_ok_) return EOPNOTSUPP;
        const FilesUpdate update{slot, 0, reinterpret_cast<uint64_t>(&fd)};
        return uring_register(fd_, kRegisterFilesUpdate, &update, 1) < 0 ? errno : 0;
    }

  private:
    void setup() {
        const uint32_t attempts[] = {kSetupSingleIssuer | kSetupDeferTaskrun, kSetupCoopTaskrun, 0};
        for (uint32_t flags : attempts) {
            params_ = UringParams{};
            params_.flags = flags;
            fd_ = uring_setup(depth_ + 1, &params_);
            if (fd_ >= 0 || errno != EINVAL) break;
        }
        if (fd_ < 0) fail(errno, "io_uring_setup");
        const uint32_t needed = kFeatureSingleMmap | kFeatureNodrop | kFeatureRwCurPos;
        if ((params_.features & needed) != needed) {
            close(fd_);
            fail(ENOSYS, "io_uring of this kernel is older than Linux 5.6");
        }
    }

    void map() {
        ring_bytes_ = std::max<size_t>(params_.sq.array + params_.sq_entries * sizeof(uint32_t),
                                       params_.cq.cqes + params_.cq_entries * sizeof(Cqe));
        sqes_bytes_ = params_.sq_entries * sizeof(Sqe);
        const int access = PROT_READ | PROT_WRITE, kind = MAP_SHARED | MAP_POPULATE;
        ring_ = mmap(nullptr, ring_bytes_, access, kind, fd_, kOffSqRing);
        if (ring_ != MAP_FAILED) sqes_ = mmap(nullptr, sqes_bytes_, access, kind, fd_, kOffSqes);
        if (ring_ == MAP_FAILED || sqes_ == MAP_FAILED) {
            const int error = errno;
            if (ring_ != MAP_FAILED) munmap(ring_, ring_bytes_);
            close(fd_);
            fail(error, "mapping the io_uring");
        }
        // A forked child has no thread to serve the ring; it must not see it either.
        madvise(ring_, ring_bytes_, MADV_DONTFORK);
        madvise(sqes_, sqes_bytes_, MADV_DONTFORK);
        char* base = static_cast<char*>(ring_);
        auto at = [base](uint32_t offset) { return reinterpret_cast<uint32_t*>(base + offset); };
        sq_tail_ = at(params_.sq.tail);
        sq_mask_ = *at(params_.sq.ring_mask);
        sq_array_ = at(params_.sq.array);
        cq_head_ = at(params_.cq.head);
        cq_tail_ = at(params_.cq.tail);
        cq_mask_ = *at(params_.cq.ring_mask);
        cqes_ = reinterpret_cast<Cqe*>(base + params_.cq.cqes);
    }

    void prepare_tables() {
        ResourceRegister sparse{kBounceSlot + 1, kResourceSparse, 0, 0, 0};
        buffers_ok_ = uring_register(fd_, kRegisterBuffers2, &sparse, sizeof(sparse)) >= 0;
        sparse.count = kFiles;
        files_ok_ = uring_register(fd_, kRegisterFiles2, &sparse, sizeof(sparse)) >= 0;
    }

    Sqe& next() {
        const uint32_t tail = *sq_tail_, index = tail & sq_mask_;
        Sqe& sqe = static_cast<Sqe*>(sqes_)[index];
        std::memset(&sqe, 0, sizeof(sqe));
        sq_array_[index] = index;
        store(sq_tail_, tail + 1);  // the kernel looks only inside io_uring_enter, called after the entry is filled
        ++pending_;
        return sqe;
    }

    void arm() {
        Sqe& sqe = next();
        sqe.opcode = kOpPollAdd;
        sqe.fd = wake_;
        sqe.op_flags = POLLIN;
        armed_ = true;
    }

    void reap(std::vector<Completion>& done) {
        uint32_t head = *cq_head_;
        const uint32_t tail = load(cq_tail_);
        for (; head != tail; ++head) {
            const Cqe& cqe = cqes_[head & cq_mask_];
            if (cqe.user_data != 0) {
                done.push_back({reinterpret_cast<Chunk*>(cqe.user_data), cqe.result});
                --chunks_;
                continue;
            }
            if (draining_) continue;
            uint64_t ignored;
            if (read(wake_, &ignored, sizeof(ignored)) < 0 && errno != EAGAIN) fail(errno, "reading the wake-up");
            armed_ = false;
            woken_ = true;
        }
        store(cq_head_, head);
    }

    unsigned depth_;
    int wake_, fd_ = -1;
    UringParams params_{};
    void* ring_ = MAP_FAILED;
    void* sqes_ = MAP_FAILED;
    size_t ring_bytes_ = 0, sqes_bytes_ = 0;
    uint32_t *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    uint32_t sq_mask_ = 0, cq_mask_ = 0;
    Cqe* cqes_ = nullptr;
    unsigned pending_ = 0;  // entries that the kernel has not taken yet
    unsigned chunks_ = 0;   // chunks whose completion has not been seen
    bool armed_ = false, woken_ = false, draining_ = false, buffers_ok_ = false, files_ok_ = false;
};

}  // namespace

std::unique_ptr<Backend> make_uring(unsigned depth, int wake) { return std::make_unique<Uring>(depth, wake); }

}  // namespace dsx_nvme
