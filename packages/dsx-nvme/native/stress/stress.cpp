// Drives the engine from several threads without Python, to be run under the thread sanitizer:
//     stress <folder>     exit code 0 when every byte came back right
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "dsx_nvme/engine.h"
#include "dsx_nvme/system.h"

using namespace dsx_nvme;

namespace {

struct File {
    std::string path;
    int plain, direct;
    uint32_t memory_align = 1, offset_align = 1;
    explicit File(std::string p) : path(std::move(p)) {
        plain = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        direct = open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
        if (direct >= 0) {
            const auto found = direct_alignment(direct);
            memory_align = found.first ? found.first : 4096;
            offset_align = found.second ? found.second : 4096;
        }
    }
    ~File() {
        close(plain);
        if (direct >= 0) close(direct);
        unlink(path.c_str());
    }
    Transfer transfer(bool write, char* memory, uint64_t n, uint64_t offset) const {
        Transfer t;
        t.write = write;
        t.direct_fd = direct;
        t.plain_fd = plain;
        t.memory = memory;
        t.nbytes = n;
        t.offset = offset;
        t.memory_align = memory_align;
        t.offset_align = offset_align;
        return t;
    }
};

bool work(Engine& engine, const File& file, unsigned number) {
    constexpr uint64_t kStride = 600000;
    std::vector<char> data(kStride), back(kStride);
    for (unsigned step = 0; step < 12; ++step) {
        const uint64_t n = 1 + (number * 7919 + step * 104729) % (kStride - 1), offset = number * kStride + step;
        for (uint64_t i = 0; i < n; ++i) data[i] = static_cast<char>(i * 31 + number + step);
        const uint64_t id = engine.submit(file.transfer(true, data.data(), n, offset));
        Outcome o;
        do o = engine.wait(id, 0.01);
        while (!o.finished);
        if (o.error || o.moved != n) return false;
        const int slot = engine.add_buffer(back.data(), kStride);
        const uint64_t again = engine.submit(file.transfer(false, back.data(), n, offset));
        while (!engine.poll(again)) std::this_thread::yield();
        o = engine.wait(again, -1);
        if (slot >= 0) engine.drop_buffer(slot);
        if (o.error || o.moved != n || std::memcmp(data.data(), back.data(), n) != 0) return false;
        if (step == 5) engine.inject_results({-EINTR, 512, -EAGAIN, 0, 100});
    }
    return true;
}

// An engine whose ring fails while several threads wait for requests: every request ends, none of them is lost.
bool fail(const Options& options, const File& file) {
    constexpr uint64_t kBytes = 1 << 20;
    Engine engine(options);
    std::vector<std::vector<char>> memory(4, std::vector<char>(kBytes));
    std::vector<uint64_t> ids;
    for (auto& piece : memory) ids.push_back(engine.submit(file.transfer(true, piece.data(), kBytes, 0)));
    engine.inject_failure(EIO, 60);
    bool right[4] = {};
    std::vector<std::thread> threads;
    for (size_t i = 0; i < ids.size(); ++i) {
        threads.emplace_back([&, i] {
            const Outcome o = engine.wait(ids[i], -1);
            right[i] = o.finished && !o.lost && (o.error == EIO || (o.error == 0 && o.moved == kBytes));
        });
    }
    for (std::thread& t : threads) t.join();
    return right[0] && right[1] && right[2] && right[3];
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) return 2;
    const struct {
        Kind kind;
        const char* name;
    } kinds[] = {{Kind::uring, "io_uring"}, {Kind::libaio, "libaio"}, {Kind::threads, "threads"}};
    bool all_right = true;
    for (const auto& kind : kinds) {
        const std::string refused = probe(kind.kind);
        if (!refused.empty()) {
            std::printf("%s: left out, %s\n", kind.name, refused.c_str());
            continue;
        }
        const File file(std::string(argv[1]) + "/stress-" + kind.name);
        Options o;
        o.kind = kind.kind;
        o.block_size = 1 << 16;
        o.queue_depth = 4;
        o.workers = 3;
        o.overlap = false;
        bool right[4] = {};
        {
            Engine engine(o);
            std::vector<std::thread> threads;
            for (unsigned i = 0; i < 4; ++i) threads.emplace_back([&, i] { right[i] = work(engine, file, i); });
            for (std::thread& t : threads) t.join();
            // And an engine that goes while requests are in flight.
            static char last[1 << 20];
            engine.submit(file.transfer(true, last, sizeof(last), 0));
        }
        bool good = right[0] && right[1] && right[2] && right[3];
        for (int i = 0; i < 20; ++i) good = good && fail(o, file);
        std::printf("%s: %s\n", kind.name, good ? "right" : "WRONG");
        all_right = all_right && good;
    }
    return all_right ? 0 : 1;
}
