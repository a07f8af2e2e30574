// The simulated device without torch: streams and events, the order between them, memory, pinned memory, reports.
//
// Locks, outermost first: order_lock() (clocks, intervals, the allocator), the pinned lock, a stream's own mutex, the
// lock of the reports. Python's global lock is taken only while none of them is held: by CallSite and by deliver().
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

// ---------------------------------------------------------------- options
enum Mode { kEager, kRandom, kLazy, kSlowSide, kSlowDefault };

struct Options {
    int devices = 1;
    size_t bytes = size_t(2) << 30;
    int mode = kRandom;
    double delay_us = 300;  // mean delay of kRandom (with probability 1/4), and the delay of the slow modes
    double cap_ms = 30;     // kLazy
    double gbps = 0;        // pace of copies between host and device; 0: not paced
    uint64_t seed = 0;
    bool poison = true;
    int races = 2;  // 1: two operations' accesses; 2: also memory handed out while another stream still uses it
    double hang_s = 60;
    bool strict_free = false;  // also report memory freed while another stream's use of it is not ordered before
    bool one_collective = false;
    int sync_debug = 0;  // torch.cuda.set_sync_debug_mode: 1 warns, 2 raises
};

Options& options();
bool set_option(const std::string& name, double value);  // false: there is none of this name
double now();

// ---------------------------------------------------------------- where an operation was launched
struct Place {
    int stack = 0;         // the Python stack (see stacks.cpp); 0: none
    std::string backward;  // the node that autograd runs, if it does
    int forward = 0;       // the stack of the forward operation that made the node
};

// Made at the entry of every public operation: the outermost one of a thread finds the place, and delivers at its end
// what was reported meanwhile.
class CallSite {
  public:
    CallSite();
    ~CallSite();
    CallSite(const CallSite&) = delete;
    static const Place& here();
};

int capture_stack();                          // 0: the calling thread runs no Python
const std::string& thread_name();             // Python's name of the calling thread, or the system's
void set_backward_probe(void (*fn)(Place&));  // fills in what autograd does
void stop_stacks();                           // Python ends: no stack is taken from here on
// While it lives, other threads may run Python, if the calling thread had Python's lock.
class PythonLockReleased {
  public:
    PythonLockReleased();
    ~PythonLockReleased();
    PythonLockReleased(const PythonLockReleased&) = delete;
    PythonLockReleased& operator=(const PythonLockReleased&) = delete;

  private:
    void* state_;  // PyThreadState*; null: there was nothing to release
};
void dump_python_stacks();  // of all threads, to stderr, without Python's lock

// ---------------------------------------------------------------- launches and their order
using Clock = std::vector<uint64_t>;  // by stream number

struct Geometry {  // a tensor whose bytes have gaps
    std::vector<int64_t> sizes, strides;
    size_t item;
};

struct Span {  // bytes that an operation touches
    uintptr_t lo, hi;
    bool write;
    std::shared_ptr<const Geometry> gaps;  // null: all bytes between
};

enum class Kind { kWork, kRecord, kWait, kNewMemory, kFree };

struct Launch {  // one operation as it was put on a stream
    uint64_t id = 0;
    int stream = 0;
    uint64_t tick = 0;
    Kind kind = Kind::kWork;
    std::string name;
    Place place;
    int other_stream = -1;  // kWait: the stream of the event
    uint64_t other_tick = 0;
};

using LaunchPtr = std::shared_ptr<const Launch>;

struct Job {
    std::function<void()> run;
    std::string name;
    double at;
};

struct Stream {
    int dev = 0, id = 0, number = 0;
    std::string name;
    int made_at = 0;  // Python stack
    std::mutex m;
    std::condition_variable work, done;
    std::deque<Job> queue;
    uint64_t submitted = 0, completed = 0, demanded = 0;
    std::string running;
    Clock clock;
    LaunchPtr last_wait;  // for the report of a wait for another device's stream
    std::mt19937_64 dice;
    uint64_t push(std::string name, std::function<void()> run, const std::vector<Span>& spans = {},
                  Kind kind = Kind::kWork);
    void wait(uint64_t until);  // blocks the calling thread
    bool finished(uint64_t until);
    void loop();
};

struct Mark {  // one recording of an event
    Stream* stream = nullptr;
    uint64_t until = 0, tick = 0;
    Clock clock;
    std::shared_ptr<double> time;
};

struct Event {
    std::mutex m;
    std::shared_ptr<Mark> mark;
};

Stream* stream(int dev, int id);
Stream* stream_by_number(int number);
std::vector<Stream*> streams();
Stream* current(int dev);
Stream* exchange(Stream* s);
int id_from_pool(bool high);
int device_now();
int set_device(int dev);

