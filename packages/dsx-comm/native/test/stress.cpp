// Ranks as threads of one process, so that the thread and address sanitizers see both sides of every byte that is
// shared. Built and run by tests/sanitize_shm.py; exit code 0: all results right, no finding.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "dsx_comm/mailbox.h"
#include "dsx_comm/queue.h"

using namespace dsx;

namespace {

[[noreturn]] void fail(const char* what, int rank, int round) {
    std::fprintf(stderr, "rank %d, round %d: %s is wrong\n", rank, round, what);
    std::_Exit(1);
}

void expect(bool right, const char* what, int rank, int round) {
    if (!right) fail(what, rank, round);
}

constexpr size_t LARGEST = 70'001;

// Symmetric memory: two allocations of a part per rank.
std::vector<std::vector<float>> pools[2];

void make_pools(int size) {
    for (auto& pool : pools)
        pool.assign(static_cast<size_t>(size), std::vector<float>(LARGEST * static_cast<size_t>(size) + 64));
}

// A call's data, filled with `value`: in ordinary memory or in either pool, at an offset. In half of the calls all
// ranks take the same, in the others each takes what it likes.
struct Place {
    std::vector<float> ordinary;
    Symmetric where;
    float* data;

    Place(const Group& g, int round, std::mt19937& random, size_t n, float value) {
        const bool alike = random() % 2 == 0;
        const auto common = static_cast<int>(random() % 3);
        std::mt19937 own(static_cast<unsigned>(1000 * round + g.rank()));
        const int kind = alike ? common : static_cast<int>(own() % 3);
        if (kind == 2) {
            ordinary.resize(n);
            data = ordinary.data();
        } else {
            where.memory = kind;
            where.offset = static_cast<int64_t>(own() % 4) * 64;
            for (auto& part : pools[kind]) where.bases.push_back(reinterpret_cast<char*>(part.data()));
            data = pools[kind][static_cast<size_t>(g.rank())].data() + where.offset / 4;
        }
        std::fill(data, data + n, value);
    }
};

void collectives(Group& g, int round, std::mt19937& random) {
    const int P = g.size(), me = g.rank();
    const int64_t numel = std::vector<int64_t>{0, 1, 1000, 5000, LARGEST}[random() % 5];
    const auto n = static_cast<size_t>(numel);
    const ReduceSpec sum{Dtype::f32, Reduce::sum, 1.0, false};
    const float total = static_cast<float>(P * (P + 1) / 2);
    std::vector<float> data(n, static_cast<float>(me + 1));
    const int root = static_cast<int>(random() % static_cast<unsigned>(P));
    switch (random() % 7) {
        case 0: {
            Place mine(g, round, random, n, static_cast<float>(me + 1));
            g.all_reduce(mine.data, numel, sum, mine.where, 30);
            for (size_t i = 0; i < n; i++) expect(mine.data[i] == total, "all_reduce", me, round);
            break;
        }
        case 1: {
            Place mine(g, round, random, n, static_cast<float>(me + 1));
            std::vector<float> out(n * static_cast<size_t>(P));
            std::vector<char*> places;
            for (int r = 0; r < P; r++)
                places.push_back(reinterpret_cast<char*>(out.data() + n * static_cast<size_t>(r)));
            g.all_gather(mine.data, places.data(), numel * 4, -1, mine.where, 30);
            for (size_t i = 0; i < out.size(); i++)
                expect(out[i] == static_cast<float>(i / n + 1), "all_gather", me, round);
            break;
        }
        case 2: {
            Place mine(g, round, random, n * static_cast<size_t>(P), static_cast<float>(me + 1));
            std::vector<float> out(n);
            std::vector<const char*> parts;
            for (int r = 0; r < P; r++) {
                float* part = mine.data + n * static_cast<size_t>(r);
                for (size_t i = 0; i < n; i++) part[i] += static_cast<float>(10 * r);
                parts.push_back(reinterpret_cast<char*>(part));
            }
            std::vector<int64_t> counts(static_cast<size_t>(P), numel);
            g.reduce_scatter(out.data(), parts.data(), counts.data(), sum, mine.where, 30);
            for (float v : out) expect(v == total + static_cast<float>(10 * P * me), "reduce_scatter", me, round);
            break;
        }
        case 3:
            g.broadcast(data.data(), numel * 4, -1, root, 30);
            for (float v : data) expect(v == static_cast<float>(root + 1), "broadcast", me, round);
            break;
        case 4:
            g.reduce(data.data(), numel, root, sum, 30);
            if (me == root)
                for (float v : data) expect(v == total, "reduce", me, round);
            break;
        case 5: {
            std::vector<float> out(n * static_cast<size_t>(P));
            std::vector<const char*> from(static_cast<size_t>(P), reinterpret_cast<char*>(data.data()));
            std::vector<char*> to;
            for (int r = 0; r < P; r++) to.push_back(reinterpret_cast<char*>(out.data() + n * static_cast<size_t>(r)));
            std::vector<int64_t> bytes(static_cast<size_t>(P), numel * 4);
            g.all_to_all(from.data(), bytes.data(), to.data(), bytes.data(), -1, 30);
            for (size_t i = 0; i < out.size(); i++)
                expect(out[i] == static_cast<float>(i / n + 1), "all_to_all", me, round);
            break;
        }
        default: g.barrier(30);
    }
}

void transfers(Group& g, Mailboxes& boxes, int round) {
    const int P = g.size(), me = g.rank(), to = (me + 1) % P, of = (me + P - 1) % P;
    std::vector<float> a(70'000, static_cast<float>(me)), b(70'000), c(10, static_cast<float>(-me)), d(10);
    auto first = boxes.send(to, a.data(), 280'000, 1, 0, {});
    auto second = boxes.send(to, c.data(), 40, 2, 0, {});
    auto late = boxes.receive(of, d.data(), 40, 2, 0, {});  // before the one that was sent first
    auto early = boxes.receive(-1, b.data(), 280'000, 1, 0, {});
    for (auto& t : {late, early, first, second}) boxes.wait(t, 30);
    expect(b[69'999] == static_cast<float>(of) && d[9] == static_cast<float>(-of), "a transfer", me, round);
}

void rank_main(void* memory, int rank, int size, int rounds) {
    Settings s;
    s.stores = rank % 2 ? StorePolicy::Way::non_temporal : StorePolicy::Way::measured;
    s.rank = rank;
    for (int r = 0; r < size; r++) s.names.push_back(r);
    s.yield_us = 30;
    Group g(memory, s);
    Mailboxes boxes(g);
    Queue queue;
    std::thread server([&] { queue.serve(); });
    std::thread mover([&] { boxes.background(); });
    std::mt19937 random(7);  // the same on all ranks
    for (int round = 0; round < rounds; round++) {
        if (random() % 4 == 0) {
            auto item = queue.submit([&, round] {
                std::mt19937 same(static_cast<unsigned>(round));
                collectives(g, round, same);
            });
            transfers(g, boxes, round);
            queue.wait(item);
        } else {
            queue.run_now([&, round] {
                std::mt19937 same(static_cast<unsigned>(round));
                collectives(g, round, same);
            });
        }
    }
    g.barrier(30);
    queue.stop();
    boxes.stop();
    server.join();
    mover.join();
}

}  // namespace

int main(int argc, char** argv) {
    const int size = argc > 1 ? std::atoi(argv[1]) : 3, rounds = argc > 2 ? std::atoi(argv[2]) : 300;
    const Layout layout{size, static_cast<size_t>(size) * 8192, 8192, 65536};
    const int fd = memfd_create("dsx-comm-stress", 0);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(layout.total())) != 0) return 2;
    void* memory = mmap(nullptr, layout.total(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return 2;
    Group::format(memory, layout, 1, 2);
    make_pools(size);
    std::vector<std::thread> ranks;
    for (int r = 0; r < size; r++) ranks.emplace_back(rank_main, memory, r, size, rounds);
    for (auto& t : ranks) t.join();
    std::printf("%d ranks, %d rounds: right\n", size, rounds);
    return 0;
}
