// Ranges on threads: torch's own OpenMP pool when the process has one, else threads of ours.
//
// torch loads its libgomp with global visibility, so GOMP_parallel is found by name; linking libgomp ourselves could
// put a second pool into the process. The caller says how many threads (torch.get_num_threads()).
#pragma once
#include <dlfcn.h>

#include <exception>
#include <thread>
#include <vector>

namespace dsx_native {

struct Gomp {
    using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
    using Number = int (*)();
    Parallel parallel = nullptr;
    Number thread = nullptr, count = nullptr;

    static const Gomp& get() {
        static const Gomp found = [] {  // first parallel call: torch is loaded by then
            Gomp g;
            g.parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
            g.thread = reinterpret_cast<Number>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
            g.count = reinterpret_cast<Number>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"));
            return g;
        }();
        return found;
    }
    bool usable() const { return parallel && thread && count; }
};

// body(part, parts) for every part; the parts may run one after another.
template <class Body> void on_threads(int threads, bool own_threads, const Body& body) {
    if (threads <= 1) return body(0, 1);
    const Gomp& gomp = Gomp::get();
    if (gomp.usable() && !own_threads) {
        struct Context {
            const Body* body;
        } context{&body};
        gomp.parallel(
            [](void* raw) {
                const Gomp& g = Gomp::get();
                (*static_cast<Context*>(raw)->body)(g.thread(), g.count());
            },
            &context, static_cast<unsigned>(threads), 0);
        return;
    }
    std::vector<std::thread> others;
    int started = 1;
    try {
        for (; started < threads; ++started) others.emplace_back([&body, started, threads] { body(started, threads); });
    } catch (const std::exception&) {  // no more threads to be had: the parts that got none run here
        for (int part = started; part < threads; ++part) body(part, threads);
    }
    body(0, threads);
    for (auto& t : others) t.join();
}

}  // namespace dsx_native