void record(Event* e, Stream* s);
void block(Event* e, Stream* s);
bool query(Event* e);
void synchronize(Event* e);
void synchronize(Stream* s);
void synchronize_device(int dev);
void wait_for_device(int dev);  // the same, without raising the error of a job
double elapsed_ms(Event* a, Event* b);
void raise_device_errors();          // throws std::runtime_error if a job failed
std::string unraised_error();        // of a job, that no wait has raised
void fail(const std::string& text);  // a job failed

std::recursive_mutex& order_lock();
LaunchPtr order(Stream* s, const std::string& name, Kind kind, const std::vector<Span>& spans, const Mark* waits_for);
// The last launch is a collective of this communicator: is it ordered behind those of the device's other ones?
void order_on_device(Stream* s, const void* communicator);
void host_has_waited_for(const Clock& clock);
bool host_is_behind(int stream, uint64_t tick);
void forget_accesses(uintptr_t lo, uintptr_t hi);
std::vector<LaunchPtr> history();  // the last launches, oldest first
uint64_t launches();
size_t intervals_kept();

// ---------------------------------------------------------------- reports
struct Report {
    std::string kind, text;  // text: for kinds that are not about two launches
    LaunchPtr later, earlier;
    uintptr_t address = 0, block = 0;
    size_t block_bytes = 0;
    int device = -1;
    bool wrong_device = false;
    Place place;
};

void report(Report r);
void report(const char* kind, const std::string& text);
void deliver();  // hands new reports to the listener; no lock may be held
void listen(void (*fn)());
size_t report_count();
std::string reports_json(size_t from);
std::string json_text(const std::string& s);
std::string launch_json(const LaunchPtr& l);

void host_sync(const char* why);  // counts a wait of the host, with its place and thread; no lock may be held
uint64_t host_syncs();
std::string host_syncs_json();

// ---------------------------------------------------------------- the flight recorder (flight.cpp)
struct Shape {
    std::vector<int64_t> sizes;
    std::string type;
};

struct Flight {  // a collective, or a message between two ranks
    std::string name, group_name, group_about, thread;
    int group = 0, stack = 0;
    uint64_t id = 0, number = 0;  // of the collective or message in its group, from 1 on
    bool message = false;
    std::vector<Shape> inputs, outputs;
    int64_t launched = 0, started = 0, completed = 0;  // nanoseconds since 1970; 0: not yet
};

std::shared_ptr<Flight> flight_launched(Flight f, const std::vector<int64_t>& ranks);  // ranks: of the group
void flight_started(Flight& f);
void flight_completed(Flight& f);
std::string flights_json();

// ---------------------------------------------------------------- device memory
void* allocate(size_t n, int dev, Stream* s);  // nullptr: out of memory
void release(void* p);
void record_use(void* p, Stream* s);
void* alias(const void* p);    // the address at which workers see device and pinned memory
int device_of(const void* p);  // -1: not device memory
bool block_of(uintptr_t p, uintptr_t& base, size_t& bytes);
void empty_cache(int dev);

constexpr int kPools = 3;  // all, small, large

struct Count {
    int64_t current = 0, peak = 0, allocated = 0, freed = 0;
    void add(int64_t n);
    void reset_peak() { peak = current; }
};

struct Stats {
    std::map<std::string, Count[kPools]> counts;
    int64_t total = 0, retries = 0, ooms = 0, segments_made = 0, segments_freed = 0, syncs = 0;
};

Stats stats(int dev);
void reset_peak(int dev);
void reset_accumulated(int dev);
void set_limit(int dev, size_t bytes);

// ---------------------------------------------------------------- pinned host memory
void* pinned_allocate(size_t n);
void pinned_release(void* p);
bool pinned(const void* p);
void* pinned_alias(const void* p);
void pinned_register(void* p, size_t n);
void pinned_unregister(void* p);
// A copy uses these bytes until the host has waited for it; `device_writes`: the host may not even read them.
void pinned_use(const void* p, size_t n, Stream* s, uint64_t until, bool device_writes);
bool pinned_in_flight(const void* p, size_t n);  // has a copy that uses some of these bytes not run yet?
void pinned_settle();                            // the host has waited: what is ordered may be accessed again
bool pinned_fault(uintptr_t address, bool write);
// Reports an access of the host to bytes that a copy uses and that the host has not waited for.
void check_host_access(uintptr_t lo, uintptr_t hi, bool write, const std::string& what, bool only_registered);
bool any_registered_in_flight();
void install_fault_handler();
void paced(size_t bytes);

}  // namespace sim
