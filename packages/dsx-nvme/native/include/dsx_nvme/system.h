// Small things that Python's standard library does not offer: alignment of direct I/O, reserving blocks, a fast CRC-32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace dsx_nvme {

// What direct I/O on an open file asks of addresses and of offsets; {0, 0} when the kernel does not say.
std::pair<uint32_t, uint32_t> direct_alignment(int fd);
// Reserves blocks and extends the file; returns an errno, 0 when done.
int reserve(int fd, uint64_t offset, uint64_t nbytes);
// Gives the blocks of a range back to the file system; the range reads as zeros, the file keeps its size. Returns an
// errno.
int punch(int fd, uint64_t offset, uint64_t nbytes);
// zlib's crc32.
uint32_t crc32(uint32_t seed, const void* data, size_t nbytes);

}  // namespace dsx_nvme
