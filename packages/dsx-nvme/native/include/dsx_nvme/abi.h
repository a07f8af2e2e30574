// The kernel's interfaces as this package needs them: io_uring, native aio, statx. Declared here, not included from
// kernel headers, so that one source builds against any C library and the running kernel alone decides what is used.
#pragma once

#include <cstdint>
#include <sys/syscall.h>
#include <unistd.h>

namespace dsx_nvme::abi {

// ---- io_uring (include/uapi/linux/io_uring.h) ----
struct Sqe {
    uint8_t opcode;
    uint8_t flags;
    uint16_t ioprio;
    int32_t fd;
    uint64_t offset;
    uint64_t address;
    uint32_t length;
    uint32_t op_flags;  // poll mask for kOpPollAdd
    uint64_t user_data;
    uint16_t buffer_index;
    uint16_t personality;
    int32_t file_index;
    uint64_t pad[2];
};
static_assert(sizeof(Sqe) == 64, "layout of the submission entry");

struct Cqe {
    uint64_t user_data;
    int32_t result;
    uint32_t flags;
};

struct SqOffsets {
    uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
    uint64_t user_address;
};
struct CqOffsets {
    uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved;
    uint64_t user_address;
};
struct UringParams {
    uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, reserved[3];
    SqOffsets sq;
    CqOffsets cq;
};
static_assert(sizeof(UringParams) == 120, "layout of the set-up parameters");

struct ResourceRegister {
    uint32_t count, flags;
    uint64_t reserved, data, tags;
};
struct ResourceUpdate {
    uint32_t offset, reserved;
    uint64_t data, tags;
    uint32_t count, reserved2;
};
struct FilesUpdate {
    uint32_t offset, reserved;
    uint64_t fds;
};

enum : uint8_t { kOpReadFixed = 4, kOpWriteFixed = 5, kOpPollAdd = 6, kOpRead = 22, kOpWrite = 23 };
enum : uint32_t { kSetupCoopTaskrun = 1u << 8, kSetupSingleIssuer = 1u << 12, kSetupDeferTaskrun = 1u << 13 };
enum : uint32_t { kFeatureSingleMmap = 1u << 0, kFeatureNodrop = 1u << 1, kFeatureRwCurPos = 1u << 3 };
enum : uint32_t { kEnterGetEvents = 1u << 0 };
enum : uint32_t { kRegisterFilesUpdate = 6, kRegisterFiles2 = 13, kRegisterBuffers2 = 15, kRegisterBuffersUpdate = 16 };
enum : uint32_t { kResourceSparse = 1u << 0 };
enum : uint8_t { kSqeFixedFile = 1u << 0 };
constexpr uint64_t kOffSqRing = 0, kOffSqes = 0x10000000;

// The same numbers on every architecture that has them since Linux 5.1.
constexpr long kSysUringSetup = 425, kSysUringEnter = 426, kSysUringRegister = 427;

inline int uring_setup(unsigned entries, UringParams* p) {
    return static_cast<int>(syscall(kSysUringSetup, entries, p));
}
inline int uring_enter(int fd, unsigned submit, unsigned min_complete, unsigned flags) {
    return static_cast<int>(syscall(kSysUringEnter, fd, submit, min_complete, flags, nullptr, 0));
}
inline int uring_register(int fd, unsigned opcode, const void* arg, unsigned count) {
    return static_cast<int>(syscall(kSysUringRegister, fd, opcode, arg, count));
}

// ---- native aio (include/uapi/linux/aio_abi.h), little endian ----
struct Iocb {
    uint64_t data;
    uint32_t key;
    int32_t rw_flags;
    uint16_t opcode;
    int16_t priority;
    uint32_t fd;
    uint64_t buffer, nbytes;
    int64_t offset;
    uint64_t reserved;
    uint32_t flags, resfd;
};
static_assert(sizeof(Iocb) == 64, "layout of the control block");
struct IoEvent {
    uint64_t data, object;
    int64_t result, result2;
};
enum : uint16_t { kAioPread = 0, kAioPwrite = 1, kAioPoll = 5 };
using AioContext = unsigned long;

inline int io_setup(unsigned count, AioContext* c) { return static_cast<int>(syscall(SYS_io_setup, count, c)); }
inline int io_destroy(AioContext c) { return static_cast<int>(syscall(SYS_io_destroy, c)); }
inline int io_submit(AioContext c, long count, Iocb** list) {
    return static_cast<int>(syscall(SYS_io_submit, c, count, list));
}
inline int io_getevents(AioContext c, long least, long most, IoEvent* events, void* timeout) {
    return static_cast<int>(syscall(SYS_io_getevents, c, least, most, events, timeout));
}

// ---- statx: only the two fields about direct I/O are read ----
struct Statx {
    uint32_t mask, blksize;
    uint64_t attributes;
    uint32_t nlink, uid, gid;
    uint16_t mode, spare0;
    uint64_t ino, size, blocks, attributes_mask;
    uint64_t times[8];
    uint32_t rdev_major, rdev_minor, dev_major, dev_minor;
    uint64_t mount_id;
    uint32_t dio_mem_align, dio_offset_align;
    uint64_t spare[12];
};
static_assert(sizeof(Statx) == 256, "layout of statx");
constexpr uint32_t kStatxDioAlign = 0x2000;

}  // namespace dsx_nvme::abi
