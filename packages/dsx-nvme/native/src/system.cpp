#include "dsx_nvme/system.h"

#include <fcntl.h>

#include <array>
#include <cerrno>
#include <cstring>

#ifdef DSX_X86
#include <immintrin.h>
#endif

#include "dsx_nvme/abi.h"

namespace dsx_nvme {

std::pair<uint32_t, uint32_t> direct_alignment(int fd) {
#ifdef SYS_statx
    abi::Statx info{};
    if (syscall(SYS_statx, fd, "", 0x1000 /* AT_EMPTY_PATH */, abi::kStatxDioAlign, &info) == 0 &&
        (info.mask & abi::kStatxDioAlign))
        return {info.dio_mem_align, info.dio_offset_align};
#else
    (void)fd;
#endif
    return {0, 0};
}

int reserve(int fd, uint64_t offset, uint64_t nbytes) {
    int result;
    do {
        result = fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(nbytes));
    } while (result < 0 && errno == EINTR);
    return result < 0 ? errno : 0;
}

int punch(int fd, uint64_t offset, uint64_t nbytes) {
    const int mode = 0x02 /* FALLOC_FL_PUNCH_HOLE */ | 0x01 /* FALLOC_FL_KEEP_SIZE */;
    int result;
    do {
        result = fallocate(fd, mode, static_cast<off_t>(offset), static_cast<off_t>(nbytes));
    } while (result < 0 && errno == EINTR);
    return result < 0 ? errno : 0;
}

namespace {

// Eight tables of 256: eight bytes per step without special instructions.
using Tables = std::array<std::array<uint32_t, 256>, 8>;
Tables make_tables() {
    Tables t{};
    for (uint32_t i = 0; i < 256; ++i) {
        uint32_t c = i;
        for (int k = 0; k < 8; ++k) c = (c & 1) ? 0xEDB88320u ^ (c >> 1) : c >> 1;
        t[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; ++i)
        for (size_t k = 1; k < 8; ++k) t[k][i] = t[0][t[k - 1][i] & 0xFF] ^ (t[k - 1][i] >> 8);
    return t;
}

uint32_t crc_tables(uint32_t crc, const unsigned char* p, size_t n) {
    static const Tables t = make_tables();
    for (; n >= 8; n -= 8, p += 8) {
        uint32_t low, high;
        std::memcpy(&low, p, 4);
        std::memcpy(&high, p + 4, 4);
        low ^= crc;  // little endian, as all of this package's targets
        crc = t[7][low & 0xFF] ^ t[6][(low >> 8) & 0xFF] ^ t[5][(low >> 16) & 0xFF] ^ t[4][low >> 24] ^
              t[3][high & 0xFF] ^ t[2][(high >> 8) & 0xFF] ^ t[1][(high >> 16) & 0xFF] ^ t[0][high >> 24];
    }
    for (; n > 0; --n, ++p) crc = t[0][(crc ^ *p) & 0xFF] ^ (crc >> 8);
    return crc;
}

#ifdef DSX_X86
// Folding by carry-less multiplication: Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
// Instruction", Intel, 2009; constants of the bit-reflected polynomial 0xEDB88320. `n` is a multiple of 16, at least
// 64.
__attribute__((target("pclmul,sse4.1"))) uint32_t crc_folded(uint32_t crc, const unsigned char* p, size_t n) {
    const __m128i by64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), by16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    auto at = [&p](size_t i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + i); };
    auto fold = [](__m128i x, __m128i k, __m128i y) __attribute__((target("pclmul,sse4.1"))) {
        return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), y);
    };
    __m128i a = _mm_xor_si128(at(0), _mm_cvtsi32_si128(static_cast<int>(crc))), b = at(1), c = at(2), d = at(3);
    for (p += 64, n -= 64; n >= 64; p += 64, n -= 64) {
        a = fold(a, by64, at(0));
        b = fold(b, by64, at(1));
        c = fold(c, by64, at(2));
        d = fold(d, by64, at(3));
    }
    a = fold(fold(fold(a, by16, b), by16, c), by16, d);
    for (; n >= 16; p += 16, n -= 16) a = fold(a, by16, at(0));
    // 128 bits to 64, to 32, then Barrett's reduction.
    const __m128i low32 = _mm_setr_epi32(-1, 0, -1, 0), last = _mm_set_epi64x(0, 0x0163cd6124),
                  barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    __m128i x = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by16, 0x10));
    x = _mm_xor_si128(_mm_srli_si128(x, 4), _mm_clmulepi64_si128(_mm_and_si128(x, low32), last, 0x00));
    __m128i y = _mm_clmulepi64_si128(_mm_and_si128(x, low32), barrett, 0x10);
    y = _mm_clmulepi64_si128(_mm_and_si128(y, low32), barrett, 0x00);
    return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(x, y), 1));
}
#endif

}  // namespace

uint32_t crc32(uint32_t seed, const void* data, size_t nbytes) {
    const auto* p = static_cast<const unsigned char*>(data);
    uint32_t crc = ~seed;
#ifdef DSX_X86
    static const bool folds = [] {
        __builtin_cpu_init();
        return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
    }();
    if (folds && nbytes >= 64) {
        const size_t body = nbytes / 16 * 16;
        crc = crc_folded(crc, p, body);
        p += body;
        nbytes -= body;
    }
#endif
    return ~crc_tables(crc, p, nbytes);
}

}  // namespace dsx_nvme
