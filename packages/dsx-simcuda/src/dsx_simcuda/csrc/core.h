// The simulated device without torch: memory, streams, events, clocks. How it works: ../../README.md
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace sim {

using Clock = std::vector<uint64_t>;  // by dense stream number

struct Span {  // bytes an operation touches (device addresses)
    uintptr_t lo, hi;
    bool write;
};

struct Job {
    std::function<void()> run;
    std::string name;
    double at;
};

struct Stream {
    int dev = 0, id = 0, number = 0;
    std::mutex m;
    std::condition_variable work, done;
    std::deque<Job> queue;
    uint64_t submitted = 0, completed = 0, demanded = 0;
    std::string running;
    Clock clock;
    std::mt19937_64 dice;
    std::thread worker;
    uint64_t push(std::string name, std::function<void()> run, const std::vector<Span>& spans = {});
    void wait(uint64_t until);  // blocks the calling thread
    bool finished(uint64_t until);
    void loop();
};

struct Mark {  // one recording of an event
    Stream* stream = nullptr;
    uint64_t until = 0;
    Clock clock;
    std::shared_ptr<double> time;
};

struct Event {
    std::mutex m;
    std::shared_ptr<Mark> mark;
};

struct Options {
    int devices = 1;
    size_t bytes = size_t(2) << 30;
    // 0 eager, 1 random delays, 2 lazy (a stream runs only when something waits for it, or after cap_ms),
    // 3 side streams slow, 4 default stream slow
    int mode = 1;
    double delay_us = 300;  // mean random delay (mode 1), with probability 1/4
    double cap_ms = 30;     // mode 2
    double gbps = 0;        // 0: not paced
    uint64_t seed = 0;
    int poison = 1;
    int races = 2;  // 1: two operations' accesses; 2: also memory handed out while another stream still uses it
    double hang_s = 60;
    // 1: report also memory freed while another stream's use of it is not ordered before (legal on CUDA)
    int strict_free = 0;
    bool one_collective = false;
};

Options& options();

double now();
Stream* stream(int dev, int id);
Stream* current(int dev);
Stream* exchange(Stream* s);
int from_pool(bool high);
int device_now();
int set_device(int dev);

void record(Event* e, Stream* s);
void block(Event* e, Stream* s);
bool query(Event* e);
void synchronize(Event* e);
void synchronize(Stream* s);
void synchronize_device(int dev);

// every time the host waits for the device is counted (and told to a listener: Python's stack)
void host_sync(const char* why);
uint64_t host_syncs();
void listen(void (*fn)(const char* kind, const char* text));
void report(const char* kind, const std::string& text);  // a race, a hang, a wrong use
void raise_device_errors();                              // throws std::runtime_error if a job failed
std::string races_text();

// memory
void* allocate(size_t n, int dev, Stream* s);  // nullptr: out of memory
void release(void* p);
void record_use(void* p, Stream* s);
void* alias(const void* p);    // the address at which workers see device memory
int device_of(const void* p);  // -1: not device memory
size_t block_bytes(const void* p);
void empty_cache(int dev);

struct Stats {
    size_t allocated, peak, reserved, peak_reserved, total;
    uint64_t mallocs, frees, retries, ooms;
};

Stats stats(int dev);
void reset_peak(int dev);
void set_limit(int dev, size_t bytes);

void* pinned_allocate(size_t n);
void pinned_release(void* p);
bool pinned(const void* p);
void pinned_register(void* p, size_t n);
void pinned_unregister(void* p);
void pinned_use(const void* p, Stream* s, uint64_t until);
void paced(size_t bytes);

}  // namespace sim
